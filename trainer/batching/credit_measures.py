"""What the scores of a judge say of a batch, and how far they move its advantages: measured, for the step's row."""

from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from trainer.batching.batch import CreditMeasures
from trainer.batching.credit import GradedMember, TokenAdvantages


@dataclass(slots=True)
class CreditMeter:
    """Adds up over the trained members of a batch."""

    _num_judged: int = 0
    _num_scored_replies: int = 0
    _score_means: list[float] = field(default_factory=list[float])
    _num_tokens: int = 0
    _outcome_sum: float = 0.0
    _process_sum: float = 0.0

    def add(self, member: GradedMember, advantages: TokenAdvantages, outcomes: TokenAdvantages) -> None:
        """`advantages` are those that are trained, `outcomes` those that the member has without any score."""
        scores = member.scores or {}
        self._num_judged += member.scores is not None
        if scores:
            self._score_means.append(fmean(scores.values()))
        for sample, advantages_T, outcomes_T in zip(member.samples, advantages, outcomes, strict=True):
            self._num_scored_replies += sum(reply.turn in scores for reply in sample.replies)
            self._num_tokens += sample.num_trained_tokens
            self._outcome_sum += float(np.abs(outcomes_T).sum(dtype=np.float64))
            self._process_sum += float(np.abs(advantages_T - outcomes_T).sum(dtype=np.float64))

    @property
    def measures(self) -> CreditMeasures:
        num_tokens = self._num_tokens or 1
        return CreditMeasures(
            num_judged=self._num_judged,
            num_scored=len(self._score_means),
            num_scored_replies=self._num_scored_replies,
            score_mean=fmean(self._score_means) if self._score_means else None,
            outcome_size=self._outcome_sum / num_tokens,
            process_size=self._process_sum / num_tokens,
        )
