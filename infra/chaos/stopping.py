"""Signals that ask us to end, taken notice of only where it does no harm."""

import signal
from collections import deque
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """A signal asked us to end."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Stop:
    """Listens from the start."""

    def __init__(self) -> None:
        self._asked: deque[signal.Signals] = deque()
        for number in SIGNALS:
            signal.signal(number, self._note)

    def heed(self) -> None:
        """Raises Stopped once for each signal that came."""
        if self._asked:
            raise Stopped(self._asked.popleft())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(signal.Signals(number))
