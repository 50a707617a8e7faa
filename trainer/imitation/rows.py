"""The rows of a fine-tuning run: lines of JSON files, read and checked before the learner is built, and the order of their training.

A row with `samples` is trained exactly as these say, token by token; an export of rollouts has them. The messages of any other row become
the ids that a rollout with these replies would have (`pipeline/chat_tokens.py`): the messages before the first reply are the first prompt,
and of each reply its ids and the token that ends it are trained, unless its `weight` is 0.

A rollout with several conversations is exported as several lines, of which the first has the samples of all. The others, which have the
same request id and no samples, are therefore left out.

Shape suffix T: tokens of one sample.
"""

import hashlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pipeline.chat import ChatMessage, Role, ToolCall, storable_message
from pipeline.chat_tokens import ChatTokens
from pipeline.errors import RequestError
from pipeline.message import json_line
from pipeline.tokenizer import TokenizerBundle
from trainer.batching.batch import Batch, Sample
from trainer.inputs import max_positions
from trainer.recipe import ImitationRecipe

L = TypeVar("L")

GZIP_MARK = b"\x1f\x8b"

ROLES: tuple[Role, ...] = get_args(Role)


class RowFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] = "{}"


class RowCall(msgspec.Struct, frozen=True):
    """A tool call in the format of OpenAI's interface."""

    function: RowFunction
    id: str = ""


class RowMessage(msgspec.Struct, frozen=True):
    """A message in the format of OpenAI's interface. A reply whose `weight` is 0 is not trained."""

    role: str
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[RowCall] | None = None
    tool_call_id: str = ""
    weight: float = 1.0


class RowSample(msgspec.Struct, frozen=True):
    token_ids: list[int]
    loss_mask: list[int]  # 1 for each trained token, 0 for the others


class RowOrigin(msgspec.Struct, frozen=True):
    """The part of a line that says whether its tokens are in another line."""

    request_id: str = ""
    samples: list[msgspec.Raw] = msgspec.field(default_factory=list[msgspec.Raw])


class RowLine(msgspec.Struct, frozen=True):
    """One line of a file. Other fields are ignored."""

    messages: list[RowMessage] = msgspec.field(default_factory=list[RowMessage])
    samples: list[RowSample] = msgspec.field(default_factory=list[RowSample])
    tools: list[dict[str, Any]] | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """One unbroken run of tokens."""

    tokens_T: npt.NDArray[np.int32]
    trained_T: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ImitationRow:
    place: str  # file and line, for people
    samples: tuple[RowTokens, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens_T) for sample in self.samples)

    @property
    def num_trained_tokens(self) -> int:
        return sum(int(sample.trained_T.sum()) for sample in self.samples)

    @property
    def digest(self) -> bytes:
        """The digest of its tokens, and of which of them are trained."""
        found = hashlib.sha256()
        for sample in self.samples:
            found.update(len(sample.tokens_T).to_bytes(8, "little"))
            found.update(sample.tokens_T.tobytes() + sample.trained_T.tobytes())
        return found.digest()

    def as_samples(self, request_id: str) -> tuple[Sample, ...]:
        """The samples for the learner. No policy sampled them, so every token has log-prob 0, advantage 0 and version -1."""
        return tuple(
            Sample(
                request_id=request_id,
                group_id=request_id,
                branch=number,
                tokens_T=sample.tokens_T,
                trained_T=sample.trained_T,
                behaviour_logprobs_T=np.zeros(len(sample.tokens_T), np.float32),
                advantages_T=np.zeros(len(sample.tokens_T), np.float32),
                versions_T=np.full(len(sample.tokens_T), -1, np.int32),
            )
            for number, sample in enumerate(self.samples)
        )


@dataclass(slots=True)
class RowCounts:
    """What the files of one key of the recipe held."""

    num_exact: int = 0  # rows trained from token ids
    num_rendered: int = 0  # rows whose messages were rendered
    num_continued: int = 0  # lines whose tokens are in the first line of their rollout
    too_long: list[str] = field(default_factory=list[str])  # places of the rows that were left out


@dataclass(frozen=True, slots=True)
class ImitationData:
    """The rows of a run in the order of their files, without those left out."""

    train: Sequence[ImitationRow]
    heldout: Sequence[ImitationRow]
    counts: RowCounts
    heldout_counts: RowCounts

    @property
    def digest(self) -> str:
        """The digest of all rows: a run may only be resumed with the same, because the held-out loss is compared row by row."""
        digests = [row.digest for rows in (self.train, self.heldout) for row in rows]
        return hashlib.sha256(b"".join([len(self.train).to_bytes(8, "little"), *digests])).hexdigest()

    @property
    def shared_words(self) -> str:
        """A sentence about the held-out rows that are training rows too; "" if there is none."""
        trained = {row.digest for row in self.train}
        num_shared = sum(row.digest in trained for row in self.heldout)
        if not num_shared:
            return ""
        return f"{num_shared:,} of {len(self.heldout):,} held-out rows are training rows too, so their loss falls by memorising"


def read_data(recipe: ImitationRecipe, bundle: TokenizerBundle) -> ImitationData:
    """The rows of the recipe's files. Raises ValueError naming the key, the file, the line, the field and the fix."""
    tokens = ChatTokens(bundle, cast(Callable[[str], Any], Tokenizer.from_str))
    limit = RowLimit.of(recipe, max_positions(Path(recipe.model)))
    reader = RowReader(tokens, limit)
    train, counts = reader.read("data.train", recipe.data.train)
    if not train:
        raise ValueError(f"data.train: no row is left to train on: {counts_words(counts)}")
    heldout, heldout_counts = reader.read("data.heldout", recipe.data.heldout)
    if recipe.data.heldout and not heldout:
        raise ValueError(f"data.heldout: no row is left to measure: {counts_words(heldout_counts)}")
    return ImitationData(train, heldout, counts, heldout_counts)


def counts_words(counts: RowCounts) -> str:
    """What became of the lines, in words."""
    words = [f"{counts.num_exact:,} rows as token ids, {counts.num_rendered:,} rendered by the chat template"]
    if counts.num_continued:
        words.append(f"{counts.num_continued:,} further conversations of these, whose tokens they have")
    if counts.too_long:
        words.append(
            f"{len(counts.too_long):,} left out because they are too long, the first at {counts.too_long[0]}"
        )
    return "; ".join(words)


@dataclass(frozen=True, slots=True)
class RowLimit:
    """The length of a row's longest sample, and what becomes of longer rows."""

    max_tokens: int
    words: str  # what the limit is, and how to raise it
    leaves_out: bool

    @classmethod
    def of(cls, recipe: ImitationRecipe, num_positions: int) -> "RowLimit":
        """The recipe's limit, or the number of positions that the model holds if that is less."""
        leaves_out = recipe.data.too_long == "leave_out"
        if num_positions < recipe.max_tokens:
            words = f"max_position_embeddings = {num_positions} of the model: choose another model"
            return cls(num_positions, words, leaves_out)
        words = f"data.max_tokens = {recipe.max_tokens}: raise that and learner.micro_batch_tokens"
        return cls(recipe.max_tokens, words, leaves_out)


class RowReader:
    """Reads rows for one tokenizer."""

    def __init__(self, tokens: ChatTokens, limit: RowLimit) -> None:
        self._tokens = tokens
        self._limit = limit
        self._with_tools: dict[str, ChatTokens] = {}  # by the tools as JSON

    def read(self, key: str, paths: Sequence[str]) -> tuple[list[ImitationRow], RowCounts]:
        """The rows of all files, and what became of their lines. Raises ValueError as `read_data` does."""
        origins = (origin for path in paths for _, origin in _lines(key, Path(path), RowOrigin))
        exact = {origin.request_id for origin in origins if origin.samples and origin.request_id}
        rows, counts = list[ImitationRow](), RowCounts()
        for place, line in (found for path in paths for found in _lines(key, Path(path), RowLine)):
            if not line.samples and line.request_id in exact:
                counts.num_continued += 1
                continue
            try:
                samples = self._samples(line)
                longest = max(len(sample.tokens_T) for sample in samples)
                if longest > self._limit.max_tokens and not self._limit.leaves_out:
                    raise ValueError(
                        f"it has {longest} tokens in one sample, more than {self._limit.words}, or set data.too_long = "
                        '"leave_out"'
                    )
            except ValueError as error:
                raise ValueError(f"{key}: {place}: {error}") from error
            if longest > self._limit.max_tokens:
                counts.too_long.append(place)
                continue
            counts.num_exact += bool(line.samples)
            counts.num_rendered += not line.samples
            rows.append(ImitationRow(place, samples))
        return rows, counts

    def _samples(self, line: RowLine) -> tuple[RowTokens, ...]:
        if not line.samples and not line.messages:
            raise ValueError("messages is missing; give messages, or samples with token_ids and loss_mask")
        given = [self._exact(number, sample) for number, sample in enumerate(line.samples)]
        given = given or [self._rendered(line)]
        # A sample without a trained token teaches nothing.
        trained = tuple(sample for sample in given if sample.trained_T.any())
        if not trained:
            where = (
                "samples: loss_mask is 0" if line.samples else "messages: weight is 0, or there is no reply"
            )
            raise ValueError(
                f"{where} everywhere, so nothing is trained; correct the row, or remove the line"
            )
        return trained

    def _exact(self, number: int, sample: RowSample) -> RowTokens:
        where, size = f"samples[{number}]", self._tokens.vocab_size
        ids, mask = sample.token_ids, sample.loss_mask
        if len(ids) != len(mask):
            raise ValueError(
                f"{where}: token_ids has {len(ids)} entries and loss_mask {len(mask)}; give one of each for every token"
            )
        outside = [one for one in (min(ids), max(ids)) if not 0 <= one < size] if ids else []
        if outside:
            raise ValueError(
                f"{where}.token_ids holds {outside[0]}, outside of the model's vocabulary of {size}; take rows of a model with the same "
                "tokenizer, or rows without samples"
            )
        if not {*mask} <= {0, 1}:
            raise ValueError(f"{where}.loss_mask holds {max(mask, key=abs)}; each entry must be 0 or 1")
        if mask and mask[0]:
            raise ValueError(
                f"{where}.loss_mask begins with 1; nothing comes before the first token, so set its entry to 0"
            )
        return RowTokens(np.array(ids, np.int32), np.array(mask, np.bool_))

    def _rendered(self, line: RowLine) -> RowTokens:
        messages, weights = _conversation(line)
        _check_tools(line.tools or [])
        try:
            tokens = self._for_tools(line.tools or [])
            ids, trained = _rendering(tokens, messages, weights)
        except RequestError as error:
            raise ValueError(
                f"messages: {error}; give the row samples, choose another chat.template, or change the row"
            ) from error
        return RowTokens(np.array(ids, np.int32), np.array(trained, np.bool_))

    def _for_tools(self, tools: list[dict[str, Any]]) -> ChatTokens:
        if not tools:
            return self._tokens
        name = json_line(tools)
        if name not in self._with_tools:
            self._with_tools[name] = self._tokens.with_tools(tools)
        return self._with_tools[name]


def _lines(key: str, path: Path, kind: type[L]) -> Iterator[tuple[str, L]]:
    """The lines of a file that are not empty, each with its place. Raises ValueError."""
    decoder = msgspec.json.Decoder(kind)
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(
            f"{key}: {path}: {error.strerror}; give a file of rows, one JSON object a line"
        ) from error
    with file:
        for number, text in enumerate(file, start=1):
            place = f"{path}, line {number}"
            if number == 1 and text.startswith(GZIP_MARK):
                raise ValueError(f"{key}: {path}: it is compressed by gzip; decompress it")
            text = text.removeprefix(BOM_UTF8) if number == 1 else text
            if not text.strip():
                continue
            try:
                line = decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(f"{key}: {place}: {_json_fault(str(error))}") from error
            yield place, line


def _json_fault(text: str) -> str:
    """The fault of a line, with the field if it is one."""
    fault, _, where = text.partition(" - at `$")
    if not where:
        return f"not a row: {fault}; give one JSON object with messages or samples"
    return f"{where.rstrip('`').lstrip('.') or 'the line'}: {fault}; correct it, or remove the line"


def _conversation(line: RowLine) -> tuple[list[ChatMessage], list[bool]]:
    """The messages up to the last reply, and whether each is trained. Raises ValueError."""
    messages, weights = list[ChatMessage](), list[bool]()
    for number, one in enumerate(line.messages):
        where = f"messages[{number}]"
        if one.role not in ROLES:
            raise ValueError(f'{where}.role is "{one.role}"; it must be one of {", ".join(ROLES)}')
        if (one.tool_calls or one.role == "tool") and not line.tools:
            raise ValueError(
                f"{where} is about a tool, and the row has no tools; give the tools that the model was offered"
            )
        if one.role == "assistant" and (not messages or messages[-1].role == "assistant"):
            before = "no message before it" if not messages else "another one right before it"
            raise ValueError(f"{where} is a reply with {before}; give what it replies to, or join the two")
        _check_words(where, one)
        messages.append(_message(one))
        weights.append(one.role == "assistant" and one.weight != 0)
    num_used = max((number for number, one in enumerate(messages, 1) if one.role == "assistant"), default=0)
    if not num_used:
        raise ValueError("messages: there is no reply of the role assistant; give one, or remove the line")
    return messages[:num_used], weights[:num_used]


def _check_words(where: str, message: RowMessage) -> None:
    """Raises ValueError for a message without words. Fields with other names are ignored, so that is how a wrong name is found."""
    if message.role != "assistant" and message.content is None:
        raise ValueError(f"{where}.content is missing; give the text of the message, which may be empty")
    is_empty = not (message.content or message.reasoning_content or message.tool_calls)
    if message.role == "assistant" and is_empty and message.weight != 0:
        raise ValueError(
            f"{where} is an empty reply, and training it teaches to say nothing; give content, reasoning_content or tool_calls, or weight 0"
        )


def _check_tools(tools: Sequence[dict[str, Any]]) -> None:
    for number, tool in enumerate(tools):
        function: Any = tool.get("function")
        if not isinstance(function, dict) or not isinstance(cast(dict[str, Any], function).get("name"), str):
            raise ValueError(
                f"tools[{number}].function.name is missing; give each tool as OpenAI's API does: "
                '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
            )


def _message(given: RowMessage) -> ChatMessage:
    calls = tuple(
        ToolCall(
            name=call.function.name,
            arguments=call.function.arguments
            if isinstance(call.function.arguments, str)
            else msgspec.json.encode(call.function.arguments).decode(),
            id=call.id,
        )
        for call in given.tool_calls or ()
    )
    return storable_message(
        ChatMessage(
            cast(Role, given.role),
            given.content or "",
            reasoning=given.reasoning_content or "",
            tool_calls=calls,
            tool_call_id=given.tool_call_id,
        )
    )


def _rendering(
    tokens: ChatTokens, messages: Sequence[ChatMessage], weights: Sequence[bool]
) -> tuple[list[int], list[bool]]:
    """The ids of a conversation that ends with a reply, and whether each is trained. Raises RequestError."""
    replies = [number for number, one in enumerate(messages) if one.role == "assistant"]
    ids = tokens.first_prompt(messages[: replies[0]])
    trained = [False] * len(ids)
    for number, following in zip(replies, [*replies[1:], None], strict=True):
        reply = tokens.reply(messages[number])
        ids += reply
        trained += [weights[number]] * len(reply)
        if following is not None:
            fed = tokens.suffix(messages[number + 1 : following], last_id=reply[-1])
            ids += fed
            trained += [False] * len(fed)
    return ids, trained


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The rows of each step: a function of seed, epoch and step alone, so that a resumed run goes on at the same row."""

    num_rows: int
    rows_per_step: int
    num_steps: int
    num_in_all: int  # rows that all steps together train
    seed: int

    @classmethod
    def of(cls, recipe: ImitationRecipe, num_rows: int) -> "RowOrder":
        size = recipe.batch.rows_per_step
        if recipe.num_steps is not None:
            return cls(num_rows, size, recipe.num_steps, recipe.num_steps * size, recipe.seed)
        num_in_all = (recipe.num_epochs or 0) * num_rows
        return cls(num_rows, size, -(-num_in_all // size), num_in_all, recipe.seed)

    def rows_of(self, step: int) -> list[tuple[int, int]]:
        """Epoch and row, both from 0, of each row that a step (first: 1) trains. A step may end one epoch and begin the next."""
        first = (step - 1) * self.rows_per_step
        places = range(first, min(first + self.rows_per_step, self.num_in_all))
        return [
            (
                place // self.num_rows,
                _order(self.seed, place // self.num_rows, self.num_rows)[place % self.num_rows],
            )
            for place in places
        ]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num_rows: int) -> list[int]:
    return np.random.default_rng((seed, epoch)).permutation(num_rows).tolist()


def make_batch_of_rows(step: int, chosen: Sequence[tuple[int, int]], rows: Sequence[ImitationRow]) -> Batch:
    """The batch of a step that trains these rows, each given by its epoch and its number."""
    ids = tuple(f"{epoch}/{number}" for epoch, number in chosen)
    samples = (rows[number].as_samples(name) for name, (_, number) in zip(ids, chosen, strict=True))
    return Batch(
        step=step,
        samples=tuple(sample for of_row in samples for sample in of_row),
        temperature=1.0,
        num_trajectories=len(chosen),
        request_ids=ids,
        lag_max=0,
        lag_mean=0.0,
    )
