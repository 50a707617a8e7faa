"""Runs a sink that may block, or whose server may fail, in a thread of its own, so that training waits for neither."""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

from trainer.records.row import Row

log = logging.getLogger("swerve.trainer")

MAX_WAITING_ROWS = 10_000
CLOSE_S = 60.0


class ClosableSink(Protocol):
    """A sink that is opened, used and closed in one thread."""

    def show(self, row: Row) -> None: ...

    def close(self) -> None: ...


class InBackground(AbstractContextManager["InBackground", None]):
    """Shows rows in a thread. If opening or showing fails, says so once and shows nothing more."""

    def __init__(self, name: str, open_sink: Callable[[], ClosableSink]) -> None:
        self._name = name
        self._open_sink = open_sink
        self._rows: queue.Queue[Row | None] = queue.Queue(MAX_WAITING_ROWS)
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def show(self, row: Row) -> None:
        """Returns at once. Rows that a slow server leaves waiting beyond MAX_WAITING_ROWS end the sink."""
        if self._has_failed:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._fail("it does not keep up with the run")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shows what waits, for CLOSE_S at most."""
        if not self._has_failed:
            self._rows.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("%s did not take everything within %.0f s", self._name, CLOSE_S)

    def _run(self) -> None:
        try:
            sink = self._open_sink()
            try:
                while not self._has_failed and (row := self._rows.get()) is not None:
                    sink.show(row)
            finally:
                sink.close()
        except Exception as error:  # a library's or a server's: none of them may end the run
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self._has_failed = True
        log.warning("%s shows nothing more of this run: %s", self._name, why)
