"""A trajectory → the samples that it is trained as, checked before they reach the learner.

There is one sample per unbroken run of turns, in which each turn's prompt repeats what came before it, so prompts are not
trained once per turn. Where the context was cut, the next sample starts; where the request says `every_step`, each turn is a
sample of its own. Every sampled token is trained in exactly one sample, after exactly the tokens that the engine held, with the
id, log-prob and weight version that the engine reported. Nothing here has a tokenizer. Shape suffix T: tokens of one sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from pipeline.message import unpack_float32s, unpack_int32s
from pipeline.trajectory import Trajectory, Turn, version_at
from trainer.batching.batch import Sample

LOGPROB_SLACK = 1e-3
"""Nats above 0 that rounding in an engine may produce."""


@dataclass(slots=True)
class Branch:
    """An unbroken run of tokens while it is put together. All lists have one entry per token."""

    tokens: list[int] = field(default_factory=list[int])
    trained: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    def prefix(self, num_tokens: int) -> "Branch":
        """The tokens that a context cut kept: they are seen again and not trained again."""
        return Branch(self.tokens[:num_tokens], [False] * num_tokens, [0.0] * num_tokens, [-1] * num_tokens)

    def extend(self, turn: Turn) -> None:
        fed, sampled = unpack_int32s(turn.fed), unpack_int32s(turn.sampled)
        logprobs = unpack_float32s(turn.logprobs)
        if len(logprobs) != len(sampled):
            raise ValueError(f"{len(sampled)} sampled tokens, but {len(logprobs)} log-probs")
        self.tokens += [*fed, *sampled]
        self.trained += [False] * len(fed) + [True] * len(sampled)
        self.logprobs += [0.0] * len(fed) + list(logprobs)
        self.versions += [-1] * len(fed) + list(version_at(turn.versions, len(sampled)))


def branches(turns: tuple[Turn, ...], *, every_step: bool = False) -> Iterator[Branch]:
    """One branch per unbroken run of turns, in order; with `every_step` one per turn.

    Raises ValueError for a turn that kept more tokens than there were.
    """
    branch = Branch()
    for number, turn in enumerate(turns):
        if not 0 <= turn.kept_tokens <= len(branch.tokens):
            raise ValueError(f"turn {number} kept {turn.kept_tokens} of {len(branch.tokens)} tokens")
        if turn.kept_tokens < len(branch.tokens) or (every_step and branch.tokens):
            if any(branch.trained):
                yield branch
            branch = branch.prefix(turn.kept_tokens)
        branch.extend(turn)
    if any(branch.trained):
        yield branch


def samples_of(trajectory: Trajectory, *, vocab_size: int, max_tokens: int) -> tuple[Sample, ...]:
    """The samples of a trajectory, advantages still 0; none if nothing was sampled.

    Raises ValueError naming what is wrong: such a trajectory must not reach the learner.
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
        )
        for number, branch in enumerate(branches(trajectory.turns, every_step=request.context.every_step))
    )
    for sample in made:
        _check(sample, vocab_size=vocab_size, max_tokens=max_tokens)
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
