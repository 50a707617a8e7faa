"""The table of exit statuses in docs/operate.md, of commands of every package."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import connection
from pipeline.commandline import FAILED, MISUSE
from pipeline.taskfile import write_tasks
from tests.pipeline import samples
from trainer.evaluate import endpoint

ROOT = Path(__file__).parent.parent
NOWHERE = {"SWERVE_REDIS_URL": "redis://127.0.0.1:1/0", "DOCKER_HOST": "unix:///nosuch/docker.sock"}
ABSENT = "/nosuch/place"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "swerve.py", *words]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | NOWHERE, capture_output=True, text=True, check=False
    )


@pytest.mark.slow_but_for("report", "where")
@pytest.mark.parametrize(
    "words",
    [
        ("report", ABSENT),
        ("where", ABSENT),
        ("judge-report", ABSENT),
        ("replay", ABSENT),
        ("curve", ABSENT),
        ("rollouts", "export", ABSENT, "--format", "jsonl", "--out", ABSENT),
        ("evaluate", "compare", ABSENT, ABSENT),
        ("compare", ABSENT, ABSENT),
        ("power", ABSENT),
        ("convert", ABSENT, ABSENT),
        ("images", "build", ABSENT),
        ("ls", "--run-dir", ABSENT),
        ("show", "x", "--run-dir", ABSENT),
        ("explain", "x", "--run-dir", ABSENT),
        ("trace", "x", "--run-dir", ABSENT),
        ("web", "--run-dir", ABSENT),
        ("engine", "--model", ABSENT),
    ],
    ids=lambda words: words[0],
)
def test_a_missing_directory_is_called_missing(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (MISUSE, "")
    assert f"{ABSENT}: there is no such directory" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "words",
    [
        ("tasks", "import", "swe-smith", ABSENT, "--out", "/nosuch/tasks.jsonl"),
        ("verify", ABSENT),
        ("leaks", ABSENT),
        ("images", "ls", ABSENT),
        ("agent", ABSENT),
        ("train", ABSENT),
        ("router", "--port", "0"),
    ],
    ids=lambda words: words[0],
)
def test_a_users_mistake_is_one_line_and_status_2(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (MISUSE, "")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("ls",),
        ("dead",),
        ("reap",),
        ("forget", "x"),
        ("certify", "--router", "http://127.0.0.1:1"),
    ],
    ids=" ".join,
)
def test_what_does_not_answer_is_one_line_and_status_1(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (FAILED, "", 1)
    assert "does not answer" in done.stderr


def test_a_search_for_leaks_without_docker_is_one_line_and_status_1(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [samples.TASK])
    done = run("leaks", str(tmp_path / "tasks.jsonl"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (FAILED, "", 1)
    assert "no Docker host answers" in done.stderr


def test_an_evaluation_without_redis_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [samples.TASK])
    monkeypatch.setenv("SWERVE_REDIS_URL", NOWHERE["SWERVE_REDIS_URL"])
    monkeypatch.setattr(connection.connect, "__kwdefaults__", {"patience_s": 0})
    words = ["--api-base", "http://x/v1", "--model", "m", "--agent", "workers/agent/prompts/default.yaml"]
    assert endpoint.main([str(tmp_path / "tasks.jsonl"), *words, "--out", str(tmp_path / "out")]) == FAILED
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("web",), ("router",), ("engine", "--model", "trainer/demo/policy")])
def test_a_port_in_use_is_one_line_that_names_the_holder_and_the_flag(words: tuple[str, ...]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(*words, "--port", str(port))
    assert (done.returncode, done.stdout) == (MISUSE, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {words[0]}: port {port} is in use by process {os.getpid()} (")
    assert line.endswith("; stop it or give another --port")


def test_ctrl_c_is_silent() -> None:
    waiting = "import sys; sys.argv = ['-m']; import pipeline, time; print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", waiting], cwd=ROOT, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (128 + signal.SIGINT, b"")
