"""Processes that are kept alive together: own group, own log, and started again when they die."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra import processes
from infra.processes import Child

RESTART_PAUSE_S = 1.0
MAX_DEATHS = 10  # of one part in a run


@dataclass(frozen=True, slots=True)
class Part:
    """A process that is kept alive."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    grace_s: float
    death_signal: signal.Signals

    def start(self) -> Child:
        return processes.start(
            self.name,
            self.command,
            log=self.log,
            environment=self.environment,
            death_signal=self.death_signal,
        )


@dataclass(slots=True)
class Fleet:
    """The running parts, in the order in which they were started."""

    say: Callable[[str], None]
    running: dict[str, tuple[Part, Child]] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)

    def start(self, part: Part) -> Child:
        child = part.start()
        self.running[part.name] = (part, child)
        return child

    def revive(self) -> None:
        """Start again what has died, and say so. Raises RuntimeError for one that dies time and again."""
        for part, child in list(self.running.values()):
            if child.alive:
                continue
            self.deaths[part.name] += 1
            died = f"{part.name} died (status {child.process.returncode})"
            if self.deaths[part.name] > MAX_DEATHS:
                raise RuntimeError(f"{died} for the {MAX_DEATHS + 1}th time:\n{processes.tail(part.log)}")
            self.say(f"{died}; starting it again, see {part.log}")
            child.stop(0)
            time.sleep(RESTART_PAUSE_S)
            self.start(part)

    def stop(self) -> None:
        """All at once are asked, then each is waited for; the last started first."""
        parts = list(reversed(self.running.values()))
        for _, child in parts:
            if child.alive:
                child.process.terminate()
        for part, child in parts:
            child.stop(part.grace_s)
        self.running.clear()

    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, (_, child) in list(self.running.items())}
