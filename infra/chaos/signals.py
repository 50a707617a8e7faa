"""Signals that ask for an early end, acted on only where it is safe."""

import signal
from collections import deque
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndRequested(Exception):
    """A signal asked for the end of the campaign."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class SignalListener:
    """Records SIGNALS from its creation on."""

    def __init__(self) -> None:
        self._pending: deque[signal.Signals] = deque()
        for number in SIGNALS:
            signal.signal(number, self._record)

    def check(self) -> None:
        """Raises EndRequested, once for each signal received."""
        if self._pending:
            raise EndRequested(self._pending.popleft())

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(signal.Signals(number))
