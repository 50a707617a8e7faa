"""The images of every engine that a worker drives: a shelf and a prefetcher for each, from when it first answers."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator

from redis.asyncio import Redis

from pipeline.request import Claim
from workers.claim import Progress
from workers.docker.host import DockerHost
from workers.images.errors import ImageError
from workers.images.prefetch import LOOK_EVERY_S, HostImages
from workers.settings import ImageSettings

log = logging.getLogger("swerve.images")


class ImagesOfHosts:
    """`open` is for engines that must be there, at a start; the others follow by themselves."""

    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings
        self._opened: dict[DockerHost, HostImages] = {}
        self._opening: defaultdict[DockerHost, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def open(self, host: DockerHost) -> HostImages:
        """Raises ImageError if the engine does not answer or the state directory cannot be used."""
        async with self._opening[host]:
            if host not in self._opened:
                self._opened[host] = await HostImages.open(self._settings, host)
            return self._opened[host]

    async def close(self) -> None:
        for images in self._opened.values():
            await images.close()

    @contextlib.asynccontextmanager
    async def using(self, host: DockerHost, claim: Claim, progress: Progress) -> AsyncGenerator[None]:
        """`HostImages.using` on that engine. What is wrong with the engine is left to the sandbox to find out."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                images = await self.open(host)
            except ImageError as error:
                log.warning("use of an image not noted: %s", error)
            else:
                await stack.enter_async_context(images.using(claim, progress))
            yield

    async def fetch_ahead(self, host: DockerHost, redis: Redis) -> None:
        """Endless: pulls to that engine what the queue will ask for next, if the settings say so."""
        while True:
            try:
                images = await self.open(host)
                break
            except ImageError:
                await asyncio.sleep(LOOK_EVERY_S)
        await images.fetch_ahead(redis)
