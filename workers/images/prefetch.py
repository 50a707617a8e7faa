"""Images on a Docker host, as one worker uses them: it holds those of its episodes and can pull those of coming requests.

A worker holds an episode's image from the claim to the end of grading, so that it is not evicted. One process of a machine pulls ahead
at a time, one image at a time, in the order of the queue and within the byte budget. A claim whose image is being pulled, or was evicted,
waits for the pull. Failures here are only logged, because the sandbox will report them: an image that is absent is ImageMissing.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline import queue
from pipeline.request import Claim
from workers.docker.host import DockerHost
from workers.images.api import ImageApi
from workers.images.errors import ImageError
from workers.images.names import parse_name
from workers.images.parallel import in_daemon
from workers.images.pulling import Puller, PullPlan
from workers.images.shelf import Shelf
from workers.settings import ImageSettings
from workers.status import EpisodeStatus

LOOK_EVERY_S = 5.0
AGAIN_S = 300.0  # after a failed pull, before the next try to pull that image ahead
RETRIES = 2
HOLD_GRACE_S = 600.0  # beyond an episode's own limits

log = logging.getLogger("swerve.images")


class HostImages:
    """Made by `open`. Use `using` round each episode, and run `fetch_ahead` in the background."""

    def __init__(self, api: ImageApi, shelf: Shelf, plan: PullPlan, *, prefetch: bool) -> None:
        self._api = api
        self._shelf = shelf
        self._plan = plan
        self._prefetch = prefetch
        self._wanted: frozenset[str] = frozenset()  # by requests that wait in the queue
        self._under_way: dict[str, asyncio.Task[bool]] = {}
        self._not_before: dict[str, float] = {}  # by time.monotonic(), of images that could not be pulled
        self._stopping = threading.Event()

    @classmethod
    async def open(cls, settings: ImageSettings, host: DockerHost) -> Self:
        """Raises ImageError if the Docker host does not answer or the state directory cannot be used."""

        def make() -> Self:
            api = ImageApi(host)
            plan = PullPlan(
                platform=api.platform,
                proxies=settings.proxies,
                retries=RETRIES,
                budget_bytes=settings.budget_bytes,
            )
            return cls(api, Shelf(settings.state_dir, api.id), plan, prefetch=settings.prefetch)

        return await asyncio.to_thread(make)

    async def close(self) -> None:
        """Stop pulls under way. The next pull of such an image continues with the layers that arrived."""
        self._stopping.set()
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        self._api.close()

    @contextlib.asynccontextmanager
    async def using(self, claim: Claim, status: EpisodeStatus) -> AsyncGenerator[None]:
        """Hold the image of the claim's task; pull it first if it is missing and this worker may pull."""
        request, limits = claim.request, claim.request.limits
        name = _spelled(request.task.image)
        if name is None:
            yield
            return
        until = time.time() + limits.wall_s + limits.grade_wall_s + HOLD_GRACE_S
        holder = f"{request.id}/{claim.attempt}"
        await self._noted(lambda: self._shelf.hold(name, holder, until=until))
        try:
            if self._prefetch:
                await self._await_image(name, status)
            yield
        finally:
            await self._noted(lambda: self._shelf.release(name, holder))

    async def fetch_ahead(self, redis: Redis) -> None:
        """Pull images for requests that wait in the queue, for ever. Returns at once unless the settings ask for this."""
        while self._prefetch:
            try:
                pause_s = await self._look(redis)
            except (RedisError, ImageError, OSError) as error:
                log.warning("pulling ahead: %s", error)
                pause_s = LOOK_EVERY_S
            await asyncio.sleep(pause_s)

    async def _look(self, redis: Redis) -> float:
        """Pull the first image that is wanted and missing; returns how many seconds to wait before the next look."""
        wanted = [
            name for image in await queue.waiting_images(redis) if (name := _spelled(image)) is not None
        ]
        self._wanted = frozenset(wanted)
        for name in wanted:
            if time.monotonic() < self._not_before.get(name, 0.0):
                continue
            if await asyncio.to_thread(self._api.find, name) is not None:
                continue
            with self._shelf.alone("prefetching", wait=False) as alone:
                if not alone:
                    return LOOK_EVERY_S
                full = await self._pulled(name)
                return AGAIN_S if full else 0.0  # the queue may have changed
        return LOOK_EVERY_S

    async def _await_image(self, name: str, status: EpisodeStatus) -> None:
        try:
            if await asyncio.to_thread(self._api.find, name) is not None:
                return
            status.phase = "pulling"
            await self._pulled(name)
            status.phase = "opening"
        except ImageError as error:
            log.warning("%s: %s", name, error)

    async def _pulled(self, name: str) -> bool:
        """Wait for the one pull of `name`, which may be under way already. True: the byte budget is full."""
        task = self._under_way.get(name)
        if task is None:
            task = self._under_way[name] = asyncio.create_task(self._pull(name))
            task.add_done_callback(lambda _: self._under_way.pop(name, None))
        return await asyncio.shield(task)

    async def _pull(self, name: str) -> bool:
        plan = replace(self._plan, keep=self._wanted)
        puller = Puller(self._api, self._shelf, plan, stopping=self._stopping)
        result = await in_daemon(lambda: puller.pull(name))
        if result.state == "failed":
            self._not_before[name] = time.monotonic() + AGAIN_S
            log.warning("%s cannot be pulled: %s", name, result.reason)
        else:
            self._not_before.pop(name, None)
            log.info("%s: %s, %.0f s", name, result.state, result.seconds)
        return bool(puller.full)

    async def _noted(self, write: Callable[[], None]) -> None:
        """Record something. An episode must not fail because its use of an image could not be recorded."""
        try:
            await asyncio.to_thread(write)
        except ImageError as error:
            log.warning("cannot record the use of an image: %s", error)


def _spelled(image: str) -> str | None:
    """The name as Docker lists it; None for an image id, or for a malformed name."""
    try:
        return str(parse_name(image))
    except ValueError:
        return None
