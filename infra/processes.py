"""Child processes that cannot outlive us: each has its own process group, and its output goes to its own file."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
libc = ctypes.CDLL(None, use_errno=True)


def dying_with_parent(death_signal: signal.Signals) -> Callable[[], None]:
    """For `preexec_fn`: the kernel sends the child `death_signal` when the thread that started it ends, even if we are
    killed.
    """
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)

    return prepare


@dataclass(frozen=True, slots=True)
class Child:
    """A process that we started. `name` is for messages."""

    name: str
    process: subprocess.Popen[bytes]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self, grace_s: float) -> None:
        """Ask the process to end, and wait for it."""
        self.ask_to_end()
        self.wait_for_end(grace_s)

    def ask_to_end(self) -> None:
        """Send SIGTERM. A process may take a second one as the order to drop what it is doing, as the trainer does."""
        if self.alive:
            self.process.terminate()

    def wait_for_end(self, grace_s: float) -> None:
        """Wait for `grace_s`, then send SIGKILL to what is left of its group."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        kill_group(self.pid)
        self.process.wait()


def start(
    name: str,
    command: Sequence[str],
    *,
    log: Path | None,
    environment: Mapping[str, str] | None = None,
    death_signal: signal.Signals | None = signal.SIGKILL,
) -> Child:
    """Start `command` with both outputs appended to `log`, or to our own outputs if that is None.

    If we end first, the kernel sends it `death_signal`; with None it keeps running.
    """
    with ExitStack() as cleanup:
        output = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            output = cleanup.enter_context(log.open("ab"))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=None if environment is None else dict(environment),
            start_new_session=True,
            preexec_fn=None if death_signal is None else dying_with_parent(death_signal),
        )
    return Child(name, process)


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies becomes our child, so that we can collect its exit status. Process 1 of a
    container may never do that; then dockerd, killed and started again, takes its dead containerd (a zombie) for a
    running one.
    """
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(own: Collection[int]) -> None:
    """Collect the exit status of adopted processes that have ended; `own` are the children that other code waits for."""
    for file in Path("/proc/self/task").glob("*/children"):
        found: list[str] = []
        # A thread that has ended meanwhile leaves its children to another one.
        with suppress(FileNotFoundError, ProcessLookupError):
            found = file.read_text().split()
        for pid in map(int, found):
            if pid not in own:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def kill_group(leader: int) -> None:
    """Send SIGKILL to the process group whose leader is or was `leader`."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_until(ready: Callable[[], bool], *, child: Child, timeout_s: float, log: Path) -> float:
    """Poll until `ready`; return the seconds that took. Raises RuntimeError if `child` ends first, or if `timeout_s`
    passes.
    """
    began_at = time.monotonic()
    while not ready():
        waited_s = time.monotonic() - began_at
        if not child.alive:
            raise RuntimeError(f"{child.name} ended with status {child.process.returncode}:\n{tail(log)}")
        if waited_s > timeout_s:
            raise RuntimeError(f"{child.name} is not ready after {waited_s:.0f} s:\n{tail(log)}")
        time.sleep(0.1)
    return time.monotonic() - began_at


def tail(log: Path, num_lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
