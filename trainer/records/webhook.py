"""A sink that posts alarms to a URL, one JSON object each, from a thread of its own."""

import http.client
import logging
import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from types import TracebackType

import msgspec

from trainer.records.alarm_row import AlarmRow, alarm_sentence
from trainer.records.background import InBackground
from trainer.records.row import Row

log = logging.getLogger("swerve.trainer")

TIMEOUT_S = 10.0
RETRY_S = 1.0
NUM_TRIES = 2


class Webhook(AbstractContextManager["Webhook", None]):
    """Posts what begins and what is over; other rows are ignored. Training never waits for it."""

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
    """Logs the first failure of several in a row, without the URL, which may be a secret."""

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
                "text": f"{self._run_id}, step {row.step}: {alarm_sentence(row)}",
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
        """Why it failed; empty if the server accepted it."""
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=TIMEOUT_S):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            return f"status {error.code} {http.client.responses.get(error.code, '')}".strip()
        except urllib.error.URLError as error:
            return f"{error.reason}"
        except (OSError, http.client.HTTPException) as error:  # in the middle of a reply
            return type(error).__name__
