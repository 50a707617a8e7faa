"""Rewards of a group → one advantage per member. Pure functions.

A `Baseline` sees the rewards of all valid members of a group. A member whose rollout failed has no reward and is not among
them, so it moves nobody's advantage. `credit.py` spreads the advantages over tokens, and adds what a judge says of single turns.

| kind             | advantage of member i                                  | as in                                   |
|------------------|--------------------------------------------------------|-----------------------------------------|
| `leave_one_out`  | R_i - mean of the other members' rewards               | RLOO, Ahmadian et al. 2024              |
| `group_mean`     | R_i - mean of all rewards                              | Dr. GRPO (no divisor), Liu et al. 2025  |
| `group_mean_std` | (R_i - mean of all rewards) / (population std + 1e-6)  | GRPO, Shao et al. 2024                  |
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev

from trainer.recipe import AdvantageKind

SAME = 1e-9
"""Rewards closer than this count as equal."""

Baseline = Callable[[Mapping[int, float]], dict[int, float]]
"""From rewards to advantages, both by member."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether any two rewards differ; otherwise every advantage would be zero."""
    return max(rewards) - min(rewards) > SAME


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


BASELINES: dict[AdvantageKind, Baseline] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
}
