"""The learner's input and its reports: samples, the batch that one optimizer step consumes, and what a step did with each trained token, as
the learner reports it and as it is stored.

Plain numpy, no torch: everything before the learner can be imported on a machine without it. Shape suffix T: tokens of one
sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeline.intervals import Estimate
from pipeline.rollout_store.record import TrainedTokens, TrainedTurn

TokenKind = Literal["fed", "thought", "text", "call", "end"]
"""The part of a reply that a token belongs to. fed: nobody sampled it. call: a tool call, or a command in text. end: the token that ended
the turn.
"""


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """Characters of a reply's text, from the end of the part before it to `end` (exclusive)."""

    kind: TokenKind
    end: int


@dataclass(frozen=True, slots=True)
class SampledReply:
    """A reply in a sample: its tokens from start (inclusive) to end (exclusive), and the worker's data about it."""

    turn: int  # its number in the trajectory, from 0
    start: int
    end: int
    digest: bytes  # digest of what the engine was sent and reported: pipeline/trajectory.py
    parts: tuple[ReplyPart, ...] = ()  # the parts of its text, in order
    is_ended: bool = False  # its last token ended the turn, and is not in its text


@dataclass(frozen=True, slots=True)
class Sample:
    """One unbroken run of tokens as the policy saw them. Each sampled token is trained in exactly one sample.

    In Sample(tokens_T=[7, 8, 9], trained_T=[False, True, True], versions_T=[-1, 4, 5], ...) the policy was fed token 7 and
    sampled 8 and 9, the second after weights 5 had arrived. `behaviour_logprobs_T[t]` belongs to `tokens_T[t]`, given all
    tokens before it.
    """

    request_id: str
    group_id: str
    branch: int
    tokens_T: npt.NDArray[np.int32]
    trained_T: npt.NDArray[np.bool_]
    # Log-probs in nats, under the distribution that the engine sampled from; 0 where not trained.
    behaviour_logprobs_T: npt.NDArray[np.float32]
    advantages_T: npt.NDArray[np.float32]  # 0 where not trained
    versions_T: npt.NDArray[np.int32]  # weight version that sampled the token; -1 where not trained
    replies: tuple[SampledReply, ...] = ()  # replies in order; they hold the trained tokens and no others
    # Experts that the engine routed each token but the last to, (T - 1) x (layers * experts per token), flat. None: not asked for.
    # Rank 0 of the learner has it; on the other ranks, which get what they replay from there, it is empty.
    routing: npt.NDArray[np.uint8] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def num_trained_tokens(self) -> int:
        return int(self.trained_T.sum())

    @property
    def num_bytes(self) -> int:
        """The memory of the arrays."""
        arrays = (
            self.tokens_T,
            self.trained_T,
            self.behaviour_logprobs_T,
            self.advantages_T,
            self.versions_T,
        )
        return sum(array.nbytes for array in arrays) + (0 if self.routing is None else self.routing.nbytes)


@dataclass(frozen=True, slots=True)
class CreditMeasures:
    """Statistics of a judge's scores or a teacher's log-probs in a batch, and of their effect on its advantages."""

    num_judged: int = 0  # trajectories trained with a judgement
    num_scored: int = 0  # judged trajectories that have a score
    num_scored_replies: int = 0  # trained replies of turns that have a score
    score_mean: float | None = None  # mean over the trained trajectories with scores of each one's mean score
    outcome_size: float = 0.0  # mean over trained tokens of the absolute advantage without scores
    process_size: float = 0.0  # mean over trained tokens of the absolute change that scores make to it
    num_taught: int = 0  # trajectories trained with a teacher's log-probs
    num_taught_tokens: int = 0  # their trained tokens
    # Mean over these tokens of log p - log p_teacher, in nats, with groups as draws; None: there is none.
    reverse_kl: Estimate | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything that one optimizer step consumes, the same on every rank."""

    step: int  # 1 for the first optimizer step of the run
    samples: tuple[Sample, ...]
    temperature: float  # the sampling temperature the behaviour log-probs belong to
    num_trajectories: int
    request_ids: tuple[str, ...]  # trajectories trained here, one entry each
    lag_max: int  # the largest lag of a trajectory's first version behind the newest one, in weight versions
    lag_mean: float
    # Trajectories that are not trained, but whose rewards count in the baselines of their groups.
    baseline_ids: tuple[str, ...] = ()
    # The lag of each weight version that sampled a trained token; one that is missing counts as newest.
    lags: Mapping[int, int] = field(default_factory=dict[int, int])
    credit: CreditMeasures = CreditMeasures()

    @property
    def num_trained_tokens(self) -> int:
        return sum(sample.num_trained_tokens for sample in self.samples)

    @property
    def num_replies(self) -> int:
        """The number of replies, each with a digest that matches what is trained of it."""
        return sum(len(sample.replies) for sample in self.samples)


_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """The data of a step about the tokens of one sample. The arrays hold 0 for tokens that are not trained."""

    request_id: str
    branch: int
    logprobs_T: npt.NDArray[np.float32]  # nats, under the weights before the update
    weights_T: npt.NDArray[np.float32]  # the objective's factor on the policy gradient
    # Why there is no policy gradient: indices into pipeline.rollout_store.record.REASONS.
    reasons_T: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """The memory of the arrays."""
        return self.logprobs_T.nbytes + self.weights_T.nbytes + self.reasons_T.nbytes


def trained_tokens(batch: Batch, tokens: Sequence[SampleTokens], *, version: int) -> dict[str, TrainedTokens]:
    """The data of a step about the tokens of each rollout, by request id, in the stored form. `version` is that of the weights that the
    step started from.
    """
    reported = {(one.request_id, one.branch): one for one in tokens}
    turns: dict[str, list[TrainedTurn]] = {}
    for sample in batch.samples:
        found = reported.get((sample.request_id, sample.branch))
        if found is not None:
            turns.setdefault(sample.request_id, []).extend(_turns(sample, found))
    return {
        request_id: TrainedTokens(step=batch.step, version=version, turns=tuple(of_rollout))
        for request_id, of_rollout in turns.items()
    }


def num_tokens(trained: TrainedTokens) -> int:
    return sum(len(turn.reasons) for turn in trained.turns)


def _turns(sample: Sample, tokens: SampleTokens) -> list[TrainedTurn]:
    weights_T = tokens.weights_T.clip(-_LARGEST_HALF, _LARGEST_HALF)
    return [
        TrainedTurn(
            turn=reply.turn,
            logprobs=tokens.logprobs_T[reply.start : reply.end].astype("<f4").tobytes(),
            advantages=sample.advantages_T[reply.start : reply.end].astype("<f4").tobytes(),
            weights=weights_T[reply.start : reply.end].astype("<f2").tobytes(),
            reasons=tokens.reasons_T[reply.start : reply.end].tobytes(),
        )
        for reply in sample.replies
    ]
