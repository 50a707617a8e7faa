"""Keeps processes alive: each has its own process group and its own log, and is started again when it dies."""

import shutil
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra import processes
from infra.processes import Child

RESTART_PAUSE_S = 0.5
MAX_DEATHS = 10  # of one process within DEATHS_WITHIN_S
DEATHS_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class SupervisedProcess:
    """How to start a process, how to stop it, and what it leaves behind."""

    name: str
    command: Callable[[], Sequence[str]]
    """Called at each start."""

    environment: Mapping[str, str]
    log: Path | None
    """None: it writes to our own output."""

    grace_s: float
    death_signal: signal.Signals
    finishes: bool = False
    """True: it is done when it exits by itself, and is started again only if a signal ended it."""

    scratch: Path | None = None
    """Its TMPDIR, removed when it ends: SGLang leaves temporary files however it ends."""

    clean_up: Callable[[], object] = lambda: None
    """Removes what else it leaves."""

    def start(self) -> Child:
        environment = dict(self.environment)
        self.tidy()
        if self.scratch is not None:
            self.scratch.mkdir(parents=True)
            environment["TMPDIR"] = str(self.scratch)
        return processes.start(
            self.name,
            self.command(),
            log=self.log,
            environment=environment,
            death_signal=self.death_signal,
        )

    def tidy(self) -> None:
        """Remove what an earlier instance left. Call it only while none runs."""
        self.clean_up()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def last_lines(self) -> str:
        """The end of its log, beginning with a newline; empty if it has none of its own."""
        return f":\n{processes.tail(self.log)}" if self.log and self.log.exists() else ""


@dataclass(slots=True)
class Supervisor:
    """The supervised processes that run, in the order in which they were started."""

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
        """Start again what died at least RESTART_PAUSE_S ago, and say so. Call it often. Raises RuntimeError for a
        process that keeps dying.
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
        """Raises RuntimeError with the end of the log if a process has ended. For the time of starting, when an end
        means that it cannot start.
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
        """Ask all to end at once, then wait for each, the last started first."""
        pairs = list(reversed(self.running.values()))
        for _, child in pairs:
            child.ask_to_end()
        for process, child in pairs:
            child.wait_for_end(process.grace_s)
            process.tidy()
        self.running.clear()

    def hurry(self) -> None:
        """Ask all once more, while `stop` waits for them: the trainer takes it as the order to drop what it is doing."""
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
