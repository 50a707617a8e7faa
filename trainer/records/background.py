"""Sinks whose server may block or fail run in a separate thread, so that training never waits for them. One of them posts alarms to a URL,
one JSON object each.
"""

import http.client
import logging
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

import msgspec

from pipeline.journal.rows import AlarmRow, Row

log = logging.getLogger("swerve.trainer")

MAX_WAITING_ROWS = 10_000
CLOSE_S = 60.0


class ClosableSink(Protocol):
    """A sink that is opened, used and closed in the same thread."""

    def show(self, row: Row) -> None: ...

    def close(self) -> None: ...


class InBackground(AbstractContextManager["InBackground", None]):
    """Shows rows in a thread. If opening or showing fails, it reports that once and shows nothing more."""

    def __init__(self, name: str, open_sink: Callable[[], ClosableSink]) -> None:
        self._name = name
        self._open_sink = open_sink
        self._rows: queue.Queue[Row | None] = queue.Queue(MAX_WAITING_ROWS)
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def show(self, row: Row) -> None:
        """Returns at once. If more than MAX_WAITING_ROWS rows wait because of a slow server, the sink ends."""
        if self._has_failed:
            return
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._fail("it does not keep up with the run")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Shows the waiting rows, for CLOSE_S at most."""
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
        except Exception as error:  # an error of a library or a server may not end the run
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self._has_failed = True
        log.warning("%s shows nothing more of this run: %s", self._name, why)


TIMEOUT_S = 10.0
RETRY_S = 1.0
NUM_TRIES = 2


class Webhook(AbstractContextManager["Webhook", None]):
    """Posts alarms that begin or end; other rows are ignored. Training never waits for it."""

    def __init__(self, run_id: str, url: str) -> None:
        self._sender = InBackground("the alarms' webhook", lambda: _Sender(run_id, url))

    def show(self, row: Row) -> None:
        if isinstance(row, AlarmRow):
            self._sender.show(row)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sender.__exit__(kind, error, trace)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirected POST becomes a GET without a body, so a redirect counts as a failure."""

    def redirect_request(self, *_: object) -> None:
        return None


class _Sender:
    """Logs only the first of several failures in a row, without the URL, which may be a secret."""

    def __init__(self, run_id: str, url: str) -> None:
        self._run_id = run_id
        self._url = url
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._is_failing = False

    def show(self, row: Row) -> None:
        assert isinstance(row, AlarmRow)
        body = msgspec.json.encode(
            {
                "run": self._run_id,
                "alarm": row.kind,
                "subject": row.subject,
                "state": "over" if row.is_over else "begun",
                "step": row.step,
                "at": row.at,
                "text": f"{self._run_id}, step {row.step}: {row.sentence}",
            }
        )
        failure = self._post(body)
        for _ in range(NUM_TRIES - 1):
            if failure:
                time.sleep(RETRY_S)
                failure = self._post(body)
        if failure and not self._is_failing:
            log.warning("the alarms' webhook does not take alarms: %s", failure)
        self._is_failing = bool(failure)

    def close(self) -> None: ...

    def _post(self, body: bytes) -> str:
        """The reason of a failure; empty if the server accepted the body."""
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=TIMEOUT_S):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            return f"status {error.code} {http.client.responses.get(error.code, '')}".strip()
        except urllib.error.URLError as error:
            return f"{error.reason}"
        # The connection failed in the middle of a response.
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
