"""Chooses, among a worker's Docker hosts, the one on which an episode runs from its first container to its last.

Each host has a breaker of its own. A host that is out, or short of disk space, is set aside: its claims return to the queue uncounted and
run elsewhere. When it answers again it gets one episode, then its share. The worker stops claiming only while no host can take an episode.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.census import HostStatus
from pipeline.errors import SandboxError
from workers.breaker import Breaker
from workers.docker.host import DockerHost
from workers.sandbox.disk import DiskWatch
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import Misconfigured

START_PAUSE_S = 0.5  # between checks while no host answers at the start


@dataclass(slots=True)
class PooledHost:
    """One Docker host, and what this worker runs there."""

    sandboxes: DockerSandboxes
    disk: DiskWatch
    slots: int  # most episodes at once
    breaker: Breaker
    running: set[str] = field(default_factory=set[str])  # request ids

    @property
    def host(self) -> DockerHost:
        return self.sandboxes.host

    @property
    def num_free(self) -> int:
        """How many more episodes may begin here now."""
        return self.breaker.room(max(self.slots - len(self.running), 0))


class HostPool:
    """The worker's gate at Docker. A claim gets its host when it is made and keeps it until it has ended."""

    def __init__(self, sandboxes: Sequence[DockerSandboxes], *, slots: int) -> None:
        """`sandboxes` are of one Docker host each. `slots` is the whole worker's, and a host's unless its address says how many."""
        self.hosts = tuple(_pooled(each, slots, alone=len(sandboxes) == 1) for each in sandboxes)
        self._of: dict[str, PooledHost] = {}  # by request id

    async def start(self, *, patience_s: float = 0.0) -> tuple[PooledHost, ...]:
        """The hosts that answer, some of which may be short of disk space. Waits up to `patience_s` for the first.

        Raises SandboxError if none answers, and Misconfigured if one answers on which a setting cannot work.
        """
        give_up_at = time.monotonic() + patience_s
        while True:
            failures = await asyncio.gather(*(_failure(host) for host in self.hosts))
            if not all(failures):
                break
            if time.monotonic() >= give_up_at:
                raise SandboxError(
                    f"{'; '.join(failures)}: start Docker, or set DOCKER_HOST or SWERVE_DOCKER_HOSTS"
                )
            await asyncio.sleep(START_PAUSE_S)
        await asyncio.gather(*(host.breaker.check() for host in self.hosts))
        return tuple(host for host, failure in zip(self.hosts, failures, strict=True) if not failure)

    def statuses(self) -> tuple[HostStatus, ...]:
        """Each host, for the worker's heartbeat."""
        return tuple(
            HostStatus(
                name=host.host.url, slots=host.slots, running=len(host.running), out=host.breaker.paused
            )
            for host in self.hosts
        )

    def of(self, request_id: str) -> PooledHost:
        """Where the claim of this request runs."""
        return self._of[request_id]

    @property
    def paused(self) -> str:
        reasons = [host.breaker.paused for host in self.hosts]
        return "; ".join(reasons) if all(reasons) else ""

    @property
    def set_aside(self) -> str:
        reasons = [host.breaker.paused for host in self.hosts]
        return "" if all(reasons) else "; ".join(filter(None, reasons))

    def room(self, free: int) -> int:
        return min(free, sum(host.num_free for host in self.hosts))

    def claimed(self, request_id: str) -> None:
        host = self._of[request_id] = max(self.hosts, key=_preference)
        host.running.add(request_id)
        host.breaker.claimed(request_id)

    def succeeded(self, request_id: str) -> None:
        self._of[request_id].breaker.succeeded(request_id)

    async def blamed(self, request_id: str, message: str) -> bool:
        return await self._of[request_id].breaker.blamed(request_id, message)

    def ended(self, request_id: str) -> None:
        self._of.pop(request_id).running.discard(request_id)

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for host in self.hosts:
                tasks.create_task(host.breaker.watch())
                tasks.create_task(host.disk.watch())

    async def close(self) -> None:
        for host in self.hosts:
            await host.sandboxes.close()


def _pooled(sandboxes: DockerSandboxes, slots: int, *, alone: bool) -> PooledHost:
    disk = DiskWatch(sandboxes)

    async def probe() -> None:
        await sandboxes.check()
        await disk.check()

    name = "docker" if alone else f"docker at {sandboxes.host.url}"
    return PooledHost(sandboxes, disk, sandboxes.host.slots or slots, Breaker(name, probe))


async def _failure(host: PooledHost) -> str:
    """Why the host cannot be used now, "" if it can. Raises Misconfigured."""
    try:
        await host.sandboxes.check()
    except Misconfigured:
        raise
    except SandboxError as error:
        return f"{host.breaker.name} is out: {error}"
    return ""


def _preference(host: PooledHost) -> tuple[bool, bool, bool, int]:
    """First a host that is back, for its one trial; then one on which nothing failed lately; then the one with the most free slots.

    Without the second, a host on which every episode fails at once would always have the most free slots.
    """
    has_room = host.num_free > 0
    is_trial = has_room and host.breaker.state == "half-open"
    return has_room, is_trial, not host.breaker.suspected, host.num_free
