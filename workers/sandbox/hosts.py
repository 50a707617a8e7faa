"""The work of a worker on its Docker hosts: choosing one for each episode, holding and pulling images, and removing orphans.

All containers of an episode run on one host. Each host has its own breaker. A host that is out, or short of disk
space, is set aside: its claims return to the queue uncounted and run elsewhere. When it answers again it gets one episode, then its share.
The worker stops claiming only while no host can take an episode.

Orphans are containers that still exist although their try at a request is over. A container whose worker died ends by itself at its
deadline, but that may be hours away. So workers compare containers with leases: a lease shows whether the try for which a container was
made is still running. Any worker may remove another worker's orphans.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline import queue
from pipeline.census import HostStatus
from pipeline.errors import SandboxError
from pipeline.request import Claim, EpisodeStatus
from workers.breaker import Breaker
from workers.docker.host import ATTEMPT, DEADLINE, REQUEST, DockerHost
from workers.harness.volumes import remove_unused_volumes
from workers.images.api import ImageError
from workers.images.prefetch import ImagesOfHosts
from workers.sandbox.disk import DiskWatch
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import Misconfigured, Sandboxes

START_PAUSE_S = 0.5  # pause between checks while no host answers at the start
SETTLE_S = 2 * queue.RENEW_S  # time between the two checks that find an orphan

HasLease = Callable[[str, int], Awaitable[bool]]
"""Whether that attempt at that request still holds its lease."""


@dataclass(slots=True)
class PooledHost:
    """One Docker host, and this worker's episodes there."""

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
        """The number of further episodes that may begin here now."""
        return self.breaker.room(max(self.slots - len(self.running), 0))


class HostPool:
    """The worker's gate for Docker. A claim gets its host when it is made and keeps it until it has ended."""

    def __init__(self, sandboxes: Sequence[DockerSandboxes], *, slots: int) -> None:
        """Each of `sandboxes` belongs to one Docker host.

        `slots` is the limit for the whole worker, and for each host whose address has no own limit.
        """
        self.hosts = tuple(_pooled(each, slots, alone=len(sandboxes) == 1) for each in sandboxes)
        self._of: dict[str, PooledHost] = {}  # keys are request ids

    async def start(self, *, patience_s: float = 0.0) -> tuple[PooledHost, ...]:
        """The hosts that answer, some of which may be short of disk space. Waits up to `patience_s` for the first.

        Raises SandboxError if none answers, and Misconfigured if a setting cannot work on one that answers.
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
        """The host of this request's claim."""
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
                tasks.create_task(host.breaker.watch(), name=f"probe {host.host.url}")
                tasks.create_task(host.disk.watch(), name=f"disk of {host.host.url}")

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
    """The reason why the host cannot be used now; "" if it can. Raises Misconfigured."""
    try:
        await host.sandboxes.check()
    except Misconfigured:
        raise
    except SandboxError as error:
        return f"{host.breaker.name} is out: {error}"
    return ""


def _preference(host: PooledHost) -> tuple[bool, bool, bool, int]:
    """The sort key of a host: first a host that answers again, for its trial; then one on which nothing failed lately; then the one with
    the most free slots.

    Without the second criterion, a host on which every episode fails at once would always have the most free slots.
    """
    has_room = host.num_free > 0
    is_trial = has_room and host.breaker.state == "half-open"
    return has_room, is_trial, not host.breaker.suspected, host.num_free


log = logging.getLogger("swerve.worker")


class DockerHosts:
    """The Docker hosts of one worker, a `backend.WorkerHosts`."""

    def __init__(self, pool: HostPool, images: ImagesOfHosts, redis: Redis, *, reap_every_s: float) -> None:
        self.gate = pool
        self._pool = pool
        self._images = images
        self._redis = redis
        self._reap_every_s = reap_every_s

    async def start(self, *, patience_s: float) -> None:
        """Starts. Raises SandboxError if no host answers within `patience_s`, and Misconfigured if a setting cannot work on one that does,
        or if the record of its images cannot be kept.
        """
        for host in await self._pool.start(patience_s=patience_s):
            try:
                await self._images.open(host.host)
            except ImageError as error:
                raise Misconfigured(str(error)) from error

    def statuses(self) -> tuple[HostStatus, ...]:
        return self._pool.statuses()

    @contextlib.asynccontextmanager
    async def using(self, claim: Claim, status: EpisodeStatus) -> AsyncGenerator[Sandboxes]:
        """Yields the sandboxes of the claim's host, on which the claim's image is held until the block ends."""
        host = self._pool.of(claim.request.id)
        async with self._images.using(host.host, claim, status):
            yield host.sandboxes

    async def maintain(self) -> None:
        """Removes orphans and pulls images ahead, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for host in self._pool.hosts:
                tasks.create_task(self._remove_orphans(host.sandboxes), name=f"orphans on {host.host.url}")
                tasks.create_task(
                    self._images.fetch_ahead(host.host, self._redis), name=f"images for {host.host.url}"
                )

    async def close(self) -> None:
        await self._images.close()
        await self._pool.close()

    async def _remove_orphans(self, sandboxes: DockerSandboxes) -> None:
        async def has_lease(request_id: str, attempt: int) -> bool:
            return await queue.is_leased(self._redis, request_id, attempt)

        while True:
            with contextlib.suppress(RedisError, OSError, SandboxError):
                for name in await remove_orphans(sandboxes, has_lease=has_lease):
                    log.warning("removed orphan container %s", name)
                for name in await remove_unused_volumes(sandboxes.api):
                    log.info("removed %s, which no episode uses", name)
            await asyncio.sleep(self._reap_every_s)


async def remove_orphans(
    sandboxes: DockerSandboxes, *, has_lease: HasLease, settle_s: float = SETTLE_S
) -> list[str]:
    """Removes the containers that are orphans in two checks, `settle_s` apart; returns their names. Raises the errors of `orphans`.

    One check is not enough: when Redis comes back from an outage longer than a lease, living workers renew within RENEW_S.
    """
    found = await orphans(sandboxes, has_lease=has_lease)
    if found and settle_s:
        await asyncio.sleep(settle_s)
        still = set(await orphans(sandboxes, has_lease=has_lease))
        found = [name for name in found if name in still]
    for name in found:
        await sandboxes.api.remove(name)
    return found


async def orphans(sandboxes: DockerSandboxes, *, has_lease: HasLease) -> list[str]:
    """Names of this fleet's containers that are past their deadline, whose try is over, or whose labels are unreadable.

    Containers that this process uses are not among them. Raises SandboxError if the Docker host does not answer, and the errors of
    `has_lease`.
    """
    found: list[str] = []
    for name, labels in await sandboxes.api.labelled(sandboxes.fleet):
        if sandboxes.is_open(name):
            continue
        try:
            deadline, request_id, attempt = float(labels[DEADLINE]), labels[REQUEST], int(labels[ATTEMPT])
        except (KeyError, ValueError):
            found.append(name)
            continue
        if time.time() >= deadline or not await has_lease(request_id, attempt):
            found.append(name)
    return found
