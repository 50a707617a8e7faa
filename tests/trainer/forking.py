"""Processes that have torch and Megatron imported from their first moment, as children of one process that imported them once.

The import takes 7 s of CPU time, and a fork none. Each is a process of its own with its own environment and output, which ends with
an exit status as `python -m MODULE` would, or by a signal; all end with ours. That the commands start from nothing as well is seen
where they are run by their names: tests/trainer/test_refusals.py, tests/journeys.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from infra import processes

# What trainers and the ranks of tests import. Modules that are commands are left out: runpy warns of one that is imported already.
IMPORTED = (
    "trainer.learner.megatron",
    "trainer.loop.loop",
    "trainer.feed",
    "trainer.process",
    "transformers",
    "tests.trainer.learner.tiny",
)


class Forked:
    """A process that was forked. Its words are those of subprocess.Popen."""

    def __init__(self, answers: int) -> None:
        self._answers = answers  # a file descriptor, which gives the process's number, and its exit status once it has ended
        self._returncode: int | None = None

    @functools.cached_property
    def pid(self) -> int:
        return _number(self._answers)

    @property
    def has_begun(self) -> bool:
        """Whether nobody has to wait for the import any more."""
        return self._answers_within(0)

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal, or None as long as the process runs."""
        return self._ended(0)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._ended(timeout)
        if status is None:
            raise TimeoutError(f"process {self.pid} goes on after {timeout} s")
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout_s: float | None) -> int | None:
        if self._returncode is None and self.pid and self._answers_within(timeout_s):
            self._returncode = _number(self._answers)
            os.close(self._answers)
        return self._returncode

    def _answers_within(self, timeout_s: float | None) -> bool:
        # select() refuses descriptors above 1023, and a process of the tests may have as many open.
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def fork(module: str, *words: str, log: Path, **environment: str) -> Forked:
    """Starts `python -m MODULE WORDS` with these variables beside ours, and both outputs appended to `log`."""
    log.touch()
    order = Order(module, list(words), {**os.environ, **environment}, str(log), str(Path.cwd()))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(_parent()[0])
        connection.sendall(json.dumps(asdict(order)).encode() + b"\n")
        return Forked(connection.detach())


def start_ranks(count: int, module: str, *words: str, logs: Path) -> list[Forked]:
    """Starts a learner of so many processes as torchrun would, but watches none of them. Their outputs are `rank-N.log`."""
    from tests.conftest import free_ports  # here, because the process that forks imports this module

    [port] = free_ports(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    return [
        fork(module, *words, log=logs / f"rank-{rank}.log", **place, RANK=str(rank), OMP_NUM_THREADS="1")
        for rank in range(count)
    ]


def run_ranks(count: int, module: str, *words: str, logs: Path) -> None:
    """Runs a learner of so many processes to its end, which must be a good one."""
    ranks = start_ranks(count, module, *words, logs=logs)
    try:
        while None in (statuses := [rank.poll() for rank in ranks]) and set(statuses) <= {None, 0}:
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
    failed = [rank for rank, status in enumerate(statuses) if status not in (None, 0)]
    assert not failed, "\n".join((logs / f"rank-{rank}.log").read_text()[-8000:] for rank in failed)


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is to be."""

    module: str
    words: list[str]
    environment: dict[str, str]
    log: str
    directory: str


@functools.cache
def _parent() -> tuple[str, subprocess.Popen[bytes]]:
    """The process that forks, which ends with ours, and where it listens."""
    address = f"\0swerve-forking-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, "-m", "tests.trainer.forking", str(listener.fileno())]
        parent = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            preexec_fn=processes.dying_with_parent(signal.SIGKILL),
        )
    return address, parent


def _number(answers: int) -> int:
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(answers, 1)
        if not read:
            raise RuntimeError("the process that forks has ended")
        line += read
    return int(line)


def ordered(listener: socket.socket) -> Order:
    """Waits for orders for ever. Returns in each forked process, with what that is to be."""
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            order = Order(**json.loads(connection.makefile().readline()))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end_with_parent = processes.dying_with_parent(signal.SIGKILL)
            child = os.fork()
            if child == 0:
                end_with_parent()
                connection.close()
                return order
            connection.sendall(f"{child}\n".encode())
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(BrokenPipeError):  # nobody may ask any more
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os._exit(0)
        connection.close()


def become(order: Order) -> None:
    """Runs the module in this process as `python -m` would."""
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    faulthandler.enable()  # into the log: a crash says where it was
    os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = [sys.argv[0], *order.words]
    runpy.run_module(order.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # so that a collection in a child writes to no page of its parent's
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for the forked
    become(ordered(socket.socket(fileno=int(sys.argv[1]))))
