"""All that a worker does on its Docker hosts: run episodes, keep and pull their images, remove orphans."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline import queue
from pipeline.census import HostStatus
from pipeline.errors import SandboxError
from pipeline.request import Claim
from workers.images.errors import ImageError
from workers.images.hosts import ImagesOfHosts
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.orphans import remove_orphans
from workers.sandbox.pool import HostPool
from workers.sandbox.protocol import Misconfigured, Sandboxes
from workers.status import EpisodeStatus

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
        """Raises SandboxError if no host answers within `patience_s`, and Misconfigured if a setting cannot work on one that does, or if
        the record of its images cannot be kept.
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
        """Where the claim's sandboxes are opened; its image is kept there until the block ends."""
        host = self._pool.of(claim.request.id)
        async with self._images.using(host.host, claim, status):
            yield host.sandboxes

    async def maintain(self) -> None:
        """Remove orphans and pull images ahead, for ever."""
        async with asyncio.TaskGroup() as tasks:
            for host in self._pool.hosts:
                tasks.create_task(self._remove_orphans(host.sandboxes))
                tasks.create_task(self._images.fetch_ahead(host.host, self._redis))

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
            await asyncio.sleep(self._reap_every_s)
