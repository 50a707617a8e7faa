"""Circuit breakers for what an episode needs: Docker, engines, Redis. A worker without one of them claims nothing, says why, and goes on by
itself when it is back.

A breaker opens when its probe fails (it runs from time to time, and after each failed claim), or when several different requests in a row
fail at its boundary although the probe succeeds. While the breaker is open, only the probe runs. Once that succeeds, one episode is let
through (half-open). When that episode ends well, or has lasted TRIAL_S, the breaker closes. A failure that is the boundary's fault costs
the request no try.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, Protocol

from redis.exceptions import RedisError

from pipeline.errors import Boundary, RolloutError

log = logging.getLogger("swerve.worker")

WATCH_S = 5.0  # between two probes while closed
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 2.0  # between two probes while open
PROBE_TIMEOUT_S = 15.0  # a busy Docker host answers late without being out
TRIAL_S = 3.0
HOLDERS_FIRST_S = 2.0  # after Redis is back, so that workers renew leases that expired meanwhile before others take the claims
SUSPECTS = 3  # different requests that fail in a row

Probe = Callable[[], Awaitable[object]]
"""Returns if the boundary works; raises one of OUT if not."""

State = Literal["closed", "half-open", "open"]

OUT = (RolloutError, RedisError, OSError, TimeoutError)
BREAKER_OF: Mapping[Boundary, str] = {"sandbox": "docker", "grader": "docker", "engine": "engine"}


class Gate(Protocol):
    """What may hold claims back. It is told of each claim: that it was made, how it went, that it is over."""

    @property
    def paused(self) -> str:
        """Why claims are held back, for people; empty if they are not."""
        ...

    @property
    def set_aside(self) -> str:
        """What is not used although claims are made, and why; empty if nothing is, or if claims are held back."""
        ...

    def room(self, free: int) -> int:
        """How many of `free` slots may be filled now."""
        ...

    def claimed(self, request_id: str) -> None: ...

    def succeeded(self, request_id: str) -> None: ...

    async def blamed(self, request_id: str, message: str) -> bool:
        """A claim failed here. True if any request would have failed, so that this one is not charged."""
        ...

    def ended(self, request_id: str) -> None: ...

    async def watch(self) -> None:
        """Notice outages and recoveries, for ever."""
        ...


class Breaker:
    """The gate at one boundary."""

    set_aside = ""

    def __init__(self, name: str, probe: Probe, *, settle_s: float = 0.0) -> None:
        """Wait `settle_s` between the first probe that succeeds again and the first claim."""
        self.name = name
        self._settle_s = settle_s
        self.state: State = "closed"
        self.reason = ""
        self._probe = probe
        self._suspects: set[str] = set()
        self._wait_s = FIRST_WAIT_S
        self._trial_began_at: float | None = None

    @property
    def paused(self) -> str:
        """Why claims are held back, for people; empty if they are not."""
        match self.state:
            case "closed":
                return ""
            case "half-open":
                return f"{self.name} answers again: trying one episode"
            case "open":
                return f"{self.name} is out: {self.reason}"

    def room(self, free: int) -> int:
        """How many of `free` slots may be filled now."""
        if self.state == "half-open":
            return min(free, 1) if self._trial_began_at is None else 0
        return free if self.state == "closed" else 0

    @property
    def suspected(self) -> bool:
        """Whether something failed here since the last success."""
        return bool(self._suspects)

    def claimed(self, request_id: str) -> None:
        """The claim is the trial, if one is needed."""
        if self.state == "half-open":
            self._trial_began_at = time.monotonic()

    def succeeded(self, request_id: str) -> None:
        """An episode came through this boundary."""
        self._suspects.clear()
        if self.state == "half-open":
            self._close()

    async def blamed(self, request_id: str, message: str) -> bool:
        """A claim failed here. True if any request would have failed, so that this one is not charged."""
        self._suspects.add(request_id)
        if not await self.check():
            return True
        if self.state == "half-open" or len(self._suspects) >= SUSPECTS:
            self.open(message)
        return self.state == "open" and len(self._suspects) > 1

    def ended(self, request_id: str) -> None:
        """Does nothing, because a breaker keeps nothing of a claim."""

    async def check(self) -> bool:
        """Run the probe, and open or half-open accordingly; returns whether it succeeded."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await self._probe()
        except OUT as error:
            self.open(str(error) or type(error).__name__)
            return False
        if self.state == "open":
            await asyncio.sleep(self._settle_s)
            self.state = "half-open"
        return True

    def open(self, reason: str) -> None:
        """Hold claims back. Opening again makes the wait before the next probe longer."""
        if self.state == "closed":
            log.warning("%s is out, claiming nothing: %s", self.name, reason)
        else:
            self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        self.state, self.reason, self._trial_began_at = "open", reason, None

    def _close(self) -> None:
        log.warning("%s is back, claiming again", self.name)
        self.state, self.reason, self._trial_began_at = "closed", "", None
        self._wait_s = FIRST_WAIT_S

    async def watch(self) -> None:
        """Probe for ever."""
        while True:
            match self.state:
                case "closed":
                    if await self.check():
                        await asyncio.sleep(random.uniform(0.5, 1.5) * WATCH_S)
                case "open":
                    await asyncio.sleep(self._wait_s)
                    await self.check()
                case "half-open":
                    await asyncio.sleep(FIRST_WAIT_S)
                    began_at = self._trial_began_at
                    if self.state == "half-open" and began_at and time.monotonic() - began_at > TRIAL_S:
                        self._close()


class Breakers:
    """All of a worker's gates, by name: "redis", "docker", "engine"."""

    def __init__(self, probes: Mapping[str, Probe], gates: Mapping[str, Gate] | None = None) -> None:
        """A breaker for each of `probes`, and `gates` for boundaries that need more than one probe."""
        self._breakers = {
            name: Breaker(name, probe, settle_s=HOLDERS_FIRST_S if name == "redis" else 0.0)
            for name, probe in probes.items()
        }
        self._gates: dict[str, Gate] = {**self._breakers, **(gates or {})}

    def __getitem__(self, name: str) -> Breaker:
        return self._breakers[name]

    @property
    def paused(self) -> str:
        """Every reason why nothing is claimed; empty if claims are made."""
        return "; ".join(gate.paused for gate in self._gates.values() if gate.paused)

    @property
    def set_aside(self) -> str:
        """What is not used although claims are made, and why."""
        return "; ".join(gate.set_aside for gate in self._gates.values() if gate.set_aside)

    def room(self, free: int) -> int:
        """How many of `free` slots may be filled now."""
        return min((gate.room(free) for gate in self._gates.values()), default=free)

    def claimed(self, request_id: str) -> None:
        for gate in self._gates.values():
            gate.claimed(request_id)

    def succeeded(self, request_id: str) -> None:
        """The request's episode came through every boundary."""
        for gate in self._gates.values():
            gate.succeeded(request_id)

    def ended(self, request_id: str) -> None:
        """Nothing of the claim goes on, however it went."""
        for gate in self._gates.values():
            gate.ended(request_id)

    async def blamed(self, boundary: Boundary, request_id: str, message: str) -> bool:
        """Whether a failure at `boundary` is the boundary's fault rather than the request's."""
        gate = self._gates.get(BREAKER_OF.get(boundary, ""))
        return gate is not None and await gate.blamed(request_id, message)

    async def watch(self) -> None:
        """Watch all of them for ever."""
        async with asyncio.TaskGroup() as tasks:
            for gate in self._gates.values():
                tasks.create_task(gate.watch())
