"""A paired comparison of two recipes that may be looked at as it grows, with at most 5 % of false alarms over all looks together.

The bounds are those of Lan and DeMets ("Discrete sequential boundaries for clinical trials", Biometrika 70, 1983) for the spending function
of O'Brien and Fleming's kind: after the share t of the plan, alpha(t) = 2 - 2 Phi(z / sqrt(t)) is spent on each side, with alpha = 0.025
there and z the quantile of 1 - alpha / 2. The plan is a number of episodes of each task, or of pairs of runs. It has to be fixed before the
first look: a plan that follows the estimated error ends where the error is too small by chance. Each look's interval is value +- bound *
SE, a repeated confidence interval: all of them together hold the truth at 95 % (Jennison and Turnbull, JRSS B 51, 1989). The bound is
turned into the quantile of Student's t with the tail that it has in a normal distribution, because few tasks or seeds make SE uncertain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erfc, sqrt
from statistics import NormalDist, fmean

import numpy as np
import numpy.typing as npt

from pipeline.intervals import TAIL, t_quantile

Rewards = Mapping[str, Sequence[float]]
"""Rewards in [0, 1] by task, in the order of the episodes."""

Pair = tuple[Rewards, Rewards]
"""An evaluation of recipe A and one of recipe B, on the same tasks."""

NORMAL = NormalDist()
INFLATION = 1.04
"""The planned information over that of a single look of the same power, for ten looks or fewer (Jennison and Turnbull, 2000, table 2.4)."""

NUM_GRID = 401
_Z = np.linspace(-13, 13, 26001)
_UPPER = np.array([erfc(z / sqrt(2)) / 2 for z in _Z])


def _upper(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The probability that a normal number is larger than each, interpolated, because numpy has no erfc."""
    return np.interp(z, _Z, _UPPER)


@dataclass(frozen=True, slots=True)
class Difference:
    """B minus A, its standard error, and the degrees of freedom of the error."""

    value: float
    error: float
    degrees: int


@dataclass(frozen=True, slots=True)
class Look:
    """The comparison after some of the episodes or some of the pairs of runs."""

    num_episodes: int
    value: float
    low: float  # interval that holds the truth at 95 % at all looks together
    high: float
    share: float  # share of the plan

    @property
    def is_decided(self) -> bool:
        return self.low > 0 or self.high < 0


def planned_information(detect: float, power: float) -> float:
    """The information at which a difference of `detect` is found with this probability."""
    return INFLATION * ((NORMAL.inv_cdf(1 - TAIL) + NORMAL.inv_cdf(power)) / detect) ** 2


def looks(pairs: Sequence[Pair], plan: int) -> list[Look]:
    """The looks in their order, until one decides or the plan is used up. They are a function of the rewards alone. One pair is
    looked at after each episode of every task, `plan` of which are planned; several pairs after each pair from the second on. Episodes or
    pairs beyond the plan are not used.
    """
    shares = {size: size / plan for size in sizes(pairs) if size <= plan}
    ends = bounds([*shares.values()])
    made = [_look(_part(pairs, size), shares[size], end) for size, end in zip(shares, ends, strict=True)]
    decided = next((place for place, one in enumerate(made, 1) if one.is_decided), len(made))
    return made[:decided]


def sizes(pairs: Sequence[Pair]) -> range:
    """The size of each look: the number of pairs or, if there is one pair, the number of episodes of each task."""
    if len(pairs) > 1:
        return range(2, len(pairs) + 1)
    return range(1, max(len(runs) for side in pairs[0] for runs in side.values()) + 1)


def _part(pairs: Sequence[Pair], size: int) -> Sequence[Pair]:
    """What a look of that size sees."""
    return pairs[:size] if len(pairs) > 1 else [(_first(pairs[0][0], size), _first(pairs[0][1], size))]


def _first(rewards: Rewards, count: int) -> Rewards:
    return {task: runs[:count] for task, runs in rewards.items()}


def _look(part: Sequence[Pair], share: float, bound: float) -> Look:
    found = difference_of(part)
    half = t_quantile(found.degrees, max(NORMAL.cdf(-bound), 1e-12)) * found.error
    num_episodes = sum(len(runs) for pair in part for side in pair for runs in side.values())
    return Look(num_episodes, found.value, found.value - half, found.value + half, share)


def difference_of(pairs: Sequence[Pair]) -> Difference:
    """The mean difference over tasks and pairs of runs.

    With one pair, tasks are the draws, and two more are counted, as in `pipeline.intervals.paired_difference`. With several pairs, tasks
    and pairs are crossed: the variance is that of the means of pairs plus that of the means of tasks minus that of what neither explains
    (Cameron, Gelbach and Miller, JBES 29, 2011), and never less than either; degrees of freedom are Satterthwaite's (Biometrics 2, 1946).
    """
    tasks = list(pairs[0][0])
    table = np.array([[fmean(b[task]) - fmean(a[task]) for task in tasks] for a, b in pairs])
    value = float(table.mean())
    num_pairs, num_tasks = table.shape
    if num_pairs == 1:
        fewest = min(len(runs) for side in pairs[0] for runs in side.values())
        count = num_tasks + 2
        spread = float((table**2).sum() + 1 / fewest) / count - float(table.sum() / count) ** 2
        return Difference(value, sqrt(spread / count), num_tasks - 1)
    by_pair, by_task = table.mean(axis=1), table.mean(axis=0)
    rest = float(((table - by_pair[:, None] - by_task + value) ** 2).sum())
    of_pairs = float(by_pair.var(ddof=1)) / num_pairs
    of_tasks = float(by_task.var(ddof=1)) / num_tasks
    of_rest = rest / ((num_pairs - 1) * (num_tasks - 1)) / table.size
    total = max(of_pairs + of_tasks - of_rest, of_pairs, of_tasks, 1e-12)
    parts = of_pairs**2 / (num_pairs - 1) + of_tasks**2 / (num_tasks - 1)
    degrees = max(num_pairs - 1, int(total**2 / parts)) if parts else num_pairs - 1
    return Difference(value, sqrt(total), degrees)


def bounds(shares: Sequence[float]) -> list[float]:
    """The bound of each look, in standard errors, for rising shares of the plan: found by integrating the density of a
    Brownian motion that has crossed no bound yet (Armitage, McPherson and Rowe, JRSS A 132, 1969).
    """
    found: list[float] = []
    grid, mass, spent, before = np.zeros(1), np.ones(1), 0.0, 0.0
    for share in shares:
        wanted, step = _spent(share) - spent, sqrt(share - before)
        low, high = 0.0, 12 * sqrt(share)
        for _ in range(40):
            edge = (low + high) / 2
            low, high = (edge, high) if float(mass @ _upper((edge - grid) / step)) > wanted else (low, edge)
        found.append(high / sqrt(share))
        after = np.linspace(-high, high, NUM_GRID)
        density = np.exp(-(((after[:, None] - grid) / step) ** 2) / 2) @ mass / (step * sqrt(2 * np.pi))
        grid, mass = after, density * (after[1] - after[0])
        spent, before = _spent(share), share
    return found


def _spent(share: float) -> float:
    return 2 * NORMAL.cdf(-NORMAL.inv_cdf(1 - TAIL / 2) / sqrt(share))
