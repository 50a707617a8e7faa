"""Child processes that cannot outlive us: each has its own process group, and its output goes to its own file. A supervisor keeps them
alive: what dies is started again. And the memory of process trees, with pages that processes share counted once (PSS).
"""

import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
libc = ctypes.CDLL(None, use_errno=True)

PROC = Path("/proc")
DOCKER_PROCESSES = frozenset({"dockerd", "containerd", "containerd-shim"})


def dying_with_parent(death_signal: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn` after which the kernel sends the child `death_signal` when the thread that started it ends, even if we are
    killed.
    """
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:  # the parent ended before the call above
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
        """Send SIGTERM. A process may treat a second one as the order to abandon its work, as the trainer does."""
        if self.alive:
            self.process.terminate()

    def wait_for_end(self, grace_s: float) -> None:
        """Waits for `grace_s`, then sends SIGKILL to what is left of its process group."""
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
    """Start `command` with both outputs appended to `log`, or to our own outputs if `log` is None.

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
    """Makes us the parent of each descendant whose own parent dies from now on, so that we can collect its exit status. Process 1 of a
    container may never do that; then dockerd, killed and started again, takes its dead containerd (a zombie) for a
    running one.
    """
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(own: Collection[int]) -> None:
    """Collect the exit status of adopted processes that have ended; `own` are the children that other code waits for."""
    for file in Path("/proc/self/task").glob("*/children"):
        found: list[str] = []
        # A thread that has ended in the meantime leaves its children to another one.
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


RESTART_PAUSE_S = 0.5
MAX_DEATHS = 10  # deaths of one process within DEATHS_WITHIN_S after which it is given up
DEATHS_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class SupervisedProcess:
    """A process under supervision: how it is started and stopped, and what has to be removed afterwards."""

    name: str
    command: Callable[[], Sequence[str]]
    """Called at each start."""

    environment: Mapping[str, str]
    log: Path | None
    """None: the process writes to our own output."""

    grace_s: float
    death_signal: signal.Signals
    finishes: bool = False
    """True: the process is done when it exits by itself, and is started again only if a signal ended it."""

    scratch: Path | None = None
    """Its TMPDIR, which is removed when it ends: SGLang leaves temporary files in any case."""

    clean_up: Callable[[], object] = lambda: None
    """Removes everything else that it leaves behind."""

    def start(self) -> Child:
        environment = dict(self.environment)
        self.tidy()
        if self.scratch is not None:
            self.scratch.mkdir(parents=True)
            environment["TMPDIR"] = str(self.scratch)
        return start(
            self.name,
            self.command(),
            log=self.log,
            environment=environment,
            death_signal=self.death_signal,
        )

    def tidy(self) -> None:
        """Removes what an earlier instance left behind. Call it only while no instance runs."""
        self.clean_up()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def last_lines(self) -> str:
        """The end of its log, beginning with a newline; empty if it has no log of its own."""
        return f":\n{tail(self.log)}" if self.log and self.log.exists() else ""


@dataclass(slots=True)
class Supervisor:
    """The running supervised processes, in the order in which they were started."""

    say: Callable[[str], None]
    max_deaths: int = MAX_DEATHS
    running: dict[str, tuple[SupervisedProcess, Child]] = field(default_factory=dict)
    started: list[Child] = field(default_factory=list)
    """Every process that was ever started, those that have ended included."""

    _died_at: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))
    _restart_at: dict[str, float] = field(default_factory=dict)

    def start(self, process: SupervisedProcess) -> Child:
        child = process.start()
        self.running[process.name] = (process, child)
        self.started.append(child)
        return child

    def restart_dead(self) -> None:
        """Starts processes again that died at least RESTART_PAUSE_S ago, and reports it.

        Call it often. Raises RuntimeError for a process that keeps dying.
        """
        for process, child in list(self.running.values()):
            if child.alive or (process.finishes and child.process.returncode >= 0):
                continue
            if process.name not in self._restart_at:
                self._note_death(process, child)
            if time.monotonic() >= self._restart_at[process.name]:
                del self._restart_at[process.name]
                self.start(process)

    def check_alive(self) -> None:
        """Raises RuntimeError with the end of the log if a process has ended. Used during the start, when an end means that the process
        cannot start.
        """
        for process, child in self.running.values():
            if not child.alive:
                status = child.process.returncode
                raise RuntimeError(f"{process.name} ended with status {status}{process.last_lines()}")

    def exit_status(self, name: str) -> int | None:
        """The exit status of a process that has finished by itself; None while it runs or is to be started again."""
        process, child = self.running[name]
        status = child.process.poll()
        return status if process.finishes and status is not None and status >= 0 else None

    def stop(self) -> None:
        """Asks all processes to end at once, then waits for each, the last started first."""
        pairs = list(reversed(self.running.values()))
        for _, child in pairs:
            child.ask_to_end()
        for process, child in pairs:
            child.wait_for_end(process.grace_s)
            process.tidy()
        self.running.clear()

    def hurry(self) -> None:
        """Asks all processes once more while `stop` waits for them. The trainer treats this as the order to abandon its work."""
        for _, child in list(self.running.values()):
            child.ask_to_end()

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, (_, child) in list(self.running.items())}

    def _note_death(self, process: SupervisedProcess, child: Child) -> None:
        now, deaths = time.monotonic(), self._died_at[process.name]
        died = f"{process.name} died (status {child.process.returncode})"
        see = f", see {process.log}" if process.log else ""
        deaths.append(now)
        while deaths[0] < now - DEATHS_WITHIN_S:
            deaths.popleft()
        if len(deaths) > self.max_deaths:
            raise RuntimeError(
                f"{died} {len(deaths)} times within {DEATHS_WITHIN_S:.0f} s{process.last_lines()}"
            )
        child.stop(0)
        self.say(f"{died}; starting it again{see}")
        self._restart_at[process.name] = now + RESTART_PAUSE_S


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The moment at which the total was largest."""

    total_bytes: int
    parts_bytes: dict[str, int]
    """The size of each part at that moment; a single part may have been larger at another moment."""

    after_s: float  # time since the watch began


class MemoryWatch:
    """A context in which a thread samples the memory of all parts every few seconds."""

    def __init__(self, roots: Callable[[], Mapping[str, int]], every_s: float = 3.0) -> None:
        """`roots` returns, for every sample, the process at the root of each part's tree."""
        self._roots = roots
        self._every_s = every_s
        self._began_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)
        self.peak = Peak(total_bytes=0, parts_bytes={}, after_s=0.0)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            parts = parts_bytes(self._roots())
            total = sum(parts.values())
            if total > self.peak.total_bytes:
                after_s = time.monotonic() - self._began_at
                self.peak = Peak(total_bytes=total, parts_bytes=parts, after_s=round(after_s, 1))
            if self._stop.wait(self._every_s):
                return


def parts_bytes(roots: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each tree in `roots`, and of Docker's processes as part `docker`."""
    children: dict[int, list[int]] = defaultdict(list)
    docker: list[int] = []
    for directory in PROC.iterdir():
        if directory.name.isdigit() and (stat := read(directory / "stat")):
            command, _, rest = stat.partition("(")[2].rpartition(")")
            children[int(rest.split()[1])].append(int(directory.name))
            if command in DOCKER_PROCESSES:
                docker.append(int(directory.name))
    parts = {name: sum(map(pss_bytes, tree(root, children))) for name, root in roots.items()}
    parts["docker"] = sum(map(pss_bytes, docker))
    return parts


def tree(root: int, children: Mapping[int, list[int]]) -> list[int]:
    """`root` and all its descendants."""
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def pss_bytes(pid: int) -> int:
    """Proportional set size; 0 for a process that has ended."""
    for line in read(PROC / str(pid) / "smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
