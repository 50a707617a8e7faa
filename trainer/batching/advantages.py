"""Rewards of a group's valid members → one advantage per member. Pure functions of floats.

A member whose rollout broke has no reward and is not here: it moves nobody's baseline.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from trainer.recipe import AdvantageKind

SAME = 1e-9  # rewards closer than this are the same


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether any two rewards differ; otherwise every advantage would be zero."""
    return max(rewards) - min(rewards) > SAME


def advantages(rewards: Mapping[int, float], kind: AdvantageKind) -> dict[int, float]:
    """Advantage of each valid member, keyed as the rewards are. Needs two members or more.

    leave_one_out:   A_i = R_i - mean of the others' rewards, no division by the spread (RLOO, Ahmadian et
    al. 2024) group_mean:      A_i = R_i - mean of all              (GRPO without its divisor, as in Dr.
    GRPO, Liu et al. 2025) group_mean_std:  A_i = (R_i - mean of all) / (population standard deviation +
    1e-6)   (GRPO, Shao et al. 2024)
    """
    values = list(rewards.values())
    assert len(values) >= 2, "a baseline needs two members"
    mean = fmean(values)
    match kind:
        case "leave_one_out":
            others = len(values) - 1
            return {
                member: reward - (mean * len(values) - reward) / others for member, reward in rewards.items()
            }
        case "group_mean":
            return {member: reward - mean for member, reward in rewards.items()}
        case "group_mean_std":
            spread = pstdev(values) + 1e-6
            return {member: (reward - mean) / spread for member, reward in rewards.items()}
