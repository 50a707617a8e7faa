"""Makes the samples of a trajectory, checks them before they reach the learner, and finds which part of a reply each token belongs to.

There is one sample per unbroken run of turns, in which each turn's prompt repeats what came before it, so the tokens of prompts are not
repeated for each turn. Where the context was cut, or a second turn follows the same one, another sample starts with the tokens that it
kept, which it does not train; if the request sets `every_step`, each turn is a sample of its own. Asides train nothing. Every sampled token
is trained in exactly one sample, after exactly the tokens that the engine held, with the id, log-prob and weight version that the engine
reported: `check_provenance` recomputes the worker's digests from the sample. Samples are made without a tokenizer. Shape suffix T: tokens
of one sample.

A sampled token is part of a thought, a call of a tool or a command, other text, or the end of the turn (`token_kinds`). Workers have taken
each reply's text apart, so its parts are known in characters. Which tokens those are is found by decoding, and only for the requested
replies. Delimiters around thoughts and calls belong to them. The kinds serve statistics, not training: a token across two parts counts with
the first.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

import numpy as np
import numpy.typing as npt

from pipeline.chat import THOUGHT_MARKS, ChatMessage
from pipeline.message import unpack_float32s, unpack_int32s
from pipeline.trajectory import LOGPROB_SLACK, ReplyDigester, Trajectory, Turn, runs_of, version_at
from trainer.batching.batch import ReplyPart, Sample, SampledReply, TokenKind

KINDS: tuple[TokenKind, ...] = get_args(TokenKind)

Decode = Callable[[Sequence[int]], str]


def parts_of(turn: Turn) -> tuple[ReplyPart, ...]:
    """The parts of a reply's text, in order and none of them empty."""
    text, said = turn.text, turn.said
    begin = _end_of_thought(text, said)
    parts = [ReplyPart("thought", begin)]
    for start, end in _calls(text, said, begin) if said.tool_calls else _commands(turn, begin):
        parts += [ReplyPart("text", start), ReplyPart("call", end)]
    parts.append(ReplyPart("text", len(text)))
    ends = [0, *(part.end for part in parts)]
    return tuple(part for part, before in zip(parts, ends, strict=False) if part.end > before)


def token_kinds(sample: Sample, decode: Decode) -> npt.NDArray[np.int8]:
    """The kind of each token of a sample, as its index in KINDS."""
    kinds_T = np.zeros(sample.num_tokens, np.int8)
    for reply in sample.replies:
        ids = sample.tokens_T[reply.start : reply.end].tolist()
        if reply.is_ended:
            kinds_T[reply.end - 1] = KINDS.index("end")
            ids.pop()
        begin = 0
        for part in reply.parts:
            end = _num_tokens(ids, part.end, decode)
            kinds_T[reply.start + begin : reply.start + end] = KINDS.index(part.kind)
            begin = end
        kinds_T[reply.start + begin : reply.start + len(ids)] = KINDS.index("text")
    return kinds_T


def _num_tokens(ids: Sequence[int], num_chars: int, decode: Decode) -> int:
    """The smallest number of leading tokens whose text has `num_chars` characters; all of them if the text is shorter."""
    return bisect_left(range(len(ids)), num_chars, key=lambda number: len(decode(ids[:number])))


def _end_of_thought(text: str, said: ChatMessage) -> int:
    """The end of the thoughts and of the delimiter after them; 0 if there are no thoughts, or not in one piece."""
    if not said.reasoning or (found := text.find(said.reasoning)) < 0:
        return 0
    end = found + len(said.reasoning)
    for _, mark in THOUGHT_MARKS.values():
        place = end + len(text[end:]) - len(text[end:].lstrip())
        if text.startswith(mark, place):
            return place + len(mark)
    return end


def _calls(text: str, said: ChatMessage, begin: int) -> Iterator[tuple[int, int]]:
    """The parts of a reply that are neither thought nor content, if it holds tool calls."""
    for line in filter(None, map(str.strip, said.content.splitlines())):
        found = text.find(line, begin)
        if found < 0:
            continue
        if text[begin:found].strip():
            yield begin, found
        begin = found + len(line)
    if text[begin:].strip():
        yield begin, len(text)


def _commands(turn: Turn, begin: int) -> Iterator[tuple[int, int]]:
    """The commands of a reply that writes them as text."""
    for action in turn.actions:
        found = turn.text.find(action.command, begin) if action.command else -1
        if found >= 0:
            begin = found + len(action.command)
            yield found, begin


class AlteredReply(ValueError):
    """The tokens, prompt or log-probs of a reply do not match its digest."""


def check_provenance(samples: Iterable[Sample]) -> None:
    """Raises AlteredReply naming the first reply that the engine did not sample in this form, or that has no digest."""
    for sample in samples:
        _check_replies(sample)


def _check_replies(sample: Sample) -> None:
    tokens_T, logprobs_T = sample.tokens_T.astype("<i4"), sample.behaviour_logprobs_T.astype("<f4")
    in_replies_T = np.zeros(sample.num_tokens, np.bool_)
    digester, position = ReplyDigester(), 0
    for reply in sample.replies:
        if not reply.digest:
            raise AlteredReply(
                f"turn {reply.turn} has no digest: its worker is older than this trainer; update the workers"
            )
        digester.extend(tokens_T[position : reply.start].tobytes())
        sampled = tokens_T[reply.start : reply.end].tobytes()
        if digester.digest(sampled, logprobs_T[reply.start : reply.end].tobytes()) != reply.digest:
            raise AlteredReply(
                f"turn {reply.turn} is not what the engine sampled: prompt, tokens or log-probs differ from its digest"
            )
        digester.extend(sampled)
        in_replies_T[reply.start : reply.end] = True
        position = reply.end
    if not np.array_equal(in_replies_T, sample.trained_T):
        raise AlteredReply(f"sample {sample.branch} trains other tokens than those of its replies")


@dataclass(slots=True)
class Branch:
    """An unbroken run of tokens under construction. All lists have one entry per token."""

    tokens: list[int] = field(default_factory=list[int])
    trained: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    replies: list[SampledReply] = field(default_factory=list[SampledReply])
    # Experts of each token but the last, which has not been an input yet; no columns if the experts were not asked for.
    routing: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, 0), np.uint8))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def prefix(self, num_tokens: int) -> "Branch":
        """A run that starts with this one's first tokens, which the policy sees again and which are not trained again."""
        return Branch(
            self.tokens[:num_tokens],
            [False] * num_tokens,
            [0.0] * num_tokens,
            [-1] * num_tokens,
            routing=self.routing[: max(num_tokens - 1, 0)],
        )

    def extend(self, number: int, turn: Turn) -> None:
        fed, sampled = unpack_int32s(turn.fed), unpack_int32s(turn.sampled)
        logprobs = unpack_float32s(turn.logprobs)
        if len(logprobs) != len(sampled):
            raise ValueError(f"{len(sampled)} sampled tokens, but {len(logprobs)} log-probs")
        is_trained = not turn.aside
        if sampled and is_trained:
            start = len(self.tokens) + len(fed)
            self.replies.append(
                SampledReply(
                    turn=number,
                    start=start,
                    end=start + len(sampled),
                    digest=turn.digest,
                    parts=parts_of(turn),
                    is_ended=turn.stop == "stop",
                )
            )
        if self.routing.shape[1]:
            self._add_routing(turn.routing, len(fed) + len(sampled))
        self.tokens += [*fed, *sampled]
        versions = version_at(turn.versions, len(sampled))
        self.trained += [False] * len(fed) + [is_trained] * len(sampled)
        self.logprobs += [0.0] * len(fed) + (list(logprobs) if is_trained else [0.0] * len(sampled))
        self.versions += [-1] * len(fed) + (list(versions) if is_trained else [-1] * len(sampled))

    def _add_routing(self, reported: bytes, num_new: int) -> None:
        """Adds rows of the last token before this turn and of all new tokens but the last.

        Raises ValueError for any other number of rows.
        """
        width = self.routing.shape[1]
        num_rows = max(len(self.tokens) + num_new - 1, 0) - len(self.routing)
        if len(reported) != num_rows * width:
            raise ValueError(
                f"{len(reported)} routed experts are reported, not {width} for each of {num_rows} tokens"
            )
        self.routing = np.vstack([self.routing, np.frombuffer(reported, np.uint8).reshape(-1, width)])


def branches(
    turns: tuple[Turn, ...], *, every_step: bool = False, routing_width: int = 0
) -> Iterator[Branch]:
    """One branch per unbroken run of turns, in the order of their first turns; with `every_step` one per turn: `runs_of` in
    pipeline/trajectory.py divides them.

    Runs that train nothing are left out. `routing_width`: experts per token over all layers, where the request asked
    for them. Raises ValueError for a turn that kept more tokens than there were.
    """
    runs = runs_of(
        turns, lambda: Branch(routing=np.empty((0, routing_width), np.uint8)), every_step=every_step
    )
    yield from (run for run in runs if any(run.trained))


def samples_of(
    trajectory: Trajectory, *, vocab_size: int, max_tokens: int, routing_width: int = 0
) -> tuple[Sample, ...]:
    """The samples of a trajectory, with advantages of 0; none if nothing was sampled. With a `routing_width`, the number of experts per
    token over all layers, they have the routing that the engine reported.

    Raises ValueError naming what is wrong: such a trajectory must not reach the learner. Raises AlteredReply if it is not what the engine
    sampled.
    """
    request = trajectory.claim.request
    made = tuple(
        Sample(
            request_id=request.id,
            group_id=request.group_id,
            branch=number,
            tokens_T=np.array(branch.tokens, np.int32),
            trained_T=np.array(branch.trained, np.bool_),
            behaviour_logprobs_T=np.array(branch.logprobs, np.float32),
            advantages_T=np.zeros(len(branch.tokens), np.float32),
            versions_T=np.array(branch.versions, np.int32),
            replies=tuple(branch.replies),
            routing=branch.routing.ravel() if routing_width else None,
        )
        for number, branch in enumerate(
            branches(trajectory.turns, every_step=request.context.every_step, routing_width=routing_width)
        )
    )
    for sample in made:
        _check(sample, vocab_size=vocab_size, max_tokens=max_tokens)
    check_provenance(made)
    return made


def _check(sample: Sample, *, vocab_size: int, max_tokens: int) -> None:
    where = f"sample {sample.branch}"
    tokens, logprobs = sample.tokens_T, sample.behaviour_logprobs_T[sample.trained_T]
    if sample.num_tokens > max_tokens:
        raise ValueError(
            f"{where} has {sample.num_tokens} tokens, more than learner.micro_batch_tokens = {max_tokens}"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(f"{where} holds token id {outside}, outside the vocabulary of {vocab_size}")
    if sample.trained_T[0]:
        raise ValueError(f"{where} starts with a sampled token: nothing was fed before it")
    if not np.isfinite(logprobs).all():
        raise ValueError(f"{where} has a log-prob that is not finite")
    if logprobs.max() > LOGPROB_SLACK:
        raise ValueError(f"{where} has a log-prob of {logprobs.max():.4f}, above 0")
