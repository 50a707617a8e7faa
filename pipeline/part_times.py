"""A clock that charges every moment to exactly one part of the work, so that the parts sum up to the wall time."""

import contextlib
import time
from collections.abc import Callable, Collection, Generator
from typing import Generic, TypeVar

P = TypeVar("P", bound=str)


class PartTimes(Generic[P]):
    """Charges the time of one coroutine, which alone says what it is doing."""

    def __init__(self, parts: Collection[P], first: P, clock: Callable[[], float] = time.monotonic) -> None:
        """Charges time to `first` until another part is named."""
        self._clock = clock
        self._part = first
        self._seconds: dict[P, float] = dict.fromkeys(parts, 0.0)
        self._charged_at = clock()

    @contextlib.contextmanager
    def spent(self, part: P) -> Generator[None]:
        """Charges the block to `part`. Blocks inside it are charged to their own parts."""
        outer = self._part
        self.turn_to(part)
        try:
            yield
        finally:
            self.turn_to(outer)

    def turn_to(self, part: P) -> None:
        """Charges the time from now on to `part`."""
        self._charge()
        self._part = part

    def lap(self) -> dict[P, float]:
        """Returns the seconds of every part since the last lap, or since the clock was made."""
        self._charge()
        lap, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return lap

    def _charge(self) -> None:
        now = self._clock()
        self._seconds[self._part] += now - self._charged_at
        self._charged_at = now
