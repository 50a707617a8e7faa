"""How long it takes until the system goes on: starts in quiet, and recoveries from blows.

A system has recovered when the processes that were killed do again what they are there for, and afterwards an episode
got on by a turn, a trajectory arrived that did not fail, or a step was made. Of a killed trainer only the former is
asked: the episodes get on without it.
"""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.chaos.stopping import Stop
from infra.chaos.system import System, write_tasks
from infra.chaos.victims import Blow, Kind
from infra.chaos.watch import Watch
from infra.processes import Child

TICK_S = 0.1
START_S = 300.0
HANG_S = 90.0  # without progress, beyond the start of what was killed
GIVE_UP_S = 120.0  # of a hang
SOUND_S = 120.0  # how long the first progress may take


class Hopeless(Exception):
    """The system did not come back, or not up at all."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """From one blow. ``total_s`` counts from the last kill."""

    victims: tuple[Kind, ...]
    total_s: float
    start_s: float  # of the slowest victim, in quiet
    hung: bool

    @property
    def beyond_s(self) -> float:
        return max(0.0, self.total_s - self.start_s)


@dataclass(frozen=True, slots=True)
class Ring:
    """Where the blows fall."""

    system: System
    watch: Watch
    say: Callable[[str], None]
    stop: Stop
    evidence: Path  # a directory

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Tend and look until ``done``, or for ``timeout_s``. Returns whether it was. Raises Stopped."""
        give_up_at = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > give_up_at:
                return False
            self.stop.heed()
            self.system.tend()
            self.watch.look()
            time.sleep(TICK_S)
        return True

    def pause(self, seconds: float) -> None:
        """Tend and look for so long. Raises Stopped."""
        self.wait(lambda: False, seconds)

    def start_in_quiet(self, kinds: Sequence[Kind]) -> dict[Kind, float]:
        """Everything, one after the other. Returns how long each took until it did what it is for; containerd only if it
        is among ``kinds``, for that takes time. Raises Hopeless or Stopped.
        """
        took_s: dict[Kind, float] = {}
        for name, (fleet, part) in self.system.parts().items():
            kind: Kind = "worker" if name.startswith("worker-") else name
            began_at = time.monotonic()
            fleet.start(part)
            if name == "worker-1":
                continue
            self._await_start(kind)
            took_s[kind] = time.monotonic() - began_at
            self.say(f"{kind} started in {took_s[kind]:.1f} s")
            if name == "dockerd":
                write_tasks(self.system)
                if "containerd" in kinds:
                    took_s["containerd"] = self._restart_containerd()
        before = self.watch.progress
        if not self.wait(lambda: self.watch.progress > before, SOUND_S):
            raise Hopeless(f"no trajectory within {SOUND_S:.0f} s of the start")
        return took_s

    def strike(self, blow: Blow, dice: random.Random, starts_s: Mapping[Kind, float]) -> Recovery | None:
        """Deal the blow and wait for the recovery. None if there was nothing to kill. Raises Hopeless or Stopped."""
        self.pause(blow.quiet_s)
        victims: list[Kind] = []
        killed: list[Child] = []
        for kind in blow.victims:
            if victims:
                self.pause(blow.apart_s)
            child = self.system.kill(kind, dice)
            if child is not None:
                victims.append(kind)
                killed += [child] if kind != "containerd" else []
        if not victims:
            return None
        struck_at = time.monotonic()
        start_s = max(starts_s[kind] for kind in victims)
        hung = not self.wait(self._recovered(victims, killed), start_s + HANG_S)
        if hung:
            self._keep_evidence(victims)
            if not self.wait(self._recovered(victims, killed), GIVE_UP_S):
                raise Hopeless(f"the system did not come back from the death of {' and '.join(victims)}")
        return Recovery(tuple(victims), time.monotonic() - struck_at, start_s, hung)

    def _await_start(self, kind: Kind) -> None:
        if not self.wait(lambda: self.watch.is_well(kind), START_S):
            raise Hopeless(f"{kind} is not ready after {START_S:.0f} s; see {self.system.root}")

    def _restart_containerd(self) -> float:
        self.system.kill("containerd", random.Random())
        began_at = time.monotonic()
        self._await_start("containerd")
        return time.monotonic() - began_at

    def _recovered(self, victims: list[Kind], killed: list[Child]) -> Callable[[], bool]:
        """Whether the victims are well, and there was progress since."""
        progress_before: int | None = None

        def done() -> bool:
            nonlocal progress_before
            if progress_before is None:
                successors = [self.system.child(child.name) for child in killed]
                born = all(new is not old and new.alive for new, old in zip(successors, killed, strict=True))
                if born and all(self.watch.is_well(kind) for kind in victims):
                    self.watch.look()
                    progress_before = self.watch.progress
                return progress_before is not None and victims == ["trainer"]
            return self.watch.progress > progress_before

        return done

    def _keep_evidence(self, victims: list[Kind]) -> None:
        """What the system says of itself, and what each of its processes does."""
        url = self.system.arguments.redis_url
        words = [sys.executable, "-m", "pipeline", "--redis", url, "status"]
        status = subprocess.run(words, capture_output=True, text=True, check=False)
        place = self.evidence / f"hang-{'-'.join(victims)}-{int(time.time())}.txt"
        place.write_text(status.stdout + status.stderr)
        self.say(f"no progress after the death of {' and '.join(victims)}: see {place}")
