"""What a chaos campaign starts and mounts cannot outlive it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFINED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from infra.chaos.confinement import run_confined
from infra.chaos.injection import SIGNALS, EndRequested, SignalListener

place, ending = Path(sys.argv[1]), sys.argv[2]
signals = SignalListener()

def body():
    subprocess.run(["mount", "-t", "tmpfs", "none", str(place / "mounted")], check=True)
    (place / "mounted/file").touch()
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    (place / "ready").write_text(str(os.getpid()))
    try:
        while ending == "waits":
            signals.check()
            time.sleep(0.02)
    except EndRequested as request:
        print(request)
    return 7

sys.exit(run_confined(body, signals=SIGNALS))
"""

# A parent that the kernel lets wait, right after it has started the body.
SLOW_PARENT = """
import time
from multiprocessing.context import ForkProcess

start = ForkProcess.start

def start_slowly(process):
    start(process)
    time.sleep(2)

ForkProcess.start = start_slowly
"""


def start(place: Path, ending: str, *, beforehand: str = "") -> "subprocess.Popen[str]":
    (place / "mounted").mkdir()
    command = [sys.executable, "-c", beforehand + CONFINED, str(place), ending]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def await_ready(place: Path, process: "subprocess.Popen[str]") -> None:
    while not ((place / "ready").exists() and (place / "ready").read_text()):
        assert process.poll() is None
        time.sleep(0.02)


def sleepers(place: Path) -> list[int]:
    """Processes that see our mount."""
    found: list[int] = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            try:
                mounts = (directory / "mounts").read_text()
            except OSError:
                continue
            found += [int(directory.name)] if str(place) in mounts else []
    return found


def test_its_status_is_the_bodys_and_nothing_is_left(tmp_path: Path) -> None:
    process = start(tmp_path, "ends")
    process.communicate()
    assert process.returncode == 7
    assert (tmp_path / "ready").read_text() == "1"
    assert sleepers(tmp_path) == []
    assert list((tmp_path / "mounted").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_body_is_told_of_signals_and_ends_as_it_likes(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "waits")
    await_ready(tmp_path, process)
    os.killpg(process.pid, number)  # as Ctrl-C does
    told, _ = process.communicate()
    assert (told.split(), process.returncode) == ([number.name], 7)


@pytest.mark.slow
def test_a_signal_that_arrives_while_the_body_is_started_reaches_it_too(tmp_path: Path) -> None:
    process = start(tmp_path, "waits", beforehand=SLOW_PARENT)
    await_ready(tmp_path, process)
    process.terminate()
    told, _ = process.communicate()
    assert (told.split(), process.returncode) == (["SIGTERM"], 7)


def test_when_it_is_killed_all_it_started_and_mounted_goes(tmp_path: Path) -> None:
    process = start(tmp_path, "waits")
    await_ready(tmp_path, process)
    assert sleepers(tmp_path)
    process.kill()
    process.communicate()
    while sleepers(tmp_path):
        time.sleep(0.02)
    (tmp_path / "mounted").rmdir()  # "busy" if it were mounted still
