"""Processes that are kept alive together: own group, own log, and started again when they die."""

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
MAX_DEATHS = 10  # of one part within DEATHS_WITHIN_S
DEATHS_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class Part:
    """A process that is kept alive. ``command`` is asked at each start. One that ``finishes`` is done when it ends by
    itself, and started again only if a signal ended it. What it puts into ``scratch``, its TMPDIR, does not outlive
    it: SGLang, for one, leaves files behind however it ends. ``sweep`` removes what else it leaves.
    """

    name: str
    command: Callable[[], Sequence[str]]
    environment: Mapping[str, str]
    log: Path | None  # None: our own output
    grace_s: float
    death_signal: signal.Signals
    finishes: bool = False
    scratch: Path | None = None
    sweep: Callable[[], object] = lambda: None

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
        """Remove what an earlier one has left; while none lives."""
        self.sweep()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


@dataclass(slots=True)
class Fleet:
    """The running parts, in the order in which they were started."""

    say: Callable[[str], None]
    max_deaths: int = MAX_DEATHS
    running: dict[str, tuple[Part, Child]] = field(default_factory=dict)
    _died_at: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(deque))
    _due_at: dict[str, float] = field(default_factory=dict)

    def start(self, part: Part) -> Child:
        child = part.start()
        self.running[part.name] = (part, child)
        return child

    def revive(self) -> None:
        """Start again what has died a moment ago, and say so. To be called often. Raises RuntimeError for one that
        dies time and again.
        """
        for part, child in list(self.running.values()):
            if child.alive or (part.finishes and child.process.returncode >= 0):
                continue
            if part.name not in self._due_at:
                self._note_death(part, child)
            if time.monotonic() >= self._due_at[part.name]:
                del self._due_at[part.name]
                self.start(part)

    def ended(self, name: str) -> int | None:
        """The exit status of a part that has finished; None while it goes on."""
        part, child = self.running[name]
        status = child.process.poll()
        return status if part.finishes and status is not None and status >= 0 else None

    def stop(self) -> None:
        """All at once are asked, then each is waited for; the last started first."""
        parts = list(reversed(self.running.values()))
        for _, child in parts:
            if child.alive:
                child.process.terminate()
        for part, child in parts:
            child.stop(part.grace_s)
            part.tidy()
        self.running.clear()

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, (_, child) in list(self.running.items())}

    def _note_death(self, part: Part, child: Child) -> None:
        now, deaths = time.monotonic(), self._died_at[part.name]
        died = f"{part.name} died (status {child.process.returncode})"
        see = f", see {part.log}" if part.log else ""
        deaths.append(now)
        while deaths[0] < now - DEATHS_WITHIN_S:
            deaths.popleft()
        if len(deaths) > self.max_deaths:
            last_words = f":\n{processes.tail(part.log)}" if part.log else ""
            raise RuntimeError(f"{died} for the {len(deaths)}th time in a short while{last_words}")
        child.stop(0)
        self.say(f"{died}; starting it again{see}")
        self._due_at[part.name] = now + RESTART_PAUSE_S
