"""Means of a number over windows of consecutive steps: the first window, the last, and the extremes before the last."""

from collections import deque
from dataclasses import dataclass
from statistics import fmean, stdev

NUM_ERRORS = 3.0
"""A difference of two means within so many standard errors may be chance."""

NUM_ERRORS_OF_EXTREME = 5.0
"""As NUM_ERRORS, where one of the two is the highest or the lowest of many windows, which chance alone makes extreme."""


@dataclass(frozen=True, slots=True)
class Mean:
    value: float
    error: float  # standard error

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


class StepWindows:
    """Of one number. No window overlaps the last one, except for itself; what has not happened yet is None."""

    def __init__(self, size: int) -> None:
        self.size = size  # in steps
        self.first: Mean | None = None
        self.highest_before: Mean | None = None
        self.lowest_before: Mean | None = None
        self._values: deque[float] = deque(maxlen=size)
        self._later: deque[Mean] = deque()  # windows that overlap the last one, oldest first
        self._full: Mean | None = None

    @property
    def last(self) -> Mean | None:
        """The newest window; None until there is one that does not overlap the first."""
        return self._full if self.highest_before is not None else None

    def add(self, value: float) -> None:
        """The number of the next step."""
        self._values.append(value)
        if len(self._values) < self.size:
            return
        self._full = mean_of(self._values)
        self.first = self.first or self._full
        if len(self._later) == self.size:
            self._settle(self._later.popleft())
        self._later.append(self._full)

    def _settle(self, window: Mean) -> None:
        """The last window no longer overlaps this one."""
        if self.highest_before is None or window.value > self.highest_before.value:
            self.highest_before = window
        if self.lowest_before is None or window.value < self.lowest_before.value:
            self.lowest_before = window


def mean_of(values: deque[float]) -> Mean:
    return Mean(fmean(values), stdev(values) / len(values) ** 0.5)


def differ(one: Mean, other: Mean, num_errors: float = NUM_ERRORS) -> bool:
    """Whether two means differ by more than so many standard errors of their difference."""
    error = (one.error**2 + other.error**2) ** 0.5
    return abs(one.value - other.value) > num_errors * error
