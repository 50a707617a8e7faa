"""Processes that are kept alive together."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra import processes
from infra.fleet import MAX_DEATHS, Fleet, Part


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def fleet(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr("infra.fleet.RESTART_PAUSE_S", 0)
    fleet = Fleet(said.append)
    yield fleet
    fleet.stop()


@pytest.fixture
def part(tmp_path: Path) -> Callable[[str, str], Part]:
    def make(name: str, code: str) -> Part:
        command = [sys.executable, "-c", code]
        return Part(name, command, dict(os.environ), tmp_path / f"{name}.log", 10, signal.SIGKILL)

    return make


SLEEP = "import time; time.sleep(600)"


def test_a_part_that_died_is_started_again_and_reported(
    fleet: Fleet, part: Callable[[str, str], Part], said: list[str]
) -> None:
    victim, survivor = fleet.start(part("victim", SLEEP)), fleet.start(part("survivor", SLEEP))
    victim.process.kill()
    victim.process.wait()
    fleet.revive()
    (line,) = said
    assert line.startswith("victim died (status -9); starting it again")
    assert fleet.running["victim"][1].alive
    assert fleet.running["survivor"][1] is survivor


def test_a_part_that_dies_time_and_again_ends_the_fleet(
    fleet: Fleet, part: Callable[[str, str], Part]
) -> None:
    fleet.start(part("hopeless", "raise SystemExit('no such model')"))
    for _ in range(MAX_DEATHS):
        fleet.running["hopeless"][1].process.wait()
        fleet.revive()
    fleet.running["hopeless"][1].process.wait()
    with pytest.raises(RuntimeError, match="no such model"):
        fleet.revive()


def test_stopping_ends_a_part_that_ignores_it_and_its_children(
    fleet: Fleet, part: Callable[[str, str], Part], tmp_path: Path
) -> None:
    code = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "child")!r} + ".tmp", "w").write(str(child.pid))
os.rename({str(tmp_path / "child")!r} + ".tmp", {str(tmp_path / "child")!r})
time.sleep(600)
"""
    deaf = part("deaf", code)
    child = fleet.start(deaf)
    processes.wait_until((tmp_path / "child").exists, child=child, timeout_s=60, log=deaf.log)
    child.stop(grace_s=0.2)
    grandchild = Path("/proc", (tmp_path / "child").read_text())
    for _ in range(500):
        if not grandchild.exists() or ") Z" in (grandchild / "stat").read_text():
            return
        time.sleep(0.02)
    raise AssertionError("the child of a stopped part lives on")
