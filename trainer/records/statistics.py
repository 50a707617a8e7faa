"""Success rates with intervals. Tasks are drawn, not episodes: the episodes of one task are related.

pass@k is the unbiased estimator of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374): of n
graded episodes of a task, c resolved it, and 1 - C(n - c, k) / C(n, k) is the chance that k of them hold one that did.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean

NUM_RESAMPLES = 4000
INTERVAL = 0.95  # share of the bootstrap distribution that lies within the interval
SEED = 0  # of the resampling, so that the same results give the same interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its interval."""

    value: float
    low: float
    high: float
    num_tasks: int


def mean_of_groups(values: Sequence[tuple[str, float]]) -> tuple[float, float]:
    """The mean of values, each with its group, and its cluster-robust standard error: groups are the independent draws.

    With u_g the sum of a group's residuals and n values in G groups, SE = sqrt(G / (G - 1) * sum(u_g^2)) / n (Liang and
    Zeger, 1986).
    """
    mean = fmean(value for _, value in values)
    residuals: dict[str, float] = {}
    for group, value in values:
        residuals[group] = residuals.get(group, 0.0) + value - mean
    squares = sum(residual**2 for residual in residuals.values())
    correction = len(residuals) / max(1, len(residuals) - 1)
    return mean, (correction * squares) ** 0.5 / len(values)


def pass_at_k(num_episodes: int, num_resolved: int, k: int) -> float:
    """Raises ValueError unless 1 <= k <= num_episodes."""
    if not 1 <= k <= num_episodes:
        raise ValueError(
            f"pass@{k} cannot be told from {num_episodes} episodes: k must be between 1 and that"
        )
    return 1 - comb(num_episodes - num_resolved, k) / comb(num_episodes, k)


def estimate(per_task: Sequence[float]) -> Estimate | None:
    """The mean of one figure for each task, with the percentile interval of a bootstrap over tasks. None: there is no task."""
    if not per_task:
        return None
    means = _resampled_means(per_task)
    outside = (1 - INTERVAL) / 2
    return Estimate(
        fmean(per_task), _percentile(means, outside), _percentile(means, 1 - outside), len(per_task)
    )


def pass_at(graded: Mapping[str, Sequence[bool]], k: int) -> Estimate | None:
    """pass@k over the tasks that have at least k graded episodes; `graded` says of each whether it resolved its task."""
    return estimate([pass_at_k(len(runs), sum(runs), k) for runs in graded.values() if len(runs) >= k])


def paired_difference(
    first: Mapping[str, Sequence[bool]], second: Mapping[str, Sequence[bool]]
) -> Estimate | None:
    """Success of `second` minus that of `first`, over the tasks that both have graded episodes of."""
    both = [task for task, runs in first.items() if runs and second.get(task)]
    return estimate([rate(second[task]) - rate(first[task]) for task in both])


def rate(runs: Sequence[bool]) -> float:
    return sum(runs) / len(runs)


def _resampled_means(values: Sequence[float]) -> list[float]:
    draw: Callable[..., list[float]] = random.Random(SEED).choices
    return sorted(fmean(draw(values, k=len(values))) for _ in range(NUM_RESAMPLES))


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
