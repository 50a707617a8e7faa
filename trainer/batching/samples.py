"""A trajectory → the samples that it is trained as, checked before they reach the learner.

There is one sample per unbroken run of turns, in which each turn's prompt repeats what came before it, so prompts are not
trained once per turn. Where the context was cut, the next sample starts; where the request says `every_step`, each turn is a
sample of its own. Every sampled token is trained in exactly one sample, after exactly the tokens that the engine held, with the
id, log-prob and weight version that the engine reported; provenance.py checks it. Nothing here has a tokenizer. Shape suffix T:
tokens of one sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.message import unpack_float32s, unpack_int32s
from pipeline.trajectory import Trajectory, Turn, version_at
from trainer.batching.batch import Sample, SampledReply
from trainer.batching.provenance import check_provenance
from trainer.batching.token_kinds import parts_of

LOGPROB_SLACK = 1e-3
"""Nats above 0 that rounding in an engine may produce."""


@dataclass(slots=True)
class Branch:
    """An unbroken run of tokens while it is put together. All lists have one entry per token."""

    tokens: list[int] = field(default_factory=list[int])
    trained: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    replies: list[SampledReply] = field(default_factory=list[SampledReply])
    # Experts of each token, -1 where not reported; no columns where nothing is asked for.
    routing: npt.NDArray[np.int16] = field(default_factory=lambda: np.empty((0, 0), np.int16))

    def prefix(self, num_tokens: int) -> "Branch":
        """The tokens that a context cut kept: they are seen again and not trained again."""
        return Branch(
            self.tokens[:num_tokens],
            [False] * num_tokens,
            [0.0] * num_tokens,
            [-1] * num_tokens,
            routing=self.routing[:num_tokens],
        )

    def extend(self, number: int, turn: Turn) -> None:
        fed, sampled = unpack_int32s(turn.fed), unpack_int32s(turn.sampled)
        logprobs = unpack_float32s(turn.logprobs)
        if len(logprobs) != len(sampled):
            raise ValueError(f"{len(sampled)} sampled tokens, but {len(logprobs)} log-probs")
        if sampled:
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
        self.trained += [False] * len(fed) + [True] * len(sampled)
        self.logprobs += [0.0] * len(fed) + list(logprobs)
        self.versions += [-1] * len(fed) + list(version_at(turn.versions, len(sampled)))

    def _add_routing(self, reported: bytes, num_new: int) -> None:
        """Rows of the last token before this turn and of all new ones but the last. Raises ValueError for any other number."""
        start, width = max(len(self.tokens) - 1, 0), self.routing.shape[1]
        rows = np.vstack([self.routing, np.full((num_new, width), -1, np.int16)])
        if len(reported) != (len(rows) - 1 - start) * width:
            raise ValueError(
                f"{len(reported)} routed experts are reported, not {width} for each of {len(rows) - 1 - start} tokens"
            )
        rows[start:-1] = np.frombuffer(reported, np.uint8).reshape(-1, width)
        self.routing = rows


def branches(
    turns: tuple[Turn, ...], *, every_step: bool = False, routing_width: int = 0
) -> Iterator[Branch]:
    """One branch per unbroken run of turns, in order; with `every_step` one per turn.

    `routing_width`: experts per token over all layers, where the request asked for them. Raises ValueError for a turn that kept
    more tokens than there were.
    """
    branch = Branch(routing=np.empty((0, routing_width), np.int16))
    for number, turn in enumerate(turns):
        if not 0 <= turn.kept_tokens <= len(branch.tokens):
            raise ValueError(f"turn {number} kept {turn.kept_tokens} of {len(branch.tokens)} tokens")
        if turn.kept_tokens < len(branch.tokens) or (every_step and branch.tokens):
            if any(branch.trained):
                yield branch
            branch = branch.prefix(turn.kept_tokens)
        branch.extend(number, turn)
    if any(branch.trained):
        yield branch


def samples_of(
    trajectory: Trajectory, *, vocab_size: int, max_tokens: int, routing_width: int = 0
) -> tuple[Sample, ...]:
    """The samples of a trajectory, advantages still 0; none if nothing was sampled. With a `routing_width`, of experts per token
    over all layers, they have the routing that the engine reported.

    Raises ValueError naming what is wrong: such a trajectory must not reach the learner. An AlteredReply, if it is not what the
    engine sampled.
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
