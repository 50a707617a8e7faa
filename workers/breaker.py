"""Circuit breakers for the dependencies of an episode: Docker, engines, Redis. A worker without one of them claims nothing, reports why,
and continues by itself when it is available again.

A breaker opens when its probe fails (it runs from time to time, and after each failed claim), or when several different requests in a row
fail at its boundary although the probe succeeds. While the breaker is open, only the probe runs. Once that succeeds, one episode is let
through (half-open). When that episode ends well, or has lasted TRIAL_S, the breaker closes. If nothing is queued, there is no episode to
try, and probes that succeed for TRIAL_S close the breaker. A failure that is the boundary's fault costs the request no try.
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

WATCH_S = 5.0  # pause between two probes while closed
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 2.0  # pause between two probes while open
PROBE_TIMEOUT_S = 15.0  # long enough for a busy Docker host that answers late
TRIAL_S = 3.0
HOLDERS_FIRST_S = 2.0  # pause after Redis is back, so that workers renew leases that expired in the meantime before others take the claims
SUSPECTS = 3  # different requests in a row whose failures open a breaker although its probe succeeds

Probe = Callable[[], Awaitable[object]]
"""Returns if the boundary works; raises one of OUT if not."""

State = Literal["closed", "half-open", "open"]

OUT = (RolloutError, RedisError, OSError, TimeoutError)
BREAKER_OF: Mapping[Boundary, str] = {"sandbox": "docker", "grader": "docker", "engine": "engine"}


class Gate(Protocol):
    """An object that may prevent claims. A worker reports each claim to it: when it is made, how it went, and when it is over."""

    @property
    def paused(self) -> str:
        """The reason why claims are held back; empty if they are not."""
        ...

    @property
    def set_aside(self) -> str:
        """The resource that is not used although claims are made, and the reason; empty if there is none, or if claims are held back."""
        ...

    def room(self, free: int) -> int:
        """The number of `free` slots that may be filled now."""
        ...

    def claimed(self, request_id: str) -> None: ...

    def succeeded(self, request_id: str) -> None: ...

    async def blamed(self, request_id: str, message: str) -> bool:
        """Records that a claim failed at this boundary. Returns True if any request would have failed, so that this one is not charged."""
        ...

    def ended(self, request_id: str) -> None: ...

    async def watch(self) -> None:
        """Watches for outages and recoveries until cancelled."""
        ...


class Breaker:
    """The circuit breaker of one dependency of episodes, such as Docker or the engines."""

    set_aside = ""

    def __init__(self, name: str, probe: Probe, *, settle_s: float = 0.0) -> None:
        """`settle_s` is the wait between the first probe that succeeds again and the first claim."""
        self.name = name
        self._settle_s = settle_s
        self.state: State = "closed"
        self.reason = ""
        self._probe = probe
        self._suspects: set[str] = set()
        self._wait_s = FIRST_WAIT_S
        self._trial_began_at: float | None = None
        self._half_open_at = 0.0

    @property
    def paused(self) -> str:
        """The reason why claims are held back; empty if they are not."""
        match self.state:
            case "closed":
                return ""
            case "half-open":
                return f"{self.name} answers again: trying one episode"
            case "open":
                return f"{self.name} is out: {self.reason}"

    def room(self, free: int) -> int:
        """The number of `free` slots that may be filled now."""
        if self.state == "half-open":
            return min(free, 1) if self._trial_began_at is None else 0
        return free if self.state == "closed" else 0

    @property
    def suspected(self) -> bool:
        """Whether a claim failed at this boundary since the last success."""
        return bool(self._suspects)

    def claimed(self, request_id: str) -> None:
        """Makes this claim the trial if the breaker is half-open."""
        if self.state == "half-open":
            self._trial_began_at = time.monotonic()

    def succeeded(self, request_id: str) -> None:
        """Record that an episode used this dependency with success."""
        self._suspects.clear()
        if self.state == "half-open":
            self._close()

    async def blamed(self, request_id: str, message: str) -> bool:
        """Records that a claim failed at this boundary. Returns True if any request would have failed, so that this one is not charged."""
        self._suspects.add(request_id)
        if not await self.check():
            return True
        if self.state == "half-open" or len(self._suspects) >= SUSPECTS:
            self.open(message)
        return self.state == "open" and len(self._suspects) > 1

    def ended(self, request_id: str) -> None:
        """Does nothing, because a breaker stores no state for single claims."""

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
            self.state, self._half_open_at = "half-open", time.monotonic()
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
        """Run the probe again and again, until cancelled."""
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
                    if self._trial_began_at is None and not await self.check():
                        continue
                    since = self._trial_began_at or self._half_open_at
                    if self.state == "half-open" and time.monotonic() - since > TRIAL_S:
                        self._close()


class Breakers:
    """All of a worker's gates, by name: "redis", "docker", "engine"."""

    def __init__(self, probes: Mapping[str, Probe], gates: Mapping[str, Gate] | None = None) -> None:
        """Makes a breaker for each of `probes`. `gates` are those of services that one probe cannot check, such as several Docker hosts."""
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
        """The resources that are not used although claims are made, with the reasons."""
        return "; ".join(gate.set_aside for gate in self._gates.values() if gate.set_aside)

    def room(self, free: int) -> int:
        """The number of `free` slots that may be filled now."""
        return min((gate.room(free) for gate in self._gates.values()), default=free)

    def claimed(self, request_id: str) -> None:
        for gate in self._gates.values():
            gate.claimed(request_id)

    def succeeded(self, request_id: str) -> None:
        """Record that the request's episode used every boundary with success."""
        for gate in self._gates.values():
            gate.succeeded(request_id)

    def ended(self, request_id: str) -> None:
        """Record that the claim has ended, whether or not it succeeded."""
        for gate in self._gates.values():
            gate.ended(request_id)

    async def blamed(self, boundary: Boundary, request_id: str, message: str) -> bool:
        """Whether a failure at `boundary` is the boundary's fault rather than the request's."""
        gate = self._gates.get(BREAKER_OF.get(boundary, ""))
        return gate is not None and await gate.blamed(request_id, message)

    async def watch(self) -> None:
        """Watches all gates until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, gate in self._gates.items():
                tasks.create_task(gate.watch(), name=f"probe {name}")
