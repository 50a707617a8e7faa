"""The router as a command: which engines it takes, and where its own output goes."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from infra.serving.router import parse_arguments
from tests.conftest import free_ports

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("localhost:7361", "http://localhost:7361"),
        ("http://a:30001", "http://a:30001"),
        ("https://a", "https://a"),
    ],
)
def test_an_engine_without_a_scheme_is_one_of_http(typed: str, url: str) -> None:
    assert parse_arguments(["--engine", typed]).engine == [url]


@pytest.mark.parametrize(
    "typed",
    ["redis://a:1", "", "http://", ":7361", "a:99999", "a:0", "a:port", "http://a b", "http://[::1", "///"],
)
def test_an_engine_that_is_no_address_is_refused_with_an_example(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["--engine", typed])
    assert f"{typed!r}: give a URL as in http://127.0.0.1:30001" in capsys.readouterr().err


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@pytest.mark.slow
def test_on_a_terminal_the_router_says_one_line_and_the_rest_is_in_its_log(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    port, metrics_port = free_ports(2)
    words = ["-m", "infra.serving.router", "--engine", "127.0.0.1:1", f"--port={port}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words, f"--metrics-port={metrics_port}"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=theirs, stderr=theirs) as router:
        os.close(theirs)
        shown = os.read(ours, 4096).decode()
        while not answers(f"http://127.0.0.1:{port}/readiness"):
            assert router.poll() is None, (tmp_path / "runs/router.log").read_text()
        router.send_signal(signal.SIGTERM)
        router.wait()
    # The other end is closed, which ends this end with an error.
    with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        shown += terminal.read().decode()
    assert shown.splitlines() == [f"router: http://127.0.0.1:{port}; what it says is in runs/router.log"]
    assert "smg" in (tmp_path / "runs/router.log").read_text()
