"""What the learner trains on: samples, and the batch that one optimizer step consumes.

Plain numpy, no torch: everything before the learner can be imported on a machine without it. Shape suffix T: tokens of one
sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

TokenKind = Literal["fed", "thought", "text", "call", "end"]
"""What a token is part of. fed: nobody sampled it. call: of a tool, or a command in text. end: the token that ended the turn."""


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """Characters of a reply's text, from the end of the part before it to `end` (exclusive)."""

    kind: TokenKind
    end: int


@dataclass(frozen=True, slots=True)
class SampledReply:
    """A reply in a sample: its tokens start (inclusive) to end (exclusive), and what the worker says of it."""

    turn: int  # of the trajectory, from 0
    start: int
    end: int
    digest: bytes  # of what the engine was sent and reported: pipeline/reply_digest.py
    parts: tuple[ReplyPart, ...] = ()  # of its text, in order
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
    # In nats, under the distribution that the engine sampled from; 0 where not trained.
    behaviour_logprobs_T: npt.NDArray[np.float32]
    advantages_T: npt.NDArray[np.float32]  # 0 where not trained
    versions_T: npt.NDArray[np.int32]  # weight version that sampled the token; -1 where not trained
    replies: tuple[SampledReply, ...] = ()  # in order; they hold the trained tokens and no others
    # Experts that the engine routed each token to, T x (layers * experts per token), flat; -1: not reported. None: not asked for.
    routing: npt.NDArray[np.int16] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def num_trained_tokens(self) -> int:
        return int(self.trained_T.sum())

    @property
    def num_bytes(self) -> int:
        """Memory that the arrays take."""
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
    """What the scores of a judge say of a batch, and how far they move its advantages."""

    num_judged: int = 0  # trajectories trained with a judgement
    num_scored: int = 0  # of them, those that have a score
    num_scored_replies: int = 0  # trained replies of turns that have a score
    score_mean: float | None = None  # over trained trajectories that have scores, of the mean score of each
    outcome_size: float = 0.0  # mean over trained tokens of the absolute advantage without scores
    process_size: float = 0.0  # mean over trained tokens of the absolute change that scores make to it


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything that one optimizer step consumes, the same on every rank."""

    step: int  # 1 for the first optimizer step of the run
    samples: tuple[Sample, ...]
    temperature: float  # the sampling temperature the behaviour log-probs belong to
    num_trajectories: int
    request_ids: tuple[str, ...]  # trajectories trained here, one entry each
    lag_max: int  # in weight versions, over trajectories: the newest version minus the trajectory's first
    lag_mean: float
    # Trajectories that are not trained, but whose rewards count in the baselines of their groups.
    baseline_ids: tuple[str, ...] = ()
    # How many versions behind the newest each weight version is that sampled a trained token; one that is missing counts as newest.
    lags: Mapping[int, int] = field(default_factory=dict[int, int])
    credit: CreditMeasures = CreditMeasures()

    @property
    def num_trained_tokens(self) -> int:
        return sum(sample.num_trained_tokens for sample in self.samples)

    @property
    def num_replies(self) -> int:
        """Each with a digest that matches what is trained of it."""
        return sum(len(sample.replies) for sample in self.samples)
