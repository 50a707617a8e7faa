"""Rewards and step scores of a group's members → one advantage per token. Pure functions.

R_i is the reward of member i, A_i its advantage by the baseline of `advantages.py`, s_ik the judge's score of its turn k in
-1..1, and c the coefficient. The scores of one turn number in all members of a group are a bucket. None of these functions
alters a reward, and none takes a missing score for a 0:

| method               | advantage of the tokens of turn k of member i                                                     |
|----------------------|---------------------------------------------------------------------------------------------------|
| `outcome`            | A_i                                                                                               |
| `outcome_plus_mean`  | the baseline of R_i + c/2 * (mean of the scores of i)                                             |
| `step_wise`          | (R_i + c/2 * s_ik - mean over the bucket) / (population deviation over the bucket + 1e-6)         |
| `outcome_then_steps` | A_i + c * (d_ik - mean of d_i over the tokens of i that have one), with d_ik = s_ik - mean over the bucket |

Where the formula has nothing to compare, the tokens get A_i: a turn without a score, and for the two methods with buckets a
turn that has a score in one member only. A member without any score has R_i alone. In `step_wise` a bucket whose members
are all equal gives 0.

The first two methods with scores are known with the outcome o_i = 2 R_i - 1 and o_i + c * s. Here they are divided by 2, which
changes no sign and no ratio, so that a coefficient of 0 leaves the advantages of `outcome`, and not twice as much.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import numpy.typing as npt

from trainer.batching.advantages import BASELINES, Baseline, group_mean_std, has_signal
from trainer.batching.batch import Sample
from trainer.recipe import AdvantageKind, CreditMethod, CreditRecipe


@dataclass(frozen=True, slots=True)
class GradedMember:
    """A valid member of a group, with what its credit is made of."""

    reward: float
    samples: tuple[Sample, ...]
    scores: Mapping[int, float] | None = None  # the judge's, by turn; None: there is no judgement


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantage of one member: `whole` on all of its tokens, but for the turns in `by_turn`."""

    whole: float
    by_turn: Mapping[int, float] = field(default_factory=dict[int, float])


Members = Mapping[int, GradedMember]

TokenAdvantages = tuple[npt.NDArray[np.float32], ...]
"""One array of T per sample of a member, 0 where a token is not trained."""

CreditFunction = Callable[[Members, Baseline, float], dict[int, Credit]]
"""The credit of each member, from all valid members of the group, the baseline and the coefficient."""


def token_advantages(
    members: Members, kind: AdvantageKind, credit: CreditRecipe
) -> dict[int, TokenAdvantages]:
    """The advantages of each member, by the key that it has in `members`. Needs two members or more."""
    assert len(members) >= 2, "a baseline needs two members"
    method = CREDITS[credit.method] if credit.coefficient else outcome
    credits = method(members, BASELINES[kind], credit.coefficient)
    return {
        key: tuple(_over_tokens(sample, credits[key]) for sample in member.samples)
        for key, member in members.items()
    }


def outcome(members: Members, baseline: Baseline, coefficient: float) -> dict[int, Credit]:
    """Every token of a member gets the advantage of its reward."""
    del coefficient
    return {key: Credit(advantage) for key, advantage in baseline(_rewards(members)).items()}


def outcome_plus_mean(members: Members, baseline: Baseline, coefficient: float) -> dict[int, Credit]:
    """The baseline sees the outcome plus the weighted mean of the scores."""
    values = {
        key: member.reward + coefficient / 2 * fmean(member.scores.values())
        if member.scores
        else member.reward
        for key, member in members.items()
    }
    return {key: Credit(advantage) for key, advantage in baseline(values).items()}


def step_wise(members: Members, baseline: Baseline, coefficient: float) -> dict[int, Credit]:
    """Each turn is normalised among the members' turns of the same number."""
    by_turn: dict[int, dict[int, float]] = {key: {} for key in members}
    for turn, scores in _buckets(members).items():
        values = {key: members[key].reward + coefficient / 2 * score for key, score in scores.items()}
        is_constant = not has_signal([*values.values()])
        for key, advantage in group_mean_std(values).items():
            by_turn[key][turn] = 0.0 if is_constant else advantage
    return {key: Credit(advantage, by_turn[key]) for key, advantage in baseline(_rewards(members)).items()}


def outcome_then_steps(members: Members, baseline: Baseline, coefficient: float) -> dict[int, Credit]:
    """Scores move credit between the turns of a member; summed over its tokens, they add nothing."""
    deviations: dict[int, dict[int, float]] = {key: {} for key in members}
    for turn, scores in _buckets(members).items():
        mean = fmean(scores.values())
        for key, score in scores.items():
            deviations[key][turn] = score - mean
    credits: dict[int, Credit] = {}
    for key, advantage in baseline(_rewards(members)).items():
        mean = _mean_over_tokens(deviations[key], members[key].samples)
        credits[key] = Credit(
            advantage,
            {
                turn: advantage + coefficient * (deviation - mean)
                for turn, deviation in deviations[key].items()
            },
        )
    return credits


CREDITS: dict[CreditMethod, CreditFunction] = {
    "outcome": outcome,
    "outcome_plus_mean": outcome_plus_mean,
    "step_wise": step_wise,
    "outcome_then_steps": outcome_then_steps,
}


def _rewards(members: Members) -> dict[int, float]:
    return {key: member.reward for key, member in members.items()}


def _buckets(members: Members) -> dict[int, dict[int, float]]:
    """By turn, the scores of the members that have one there; turns that only one member has are left out."""
    buckets: dict[int, dict[int, float]] = {}
    for key, member in members.items():
        for turn, score in (member.scores or {}).items():
            buckets.setdefault(turn, {})[key] = score
    return {turn: scores for turn, scores in buckets.items() if len(scores) > 1}


def _mean_over_tokens(values: Mapping[int, float], samples: Sequence[Sample]) -> float:
    """The mean of values by turn, weighted with the tokens that were sampled in each turn; 0 if there are none."""
    weights = {
        reply.turn: reply.end - reply.start
        for sample in samples
        for reply in sample.replies
        if reply.turn in values
    }
    total = sum(weights.values())
    return sum(values[turn] * weight for turn, weight in weights.items()) / total if total else 0.0


def _over_tokens(sample: Sample, credit: Credit) -> npt.NDArray[np.float32]:
    advantages_T = np.where(sample.trained_T, np.float32(credit.whole), np.float32(0))
    for reply in sample.replies:
        if reply.turn in credit.by_turn:
            advantages_T[reply.start : reply.end] = credit.by_turn[reply.turn]
    return advantages_T
