"""Intervals of everything that is reported as a mean, a share or a difference: at 95 %, and by these functions only.

A share of independent draws has Wilson's interval. Values of one task or one group are related, so tasks or groups are the draws, and
quantiles are those of Student's t distribution with one degree of freedom fewer than there are. A difference of two results on the same
tasks is paired; other differences are made of the intervals of both sides.

pass@k is the unbiased estimator of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374): of n
graded episodes of a task, c resolved it, and 1 - C(n - c, k) / C(n, k) is the probability that k of them include one that did.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, cos, exp, inf, isfinite, nan, pi, sin, sqrt
from statistics import NormalDist, fmean

NORMAL_QUANTILE = NormalDist().inv_cdf(0.975)
"""Half of the width of the middle 95 % of a normal distribution, in standard deviations."""

TAIL = 0.025
"""The probability beyond each end of a 95 % interval."""

HEADING = "95 % interval in brackets"
"""What a table says of the intervals in it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean or a difference, with its 95 % interval."""

    value: float
    low: float
    high: float
    num_draws: int  # number of tasks or groups, which are the independent draws

    def percent(self, sign: str = "") -> str:
        """The estimate in percent, with the words that a line needs which says nothing else about intervals."""
        return f"{100 * self.value:{sign}.1f} % ({self._ends(100, f'{sign}.1f')}, 95 %)"

    def cell(self, sign: str = "") -> str:
        """The estimate in percent, for a table whose heading names the interval."""
        return f"{100 * self.value:{sign}.1f} ({self._ends(100, f'{sign}.1f')})"

    def plain(self, form: str = ".3f") -> str:
        """The estimate as a number, with the words that a line needs which says nothing else about intervals."""
        return f"{self.value:{form}} ({self._ends(1, form)}, 95 %)"

    def _ends(self, factor: float, form: str) -> str:
        return f"{factor * self.low:{form}} to {factor * self.high:{form}}"


def wilson_interval(share: float, num_draws: float, quantile: float = NORMAL_QUANTILE) -> tuple[float, float]:
    """Wilson's score interval of a share ("Probable Inference, the Law of Succession, and Statistical Inference", JASA 22, 1927), at 95 %
    with the default quantile. It also holds for few draws, and for shares of 0 and 1.
    """
    square = quantile**2 / num_draws
    middle, half = share + square / 2, sqrt(share * (1 - share) * square + square**2 / 4)
    # The bounds of 0 and 1 are exact, without a rounding error.
    low = (middle - half) / (1 + square) if share > 0 else 0.0
    high = (middle + half) / (1 + square) if share < 1 else 1.0
    return max(0.0, low), min(1.0, high)


@lru_cache(maxsize=4096)
def t_quantile(degrees: int, tail: float = TAIL) -> float:
    """The quantile of Student's t distribution with the probability `tail` above it, found by bisection of the finite series of its
    distribution (Abramowitz and Stegun, 26.7.3 and 26.7.4). More than 1,000 degrees count as 1,000, which makes it at most 0.2 % larger.
    """
    degrees = min(degrees, 1000)
    low, high = 0.0, pi / 2  # t is the square root of the degrees times the tangent of an angle
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _tail(degrees, angle) > tail else (low, angle)
    return sqrt(degrees) * sin(high) / cos(high)


def _tail(degrees: int, angle: float) -> float:
    """The probability that t is larger than the square root of the degrees times the tangent of the angle."""
    square = cos(angle) ** 2
    term, series = (1.0, 0.0) if degrees % 2 == 0 else (cos(angle), 0.0)
    for power in range(degrees % 2, degrees - 1, 2):
        series += term
        term *= square * (power + 1) / (power + 2)
    within = sin(angle) * series if degrees % 2 == 0 else 2 / pi * (angle + sin(angle) * series)
    return (1 - within) / 2


def mean(groups: Iterable[Sequence[float]]) -> Estimate | None:
    """The mean of all values with its interval; groups are the draws. None: there is no value.

    Values between 0 and 1, as rewards are, have the interval of `share`, others that of `t_mean`.
    """
    groups = [group for group in groups if group]
    if all(0 <= value <= 1 for group in groups for value in group):
        sizes = [len(group) for group in groups]
        return share([fmean(group) for group in groups], sum(sizes), sizes)
    return t_mean(groups)


def t_mean(groups: Iterable[Sequence[float]]) -> Estimate | None:
    """The mean of all values with the interval of `clustered_mean`; groups are the draws. None: there is no value."""
    return clustered_mean((sum(group), len(group)) for group in groups)


def clustered_mean(groups: Iterable[tuple[float, int]]) -> Estimate | None:
    """The mean of all values with its interval, from the sum and the number of each group's values; groups are the draws, and those without
    a value are left out. None: there is no value.

    The interval is that of the t distribution with the cluster-robust standard error: with u_g the sum of a group's residuals and n values
    in G groups, SE = sqrt(G / (G - 1) * sum(u_g^2)) / n (Liang and Zeger, 1986). Numbers too large for it make it infinite or not a number.
    """
    groups = [(total, count) for total, count in groups if count]
    num_values, num_groups = sum(count for _, count in groups), len(groups)
    if not num_values:
        return None
    # `fmean` and `**` raise an error where the mean is infinite
    centre = sum(total for total, _ in groups) / num_values
    if num_groups == 1 or not isfinite(centre):
        return Estimate(centre, -inf, inf, num_groups)
    residuals = [total - count * centre for total, count in groups]
    squares = sum(residual * residual for residual in residuals) * num_groups / (num_groups - 1)
    half = t_quantile(num_groups - 1) * sqrt(squares) / num_values if squares < inf else nan
    return Estimate(centre, centre - half, centre + half, num_groups)


def share(
    per_task: Sequence[float], num_draws: int, weights: Sequence[float] | None = None
) -> Estimate | None:
    """The mean of one share in [0, 1] for each task, or group, with its interval. None: there is no task. `weights` are relative.

    The interval is Wilson's. If each share is 0 or 1, tasks are the draws. Otherwise the number of draws is the effective one, the variance
    of a single draw over that of the mean over tasks, with t quantiles (Korn and Graubard, Survey Methodology 24, 1998); it is at most
    `num_draws`, the number of independent draws in all tasks.
    The variance over tasks counts two more tasks, of shares 0 and 1, because among few tasks it may be small by chance. One share between
    0 and 1 says nothing about other tasks.
    """
    if not per_task:
        return None
    num_tasks = len(per_task)
    weights = weights or [1.0] * num_tasks
    value = min(1.0, fmean(per_task, weights))
    is_even = len({*weights}) == 1
    if {*per_task} <= {0.0, 1.0} and (is_even or value in (0.0, 1.0)):
        return Estimate(value, *wilson_interval(value, num_tasks), num_tasks)
    if num_tasks == 1:
        return Estimate(value, 0.0, 1.0, 1)
    centre = (num_tasks * value + 1) / (num_tasks + 2)
    mean_weight = fmean(weights)
    extended = zip([*per_task, 0.0, 1.0], [*weights, mean_weight, mean_weight], strict=True)
    spread = sum((weight / mean_weight * (one - centre)) ** 2 for one, weight in extended) / (num_tasks + 1)
    effective = num_tasks * centre * (1 - centre) / spread
    num_effective = max(num_tasks if is_even else 1, min(effective, num_draws))
    return Estimate(value, *wilson_interval(value, num_effective, t_quantile(num_tasks - 1)), num_tasks)


class RatioOfShares:
    """Ratios of the share of a kind in one total to its share in another that contains it; groups are the draws. A ratio of 1: the kind is
    as frequent in both.

    The interval is that of the t distribution around the logarithm of the ratio, with the standard error of a Taylor series of the first
    order: with a/A and b/B the shares, u_g = a_g/a - A_g/A - b_g/b + B_g/B in group g, and G groups, SE = sqrt(G / (G - 1) * sum(u_g^2))
    (Saerndal, Swensson and Wretman, Model Assisted Survey Sampling, 1992, section 5.5). A kind of which the first total has nothing or all
    has the open end of Clopper and Pearson, with the groups that have the kind as the draws. No end is above B/A, where all of the kind is
    in the first total.
    """

    def __init__(self, totals: Mapping[str, tuple[float, float]]) -> None:
        """`totals` are the two totals of each group."""
        self._first, self._second = (
            (sum(column) for column in zip(*totals.values(), strict=True)) if totals else (0, 0)
        )
        self._num_groups = len(totals)
        if self._first > 0:
            self._errors = {name: b / self._second - a / self._first for name, (a, b) in totals.items()}
            self._squares = sum(error * error for error in self._errors.values())

    def of(self, parts: Mapping[str, tuple[float, float]]) -> Estimate | None:
        """The ratio of a kind of which each group has these parts of the two totals; a group without the kind may be left out. None: the
        first total is 0, or the second has none of the kind.
        """
        first, second = (sum(column) for column in zip(*parts.values(), strict=True)) if parts else (0, 0)
        if not (self._first > 0 and second > 0):
            return None
        most, value = self._second / self._first, (first / self._first) / (second / self._second)
        num_draws = sum(b > 0 for _, b in parts.values())
        if first == 0:
            return Estimate(0.0, 0.0, (1 - TAIL ** (1 / num_draws)) * most, self._num_groups)
        if first == second:
            return Estimate(value, TAIL ** (1 / num_draws) * most, most, self._num_groups)
        if num_draws == 1:
            return Estimate(value, 0.0, most, self._num_groups)
        squares = self._squares
        for name, (a, b) in parts.items():
            squares += (self._errors[name] + a / first - b / second) ** 2 - self._errors[name] ** 2
        spread = max(0.0, squares) * self._num_groups / (self._num_groups - 1)
        factor = exp(min(700.0, t_quantile(self._num_groups - 1) * sqrt(spread)))
        return Estimate(value, value / factor, min(most, value * factor), self._num_groups)


def pass_at_k(num_episodes: int, num_resolved: int, k: int) -> float:
    """The estimate of pass@k for one task. Raises ValueError unless 1 <= k <= num_episodes."""
    if not 1 <= k <= num_episodes:
        raise ValueError(
            f"pass@{k} cannot be estimated from {num_episodes} episodes: k must be between 1 and that"
        )
    return 1 - comb(num_episodes - num_resolved, k) / comb(num_episodes, k)


def pass_at(graded: Mapping[str, Sequence[bool]], k: int) -> Estimate | None:
    """pass@k over the tasks that have at least k graded episodes; `graded` contains for each episode whether it resolved its task."""
    enough = [runs for runs in graded.values() if len(runs) >= k]
    return share(
        [pass_at_k(len(runs), sum(runs), k) for runs in enough], sum(len(runs) // k for runs in enough)
    )


def paired_difference(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]], tail: float = TAIL
) -> Estimate | None:
    """The mean of `second` minus that of `first`, over the tasks for which both have values in [0, 1]. None: there is no such task.

    The interval is that of the t distribution, at 95 % with the default tail, over two more tasks, of which one has a difference of 0 and
    the other is half won and half lost: without these, a comparison of equal evaluations would be certain (Agresti and Min, Statistics
    in Medicine 24, 2005). If each task has k episodes or more, the differences of the second are 1 and -1 over the square root of k, as
    the noise of episodes is.
    """
    both = [task for task, runs in first.items() if runs and second.get(task)]
    differences = [fmean(second[task]) - fmean(first[task]) for task in both]
    if not differences:
        return None
    if len(differences) == 1:
        return Estimate(differences[0], -1.0, 1.0, 1)
    count = len(differences) + 2
    centre = sum(differences) / count
    fewest = min(len(runs[task]) for runs in (first, second) for task in both)
    spread = (sum(one * one for one in differences) + 1 / fewest) / count - centre * centre
    half = t_quantile(len(differences) - 1, tail) * sqrt(spread / count)
    return Estimate(fmean(differences), max(-1.0, centre - half), min(1.0, centre + half), len(differences))


def difference(first: Estimate, second: Estimate) -> Estimate:
    """`second` minus `first`, of independent draws. Each end is as far from the difference as the root of the squared distances of the two
    ends of which it is made: Newcombe's method 10 for shares (Statistics in Medicine 17, 1998), and for others that of Zou and Donner
    (Statistics in Medicine 27, 2008).
    """
    value = second.value - first.value
    down = sqrt((second.value - second.low) ** 2 + (first.high - first.value) ** 2)
    up = sqrt((second.high - second.value) ** 2 + (first.value - first.low) ** 2)
    return Estimate(value, value - down, value + up, min(first.num_draws, second.num_draws))
