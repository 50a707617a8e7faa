"""Rewards of a group's members → one advantage per token. Pure functions.

An `AdvantageFunction` sees all valid members of a group and returns, for each of them, one float32 array per sample, aligned
with the sample's tokens and 0 where a token is not trained. A member whose rollout failed has no reward and is not among
them, so it moves nobody's baseline. The kinds so far give every trained token of a member the same advantage:

| kind             | advantage of member i                                  | as in                                   |
|------------------|--------------------------------------------------------|-----------------------------------------|
| `leave_one_out`  | R_i - mean of the other members' rewards               | RLOO, Ahmadian et al. 2024              |
| `group_mean`     | R_i - mean of all rewards                              | Dr. GRPO (no divisor), Liu et al. 2025  |
| `group_mean_std` | (R_i - mean of all rewards) / (population std + 1e-6)  | GRPO, Shao et al. 2024                  |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import numpy as np
import numpy.typing as npt

from trainer.batching.batch import Sample
from trainer.recipe import AdvantageKind

SAME = 1e-9
"""Rewards closer than this count as equal."""


@dataclass(frozen=True, slots=True)
class GradedMember:
    """A valid member of a group, as an advantage function sees it."""

    reward: float
    samples: tuple[Sample, ...]


TokenAdvantages = tuple[npt.NDArray[np.float32], ...]
"""One array of T per sample of a member."""

AdvantageFunction = Callable[[Mapping[int, GradedMember]], dict[int, TokenAdvantages]]


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether any two rewards differ; otherwise every advantage would be zero."""
    return max(rewards) - min(rewards) > SAME


def token_advantages(members: Mapping[int, GradedMember], kind: AdvantageKind) -> dict[int, TokenAdvantages]:
    """The advantages of each member, by the key that it has in `members`. Needs two members or more."""
    assert len(members) >= 2, "a baseline needs two members"
    return ADVANTAGES[kind](members)


def leave_one_out(rewards: Mapping[int, float]) -> dict[int, float]:
    """Distance of each reward to the mean of the others."""
    mean, others = fmean(rewards.values()), len(rewards) - 1
    return {member: reward - (mean * len(rewards) - reward) / others for member, reward in rewards.items()}


def group_mean(rewards: Mapping[int, float]) -> dict[int, float]:
    """Distance of each reward to the mean of all."""
    mean = fmean(rewards.values())
    return {member: reward - mean for member, reward in rewards.items()}


def group_mean_std(rewards: Mapping[int, float]) -> dict[int, float]:
    """Distance of each reward to the mean of all, in standard deviations."""
    spread = pstdev(rewards.values()) + 1e-6
    return {member: distance / spread for member, distance in group_mean(rewards).items()}


def constant_over_tokens(per_member: Callable[[Mapping[int, float]], dict[int, float]]) -> AdvantageFunction:
    """The advantage function that gives every trained token of a member the same number, computed from the rewards alone."""

    def advantages(members: Mapping[int, GradedMember]) -> dict[int, TokenAdvantages]:
        numbers = per_member({key: member.reward for key, member in members.items()})
        return {
            key: tuple(
                np.where(sample.trained_T, np.float32(numbers[key]), np.float32(0))
                for sample in member.samples
            )
            for key, member in members.items()
        }

    return advantages


ADVANTAGES: dict[AdvantageKind, AdvantageFunction] = {
    "leave_one_out": constant_over_tokens(leave_one_out),
    "group_mean": constant_over_tokens(group_mean),
    "group_mean_std": constant_over_tokens(group_mean_std),
}
