"""A worker that cannot start says why in one line, with the fix, and its status tells a wrong setting from what does not answer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.redis_server import FORGETFUL, own_redis
from pipeline.commandline import FAILED, MISUSE

IMPATIENT = "import sys; from workers import run; run.DOCKER_PATIENCE_S = run.REDIS_PATIENCE_S = 0; sys.exit(run.main())"


def start(status: int = MISUSE, **environment: str) -> str:
    """The one line that `python -m workers.run` ends with."""
    inherited = {
        name: text for name, text in os.environ.items() if name not in ("DOCKER_HOST", "SWERVE_DOCKER_HOSTS")
    }
    ended = subprocess.run(
        [sys.executable, "-c", IMPATIENT],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr.count("\n")) == (status, 1), ended.stderr
    return ended.stderr


@pytest.mark.slow_but_for("SWERVE_SLOT-*", "SWERVE_SLOTS*")
@pytest.mark.parametrize(
    ("variable", "text", "fix"),
    [
        (
            "SWERVE_SLOT",
            "2",
            "SWERVE_SLOT: no program of Swerve reads this variable; did you mean SWERVE_SLOTS?",
        ),
        ("SWERVE_SLOTS", "many", "SWERVE_SLOTS='many': give a whole number of at least 1"),
        (
            "SWERVE_DOCKER_HOSTS",
            "ssh://a",
            "SWERVE_DOCKER_HOSTS: 'ssh://a': give unix:///PATH or tcp://HOST:PORT",
        ),
        ("SWERVE_PREFETCH", "yes", "SWERVE_PREFETCH='yes': give 1 to pull images ahead, or 0"),
        ("SWERVE_MIN_FREE_BYTES", "much", "SWERVE_MIN_FREE_BYTES='much': "),
        ("SWERVE_REDIS_URL", "http://h", "Redis URL"),
    ],
)
def test_a_wrong_setting_is_named(variable: str, text: str, fix: str) -> None:
    line = start(**{variable: text})
    assert fix in line
    assert "secret" not in line


def test_a_redis_that_does_not_answer_is_no_wrong_setting_so_that_systemd_starts_the_worker_again() -> None:
    line = start(FAILED, SWERVE_REDIS_URL="redis://:secret@127.0.0.1:1/0")
    assert "does not answer" in line
    assert "secret" not in line


def test_a_refused_password_is_said_to_be_refused(tmp_path: Path) -> None:
    with own_redis(FORGETFUL | {"requirepass": "right"}) as url:
        line = start(SWERVE_REDIS_URL=url)
    assert "password" in line
    assert "set SWERVE_REDIS_URL" in line


@pytest.mark.parametrize("address", ["unix:///nonexistent/docker.sock", "tcp://127.0.0.1:1"])
def test_a_docker_host_where_nobody_listens_is_named_with_the_fix(redis_url: str, address: str) -> None:
    line = start(FAILED, SWERVE_REDIS_URL=redis_url, DOCKER_HOST=address)
    assert f"nobody listens at {address}" in line
    assert "start Docker, or set DOCKER_HOST or SWERVE_DOCKER_HOSTS" in line


@pytest.mark.docker
def test_a_state_directory_that_cannot_be_used_is_named(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = start(SWERVE_REDIS_URL=redis_url, SWERVE_STATE_DIR=str(tmp_path / "file/state"))
    assert line.startswith(f"SWERVE_STATE_DIR={tmp_path}/file/state: ")


@pytest.mark.docker
def test_a_container_runtime_that_the_docker_host_does_not_know_is_named_with_those_it_knows(
    redis_url: str,
) -> None:
    line = start(SWERVE_REDIS_URL=redis_url, SWERVE_CONTAINER_RUNTIME="nonesuch")
    assert line.startswith(
        "SWERVE_CONTAINER_RUNTIME='nonesuch': the Docker host at unix:///var/run/docker.sock "
    )
    assert "runc; choose one of these or register it there" in line
