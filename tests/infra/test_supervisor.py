"""Processes that are kept alive together."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from infra import processes, services
from infra.processes import MAX_DEATHS, SupervisedProcess, Supervisor

Make = Callable[[str, str], SupervisedProcess]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr("infra.processes.RESTART_PAUSE_S", 0)
    supervisor = Supervisor(said.append)
    yield supervisor
    supervisor.stop()


@pytest.fixture
def process(tmp_path: Path) -> Make:
    def make(name: str, code: str) -> SupervisedProcess:
        command = [sys.executable, "-c", code]
        log = tmp_path / f"{name}.log"
        return SupervisedProcess(name, lambda: command, dict(os.environ), log, 240, signal.SIGKILL)

    return make


SLEEP = "import time; time.sleep(600)"
EVERY_PID = range(2**22)
ENDS_IN_ORDER = """
import signal, sys, time
def finish(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as the trainer and workers: a second one ends it at once
    time.sleep(float(sys.argv[1]))
    print("in good order", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, finish)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_process_that_died_is_started_again_and_reported(
    supervisor: Supervisor, process: Make, said: list[str]
) -> None:
    victim, survivor = (
        supervisor.start(process("victim", SLEEP)),
        supervisor.start(process("survivor", SLEEP)),
    )
    victim.process.kill()
    victim.process.wait()
    supervisor.restart_dead()
    (line,) = said
    assert line.startswith("victim died (status -9); starting it again")
    assert supervisor.running["victim"][1].alive
    assert supervisor.running["survivor"][1] is survivor


def test_a_process_that_dies_time_and_again_is_an_error_with_its_last_lines(
    supervisor: Supervisor, process: Make
) -> None:
    supervisor.start(process("hopeless", "raise SystemExit('no such model')"))
    for _ in range(MAX_DEATHS):
        supervisor.running["hopeless"][1].process.wait()
        supervisor.restart_dead()
    supervisor.running["hopeless"][1].process.wait()
    with pytest.raises(RuntimeError, match="no such model"):
        supervisor.restart_dead()


def test_a_process_that_finishes_is_started_again_only_if_a_signal_ended_it(
    supervisor: Supervisor, process: Make, tmp_path: Path
) -> None:
    code = f"from pathlib import Path; flag = Path({str(tmp_path / 'flag')!r}); flag.exists() and exit(3); {SLEEP}"
    child = supervisor.start(replace(process("runner", code), finishes=True))
    assert supervisor.exit_status("runner") is None
    child.process.kill()
    child.process.wait()
    (tmp_path / "flag").touch()
    assert supervisor.exit_status("runner") is None
    supervisor.restart_dead()
    assert supervisor.running["runner"][1].process.wait() == 3
    supervisor.restart_dead()
    assert supervisor.exit_status("runner") == 3


def test_a_process_comes_back_after_a_pause_that_holds_up_nothing_else(
    supervisor: Supervisor, process: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.processes.RESTART_PAUSE_S", 3600)
    victim = supervisor.start(process("victim", SLEEP))
    victim.process.kill()
    victim.process.wait()
    supervisor.restart_dead()
    assert supervisor.running["victim"][1] is victim
    assert not victim.alive


def test_what_a_process_leaves_in_its_scratch_goes_with_it(
    supervisor: Supervisor, process: Make, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    code = f"import tempfile; tempfile.mkstemp(prefix='left-'); {SLEEP}"
    messy = replace(process("messy", code), scratch=scratch)
    child = supervisor.start(messy)
    # By its name: the module first writes and removes files of its own, to see whether it may.
    processes.wait_until(
        lambda: any(scratch.glob("left-*")), child=child, timeout_s=240, log=tmp_path / "messy.log"
    )
    (left,) = scratch.glob("left-*")
    child.process.kill()
    child.process.wait()
    supervisor.restart_dead()
    assert not left.exists()
    supervisor.stop()
    assert not scratch.exists()


def test_stopping_ends_a_process_that_ignores_it_and_its_children(
    supervisor: Supervisor, process: Make, tmp_path: Path
) -> None:
    code = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "child")!r} + ".tmp", "w").write(str(child.pid))
os.rename({str(tmp_path / "child")!r} + ".tmp", {str(tmp_path / "child")!r})
time.sleep(600)
"""
    deaf = process("deaf", code)
    child = supervisor.start(deaf)
    processes.wait_until((tmp_path / "child").exists, child=child, timeout_s=240, log=deaf.log)
    child.stop(grace_s=0.2)
    grandchild = int((tmp_path / "child").read_text())
    while services.began_at_ticks(grandchild) is not None:
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.alone
def test_orphans_are_looked_for_while_threads_of_ours_come_and_go() -> None:
    has_looked = threading.Event()

    def come_and_go() -> None:
        while not has_looked.is_set():
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()

    with ThreadPoolExecutor() as threads:
        coming = threads.submit(come_and_go)
        try:
            for _ in range(5000):
                processes.reap_orphans(EVERY_PID)  # so none of another test is waited for
        finally:
            has_looked.set()
        coming.result()


ORPHANING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
print(child.pid, flush=True)
"""


def test_the_exit_status_of_orphans_is_collected() -> None:
    code = f"""
import subprocess, sys, time
from pathlib import Path
from infra import processes
processes.adopt_orphans()
orphan = int(subprocess.run([sys.executable, "-c", {ORPHANING!r}], capture_output=True, text=True).stdout)
sleeper = subprocess.Popen(["sleep", "600"])
waited_for = subprocess.Popen(["true"])
while Path("/proc", str(orphan)).exists():
    processes.reap_orphans({{sleeper.pid, waited_for.pid}})
    time.sleep(0.02)
sleeper.kill()
print(waited_for.wait(), sleeper.wait())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", "-9"], done.stderr


@pytest.mark.slow
def test_a_process_that_takes_a_while_to_end_in_good_order_is_not_told_twice(
    supervisor: Supervisor, process: Make
) -> None:
    logs: list[Path] = []
    for name, seconds in (("trainer", "2"), ("worker", "0.2")):  # the last started is waited for first
        command = [sys.executable, "-c", ENDS_IN_ORDER, seconds]
        logs.append(
            ready_log(supervisor, replace(process(name, ""), command=lambda command=command: command))
        )
    supervisor.stop()
    assert [log.read_text() for log in logs] == ["ready\nin good order\n"] * 2


def ready_log(supervisor: Supervisor, process: SupervisedProcess) -> Path:
    """The log of a process that is ready."""
    supervisor.start(process)
    assert process.log is not None
    deadline = time.monotonic() + 240
    while process.log.read_text() != "ready\n":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process.log
