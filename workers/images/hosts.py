"""The images on each of a worker's Docker hosts: a HostImages for each, from when the host first answers."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator

from redis.asyncio import Redis

from pipeline.request import Claim
from workers.docker.host import DockerHost
from workers.images.errors import ImageError
from workers.images.prefetch import LOOK_EVERY_S, HostImages
from workers.settings import ImageSettings
from workers.status import EpisodeStatus

log = logging.getLogger("swerve.images")


class ImagesOfHosts:
    """The worker opens the hosts that answer at its start; the others are opened when they are first used."""

    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings
        self._opened: dict[DockerHost, HostImages] = {}
        self._opening: defaultdict[DockerHost, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def open(self, host: DockerHost) -> HostImages:
        """Raises ImageError if the Docker host does not answer or the state directory cannot be used."""
        async with self._opening[host]:
            if host not in self._opened:
                self._opened[host] = await HostImages.open(self._settings, host)
            return self._opened[host]

    async def close(self) -> None:
        for images in self._opened.values():
            await images.close()

    @contextlib.asynccontextmanager
    async def using(self, host: DockerHost, claim: Claim, status: EpisodeStatus) -> AsyncGenerator[None]:
        """`HostImages.using` on that host. If the host does not answer, the sandbox will report it."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                images = await self.open(host)
            except ImageError as error:
                log.warning("cannot record the use of an image: %s", error)
            else:
                await stack.enter_async_context(images.using(claim, status))
            yield

    async def fetch_ahead(self, host: DockerHost, redis: Redis) -> None:
        """Pull images for requests that wait in the queue to that host, for ever, if the settings say so."""
        while True:
            try:
                images = await self.open(host)
                break
            except ImageError:
                await asyncio.sleep(LOOK_EVERY_S)
        await images.fetch_ahead(redis)
