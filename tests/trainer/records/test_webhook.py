"""Alarms are posted to a URL, without holding up the run, and without the URL in any log or error."""

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from pipeline.journal.rows import AlarmRow, Row
from tests.trainer.records.test_console import row
from trainer.recipe import AlarmsRecipe, Recipe, SinksRecipe, load_recipe
from trainer.records import sinks
from trainer.records.sinks import RunFacts, Webhook, open_sinks

BEGUN = AlarmRow(step=7, kind="gap_grows", text="the gap is 0.2", at=1_800_000_000.0)
OVER = replace(BEGUN, step=9, text="the gap is 0.01", is_over=True)
SECRET = "/services/T0/s3cret"


class Server(HTTPServer):
    """Answers with the next of `statuses`, the last one again and again, and keeps what was accepted."""

    def __init__(self, *statuses: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses = [*statuses]
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{SECRET}"


class Handler(BaseHTTPRequestHandler):
    protocol_version: ClassVar[str] = "HTTP/1.0"
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.statuses.pop(0) if len(self.server.statuses) > 1 else self.server.statuses[0]
        self.server.paths.append(self.path)
        if status == 200:
            self.server.bodies.append(json.loads(body))
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def serving(*statuses: int) -> Iterator[Server]:
    with Server(*statuses) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Silent:
    def show(self, row: Row) -> None: ...


def recipe(**alarms: Any) -> Recipe:
    sinks = SinksRecipe(tensorboard=False, jsonl=False)
    loaded = load_recipe(Path("trainer/recipes/demo.toml"))
    return replace(loaded, sinks=sinks, alarms=AlarmsRecipe(**alarms))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "RETRY_S", 0.0)


def test_an_alarm_is_posted_when_it_begins_and_when_it_is_over_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(200) as server:
        monkeypatch.setenv("MY_HOOK", server.url)
        with open_sinks(RunFacts("run-1", tmp_path, recipe(webhook_env="MY_HOOK")), Silent()) as sinks:
            for one in (row(7, 0.5), BEGUN, OVER):
                for sink in sinks:
                    sink.show(one)
    assert server.bodies == [
        {
            "run": "run-1",
            "alarm": "gap_grows",
            "subject": "",
            "state": "begun",
            "step": 7,
            "at": 1_800_000_000.0,
            "text": "run-1, step 7: ALARM: gap_grows: the gap is 0.2",
        },
        {
            "run": "run-1",
            "alarm": "gap_grows",
            "subject": "",
            "state": "over",
            "step": 9,
            "at": 1_800_000_000.0,
            "text": "run-1, step 9: alarm is over: gap_grows: the gap is 0.01",
        },
    ]


def test_a_failed_post_is_tried_again_and_the_next_alarm_is_posted_too() -> None:
    with serving(500, 200) as server:
        with Webhook("run-1", server.url) as hook:
            hook.show(BEGUN)
            hook.show(OVER)
        assert [body["state"] for body in server.bodies] == ["begun", "over"]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_server_that_refuses_is_logged_once_without_its_url(
    caplog: pytest.LogCaptureFixture, status: int
) -> None:
    with serving(status) as server, caplog.at_level(logging.WARNING):
        with Webhook("run-1", server.url) as hook:
            hook.show(BEGUN)
            hook.show(OVER)
        assert set(server.paths) == {SECRET}, "no redirect was followed"
    (said,) = caplog.messages
    assert said.startswith(f"the alarms' webhook does not take alarms: status {status}")
    assert "s3cret" not in caplog.text


def test_a_server_that_is_away_is_logged_once_without_its_url(caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://127.0.0.1:1{SECRET}"  # where nobody listens; a port that was given back may be another server's by now
    with caplog.at_level(logging.WARNING), Webhook("run-1", url) as hook:
        hook.show(BEGUN)
        hook.show(OVER)
    (said,) = caplog.messages
    assert "Connection refused" in said
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("url", [None, "s3cret.example/hook", "file:///etc/s3cret"])
def test_a_webhook_without_a_url_is_refused_by_the_name_of_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    monkeypatch.delenv("MY_HOOK", raising=False)
    if url is not None:
        monkeypatch.setenv("MY_HOOK", url)
    facts = RunFacts("run-1", tmp_path, recipe(webhook_env="MY_HOOK"))
    with (
        pytest.raises(ValueError, match=r"alarms\.webhook_env: .* MY_HOOK") as refused,
        open_sinks(facts, Silent()),
    ):
        pass
    assert "s3cret" not in str(refused.value)
