"""Chooses the implementation of sandboxes, which is Docker. No other module does.

Another backend is a module beside docker.py that implements `protocol.Sandboxes`, an implementation of `WorkerHosts` like hosts.py for
Docker, and a choice here. Importing this module loads no Docker client.
"""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from redis.asyncio import Redis

from pipeline.census import HostStatus
from pipeline.request import Claim, EpisodeStatus
from workers.breaker import Gate
from workers.sandbox.protocol import Sandboxes
from workers.settings import SandboxSettings, WorkerSettings


class WorkerHosts(Protocol):
    """The machines on which one worker opens sandboxes."""

    @property
    def gate(self) -> Gate:
        """Holds claims back while no machine can take one, and chooses a machine for each."""
        ...

    async def start(self, *, patience_s: float) -> None:
        """Starts. Raises SandboxError if no machine can be used within `patience_s`, Misconfigured if a setting prevents it."""
        ...

    def statuses(self) -> tuple[HostStatus, ...]:
        """Each machine with what runs on it, for the worker's heartbeat."""
        ...

    def using(self, claim: Claim, status: EpisodeStatus) -> AbstractAsyncContextManager[Sandboxes]:
        """The object that opens the claim's sandboxes, from the claim's start to its end."""
        ...

    async def maintain(self) -> None:
        """Removes what dead workers left behind, and prepares for coming requests, until cancelled."""
        ...

    async def close(self) -> None: ...


def command_sandboxes(*, fleet: str) -> Sandboxes:
    """The sandboxes of a command that works without a queue, on one machine. Raises ValueError naming a setting that is wrong."""
    from workers.sandbox.docker import DockerSandboxes

    return DockerSandboxes(fleet=fleet)


def worker_hosts(
    redis: Redis, *, fleet: str, worker: WorkerSettings, settings: SandboxSettings
) -> WorkerHosts:
    """The machines of a worker of `fleet`."""
    from workers.images.prefetch import ImagesOfHosts
    from workers.sandbox.docker import DockerSandboxes
    from workers.sandbox.hosts import DockerHosts, HostPool

    sandboxes = [
        DockerSandboxes(
            fleet=fleet,
            max_starting=worker.max_starting,
            host=host,
            disk=settings.disk,
            runtime=settings.runtime,
        )
        for host in settings.hosts
    ]
    pool = HostPool(sandboxes, slots=worker.slots)
    return DockerHosts(pool, ImagesOfHosts(settings.images), redis, reap_every_s=worker.reap_every_s)
