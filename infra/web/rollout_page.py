"""The page of one rollout as a conversation: prompts, thoughts, commands, the verdict, each token, and the rollout's events.

It comes from Redis or from its store, with its judgement and its group.
"""

import asyncio
import contextlib
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from infra.web.fleet import RedisReader
from infra.web.rollout_table import texts_of
from infra.web.run_journal import JsonRow, RolloutRow
from infra.web.runs import OpenRun
from pipeline import watching
from pipeline.cli import explain, finding, show
from pipeline.cli.explain import Life
from pipeline.cli.finding import FoundRollout
from pipeline.connection import RedisUnavailable
from pipeline.judge import JudgedStep, Judgement
from pipeline.message import MalformedMessage, unpack_float32s, unpack_int32s
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from pipeline.rollout_store.record import REASONS, TrainedTokens, TrainedTurn, unpack_halves
from pipeline.tokenizer import TokenizerBundle, get_tokenizer
from pipeline.trajectory import Failed, Turn
from pipeline.watching import WatchedTurns

_FAULTY = (MalformedMessage, ValueError)

TURNS_AT_ONCE = 50


@dataclass(frozen=True, slots=True)
class TurnQuery:
    """The wanted part of a rollout's turns: `TURNS_AT_ONCE` from `first` on, or all where it is None; and a text to find in all of them."""

    first: int | None = 0
    find: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "TurnQuery":
        """Raises ValueError naming the parameter that is wrong."""
        unknown = sorted(given.keys() - {"turns", "find"})
        if unknown:
            raise ValueError(f"{unknown[0]}: no such parameter; there are find, turns")
        text = given.get("turns", "0")
        if text != "all" and not re.fullmatch(r"[0-9]{1,9}", text):
            raise ValueError(
                f"turns: {text!r} is not a turn; give the number of the first one, from 0, or all"
            )
        return cls(None if text == "all" else int(text), given.get("find", ""))

    def indices(self, num_turns: int) -> range:
        """The numbers of the wanted turns."""
        if self.first is None:
            return range(num_turns)
        return range(min(self.first, num_turns), min(self.first + TURNS_AT_ONCE, num_turns))


def conversation(
    found: FoundRollout,
    row: RolloutRow | None,
    *,
    judgement: Judgement | None,
    life: Life | None,
    group: list[RolloutRow],
    token_texts: Mapping[int, str] | None,
    trained: TrainedTokens | None,
    part: TurnQuery,
    watched: WatchedTurns | None,
) -> JsonRow:
    """Everything that is known about a rollout, with the wanted part of its turns and an outline of all of them. `life` is None if there is
    no journal, `token_texts` if the tokenizer is not known, `trained` if no step trained the rollout, or the run does not keep what steps
    do with tokens. `watched` are the newest turns of an episode that is played.
    """
    trajectory, request = found.result, found.request
    shown = {
        "request_id": found.request_id,
        "task_id": request.task.id if request else (row.task_id if row else ""),
        "group_id": request.group_id if request else (row.group_id if row else ""),
        "state": found.state,
        "source": found.source or "redis",
        "head": row,
        "unreadable": found.unreadable,
        "problem": request.task.problem if request else "",
        "started_at": trajectory.started_at if trajectory else None,
        "finished_at": trajectory.finished_at if trajectory else None,
        "worker": trajectory.claim.worker if trajectory else "",
        "attempt": trajectory.claim.attempt if trajectory else 0,
        "seconds": _complete(trajectory.seconds) if trajectory and trajectory.seconds else None,
        "outcome": _outcome(found),
        "patch": _patch(found),
        "reward": _complete(trajectory.reward) if trajectory else None,
        **_turns(found, row, judgement, token_texts, trained, part, watched),
        "trained": {"step": trained.step, "version": trained.version} if trained else None,
        "judge": judgement.judge if judgement else "",
        "failures": [_complete(failure) for failure in found.failures],
        "life": life.moments if life else (),
        "verdict": life.verdict if life else "",
        "judging": life.judging if life else "",
        "group": [_member(one) for one in group],
    }
    return show.plain(shown)


def _turns(
    found: FoundRollout,
    row: RolloutRow | None,
    judgement: Judgement | None,
    token_texts: Mapping[int, str] | None,
    trained: TrainedTokens | None,
    part: TurnQuery,
    watched: WatchedTurns | None,
) -> JsonRow:
    """The wanted part of the turns, an outline of all of them, and the turns in which the wanted text occurs."""
    trajectory = found.result
    steps = {step.turn: step for step in judgement.steps} if judgement else {}
    by_turn = {one.turn: one for one in trained.turns} if trained else {}
    is_trained = row is not None and row.fate == "trained"
    turns = trajectory.turns if trajectory else watched.turns if watched else ()
    first = watched.first if watched and not trajectory else 0
    return {
        "turns": [
            {
                **_turn(first + index, turns[index], steps.get(index), token_texts, is_trained=is_trained),
                "trained": _trained_turn(by_turn[index], turns[index]) if index in by_turn else None,
            }
            for index in (part.indices(len(turns)) if trajectory else range(len(turns)))
        ],
        "outline": [_NOT_SHOWN] * first
        + [_outline(turn, steps.get(index)) for index, turn in enumerate(turns)],
        "found": _found(turns, part.find),
    }


_NOT_SHOWN: JsonRow = {
    "asked_at": 0.0,
    "engine_wait_s": 0.0,
    "generate_s": 0.0,
    "command_s": 0.0,
    "num_sampled": 0,
    "num_commands": 0,
    "is_failed": False,
    "score": None,
    "commands": 0,
}
"""The outline of a turn of an episode that is played, of which only the newest turns are shown."""


def _outline(turn: Turn, judged: JudgedStep | None) -> JsonRow:
    """The facts about a turn by which a reader finds it."""
    observations = [action.observation for action in turn.actions if action.observation is not None]
    commands = "\0".join(action.command for action in turn.actions)
    return {
        "asked_at": turn.asked_at,
        "engine_wait_s": turn.engine_wait_s,
        "generate_s": turn.generate_s,
        "command_s": sum(one.wall_s for one in observations),
        "num_sampled": len(turn.sampled) // 4,
        "num_commands": len(turn.actions),
        "is_failed": any(one.exit_code != 0 for one in observations),
        "score": judged.score if judged else None,
        # So that two rollouts can be compared without their texts.
        "commands": zlib.crc32(commands.encode(errors="replace")),
    }


def _found(turns: Sequence[Turn], text: str) -> list[int] | None:
    """The turns in which the text occurs; None where nothing is looked for."""
    if not text:
        return None
    wanted = text.casefold()
    return [
        index for index, turn in enumerate(turns) if any(wanted in one.casefold() for one in texts_of(turn))
    ]


def tokens_of(turn: Turn, token_texts: Mapping[int, str] | None, *, is_trained: bool) -> list[JsonRow]:
    """The sampled tokens. A log-prob or version that the turn does not have is None."""
    ids, logprobs = unpack_int32s(turn.sampled), unpack_float32s(turn.logprobs)
    versions: list[int | None] = [None] * len(ids)
    for span in turn.versions:
        first, last = max(0, span.start), min(len(ids), span.end)
        versions[first:last] = [span.version] * max(0, last - first)
    return [
        {
            "id": token,
            "logprob": logprobs[place] if place < len(logprobs) else None,
            "version": versions[place],
            "trained": is_trained,
            "text": token_texts.get(token) if token_texts is not None else None,
        }
        for place, token in enumerate(ids)
    ]


def _turn(
    index: int,
    turn: Turn,
    judged: JudgedStep | None,
    token_texts: Mapping[int, str] | None,
    *,
    is_trained: bool,
) -> JsonRow:
    said = turn.said
    try:
        tokens, num_fed = tokens_of(turn, token_texts, is_trained=is_trained), len(unpack_int32s(turn.fed))
    except _FAULTY:  # arrays of an impossible length: the text can still be read
        tokens, num_fed = [], 0
    return {
        "index": index,
        "told": [_complete(message) for message in turn.told],
        "thought": said.reasoning,
        "text": said.content,
        "tool_calls": [_complete(call) for call in said.tool_calls],
        "raw": turn.text,
        "stop": turn.stop,
        "finish_reason": turn.finish_reason,
        "engine": turn.engine,
        "generate_s": turn.generate_s,
        "cut": _complete(turn.cut),
        "actions": [_complete(action) for action in turn.actions],
        "kept_tokens": turn.kept_tokens,
        "after": turn.after,
        "thread": turn.thread,
        "aside": turn.aside,
        "num_fed": num_fed,
        "num_sampled": len(tokens),
        "versions": [_complete(span) for span in turn.versions],
        "tokens": tokens,
        "judged": _judged(judged),
    }


def _judged(step: JudgedStep | None) -> JsonRow | None:
    """The judge's result for a turn; of a teacher's log-probs only their number."""
    if step is None:
        return None
    shown = _complete(step) | {"num_logprobs": step.num_logprobs}
    shown.pop("logprobs", None)
    return shown


def _trained_turn(trained: TrainedTurn, turn: Turn) -> JsonRow | None:
    """The step's data for each token of the turn; None if the record is about other tokens."""
    try:
        columns = {
            "logprobs": [*unpack_float32s(trained.logprobs)],
            "advantages": [*unpack_float32s(trained.advantages)],
            "weights": [*unpack_halves(trained.weights)],
            "reasons": [REASONS[code] for code in trained.reasons],
        }
    except (*_FAULTY, IndexError):  # a record from another release
        return None
    num_sampled = len(turn.sampled) // 4
    return columns if all(len(column) == num_sampled for column in columns.values()) else None


def _outcome(found: FoundRollout) -> JsonRow | None:
    outcome = found.result.outcome if found.result else None
    if outcome is None:
        return None
    shown = _complete(outcome)
    shown.pop("patch", None)
    return {"kind": type(outcome).__name__.lower(), **shown}


def _patch(found: FoundRollout) -> str:
    outcome = found.result.outcome if found.result else None
    return "" if outcome is None or isinstance(outcome, Failed) else outcome.patch.decode(errors="replace")


def _member(row: RolloutRow) -> JsonRow:
    names = ("request_id", "member", "reward", "outcome", "fate")
    return {name: getattr(row, name) for name in names}


def _complete(value: Any) -> Any:
    """A message with all its fields: on the wire, fields with their defaults are left out."""
    match value:
        case msgspec.Struct():
            return {name: _complete(getattr(value, name)) for name in value.__struct_fields__}
        case tuple():
            return [_complete(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


TokenTexts = Mapping[int, str]
_WORD_START = "\u2581"  # means a space in vocabularies of SentencePiece


class _Addition(msgspec.Struct):
    """A token that the vocabulary's model does not make, such as one that ends a turn."""

    id: int
    content: str


class _VocabularyModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = msgspec.field(default_factory=dict[str, int])


class _VocabularyFile(msgspec.Struct):
    """The fields of `tokenizer.json` that are read."""

    model: _VocabularyModel
    added_tokens: list[_Addition] = msgspec.field(default_factory=list[_Addition])
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def token_texts(tokenizer_json: bytes) -> TokenTexts | None:
    """The text of each token by its id; None for a file in an unknown format."""
    try:
        file = msgspec.json.decode(tokenizer_json, type=_VocabularyFile)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    vocabulary = file.model.vocab
    pairs = (
        [(piece, number) for piece, number in vocabulary.items()]
        if isinstance(vocabulary, dict)
        else [(piece, number) for number, (piece, _) in enumerate(vocabulary)]
    )
    is_byte_level = b"ByteLevel" in bytes(file.pre_tokenizer) + bytes(file.decoder)
    text_of = _byte_level_text() if is_byte_level else _plain_text
    texts = {number: text_of(piece) for piece, number in pairs}
    texts.update({one.id: one.content for one in file.added_tokens})
    return texts


def _plain_text(piece: str) -> str:
    return piece.replace(_WORD_START, " ")


def _byte_level_text() -> Callable[[str], str]:
    """Returns the decoder of byte-level pieces. Each character of a piece encodes one byte: a printable byte is itself, the others, in
    order, are the characters from 256 on."""
    themselves = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {chr(byte): byte for byte in themselves}
    others = [byte for byte in range(256) if byte not in set(themselves)]
    byte_of |= {chr(256 + place): byte for place, byte in enumerate(others)}

    def text_of(piece: str) -> str:
        if any(character not in byte_of for character in piece):
            return piece
        return bytes(byte_of[character] for character in piece).decode(errors="replace")

    return text_of


MAX_TOKENIZERS = 4  # number of tokenizers whose texts are kept
WEIGHTS, TOKENIZER = "weights", "tokenizer.json"


class RolloutPages:
    """Everything that is known about one rollout. Redis knows more than the store, and forgets it sooner."""

    def __init__(self, redis: RedisReader) -> None:
        self._redis = redis
        self._texts: dict[str, TokenTexts | None] = {}

    async def page(self, run: OpenRun, request_id: str, part: TurnQuery) -> JsonRow:
        """The page of the rollout. Raises LookupError if neither Redis nor the run's directory knows it."""
        row, group = await asyncio.to_thread(_row_and_group, run, request_id)
        watched: WatchedTurns | None = None
        try:
            found = await self._redis.read(lambda redis: finding.rollout(redis, request_id, [run.directory]))
            watched = (
                None
                if found.result or not found.lease
                else await self._redis.read(lambda redis: _watched(redis, request_id))
            )
            life = await self._redis.read(lambda redis: _life(redis, request_id, run))
            judgement = await self._redis.read(lambda redis: _judgement(redis, request_id))
        except (RedisUnavailable, MalformedMessage):
            found, life, judgement = await asyncio.to_thread(_stored, run, request_id)
        except LookupError:
            if row is None:
                raise
            found, life, judgement = await asyncio.to_thread(_stored, run, request_id)
        if judgement is None:
            kept = await asyncio.to_thread(finding.find_stored, [run.directory], request_id)
            judgement = kept[0].rollout.judgement if kept else None
        return await asyncio.to_thread(
            conversation,
            found,
            row,
            judgement=judgement,
            life=life,
            group=group,
            token_texts=await self._token_texts(found, run),
            trained=await asyncio.to_thread(_trained, run, row),
            part=part,
            watched=watched,
        )

    async def _token_texts(self, found: FoundRollout, run: OpenRun) -> TokenTexts | None:
        """The texts of the request's tokenizer, which is stored in Redis, and in the run's directory with each version of the weights."""
        name = found.request.tokenizer if found.request else ""
        if not name:
            return None
        if name not in self._texts:
            try:
                bundle = await self._redis.read(lambda redis: _bundle(redis, name))
                tokenizer_json = bundle.tokenizer_json if bundle else None
            except (RedisUnavailable, MalformedMessage):
                tokenizer_json = None
            if tokenizer_json is None:
                tokenizer_json = await asyncio.to_thread(_exported_tokenizer, run)
            if tokenizer_json is None:
                return None
            while len(self._texts) >= MAX_TOKENIZERS:
                del self._texts[next(iter(self._texts))]
            self._texts[name] = await asyncio.to_thread(token_texts, tokenizer_json)
        return self._texts[name]


def _exported_tokenizer(run: OpenRun) -> bytes | None:
    """The tokenizer of any exported version: all versions of a run have the tokenizer of the model that it started with."""
    for path in run.directory.glob(f"{WEIGHTS}/*/{TOKENIZER}"):
        with contextlib.suppress(OSError):  # another process may remove the version in the meantime
            return path.read_bytes()
    return None


async def _watched(redis: Redis, request_id: str) -> WatchedTurns | None:
    """The newest turns of an episode that is played; the worker writes more of them for as long as somebody asks."""
    with contextlib.suppress(RedisError):  # a full Redis accepts no write
        await watching.watch(redis, request_id)
    return await watching.shown(redis, request_id)


async def _bundle(redis: Redis, name: str) -> TokenizerBundle | None:
    return await get_tokenizer(redis, name)


async def _judgement(redis: Redis, request_id: str) -> Judgement | None:
    found = await finding.judging_of(redis, request_id)
    return None if found is None else found.result


async def _life(redis: Redis, request_id: str, run: OpenRun) -> Life | None:
    try:
        return await explain.life(redis, request_id, run.directory)
    except LookupError:
        return None


def _stored(run: OpenRun, request_id: str) -> tuple[FoundRollout, Life | None, Judgement | None]:
    """The rollout as the directory alone knows it. A rollout that only the journal has is shown without a body."""
    try:
        found = finding.stored_rollout([run.directory], request_id)
    except LookupError:
        if request_id not in run.rollouts.rows:
            raise
        found = finding.Found(
            request_id=request_id,
            state="answered",
            request=None,
            lease=None,
            result=None,
            failures=(),
            unreadable="its body is in no store: the recipe keeps none, or the store removed it for newer ones",
            source=str(run.directory),
        )
    try:
        life = explain.stored_life(request_id, run.directory)
    except LookupError:
        life = None
    return found, life, None


def _trained(run: OpenRun, row: RolloutRow | None) -> TrainedTokens | None:
    """The work of the step that trained the rollout.

    The journal decides which step that is: a step that a resume undid may have left a record, too.
    """
    if row is None or row.step is None:
        return None
    found = RolloutStore(run.directory / DIRECTORY).trained([row.request_id]).get(row.request_id)
    return found if found is not None and found.step == row.step else None


def _row_and_group(run: OpenRun, request_id: str) -> tuple[RolloutRow | None, list[RolloutRow]]:
    with run.lock:
        row = run.rollouts.rows.get(request_id)
        return row, run.rollouts.group(row.group_id) if row is not None and row.group_id else []
