"""The images on each of a worker's Docker hosts: the worker holds the images of its episodes and can pull those of coming requests.

A worker holds an episode's image from the claim to the end of grading, so that it is not evicted. Only one process of a machine pulls ahead
at a time, one image after the other, in the order of the queue and within the byte budget. A claim whose image is being pulled, or was
evicted, waits for the pull. Failures here are only logged, because the sandbox will report them: an image that is absent is ImageMissing.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from pipeline import queue
from pipeline.request import Claim, EpisodeStatus
from workers.docker.host import DockerHost
from workers.images.api import ImageApi, ImageError, in_daemon
from workers.images.eviction import Shelf
from workers.images.names import parse_name
from workers.images.pulling import Puller, PullPlan
from workers.settings import ImageSettings

LOOK_EVERY_S = 5.0
AGAIN_S = 300.0  # pause after a failed pull, before the next try to pull that image ahead
RETRIES = 2
HOLD_GRACE_S = 600.0  # time beyond an episode's own limits

log = logging.getLogger("swerve.images")


class HostImages:
    """The images of one host, made by `open`. Use `using` around each episode, and run `fetch_ahead` in the background."""

    def __init__(self, api: ImageApi, shelf: Shelf, plan: PullPlan, *, prefetch: bool) -> None:
        self._api = api
        self._shelf = shelf
        self._plan = plan
        self._prefetch = prefetch
        self._wanted: frozenset[str] = frozenset()  # images of requests in the queue
        self._under_way: dict[str, asyncio.Task[bool]] = {}
        self._not_before: dict[str, float] = {}  # time.monotonic() of images that could not be pulled
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
        """Stops current pulls. The next pull of such an image continues with the layers that arrived."""
        self._stopping.set()
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        self._api.close()

    @contextlib.asynccontextmanager
    async def using(self, claim: Claim, status: EpisodeStatus) -> AsyncGenerator[None]:
        """Holds the image of the claim's task. Pulls it first if it is missing and this worker may pull."""
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
        """Pulls images for queued requests until cancelled. Returns at once unless the settings ask for this."""
        while self._prefetch:
            try:
                pause_s = await self._look(redis)
            except (RedisError, ImageError, OSError) as error:
                log.warning("pulling ahead: %s", error)
                pause_s = LOOK_EVERY_S
            await asyncio.sleep(pause_s)

    async def _look(self, redis: Redis) -> float:
        """Pulls the first image that is wanted and missing; returns the seconds to wait before the next look."""
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
        """Waits for the pull of `name`, which may be running already. Returns True if the byte budget is full."""
        task = self._under_way.get(name)
        if task is None:
            task = self._under_way[name] = asyncio.create_task(self._pull(name), name=f"pull {name}")
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
        """Records something, ignoring errors: an episode must not fail because its use of an image could not be recorded."""
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


class ImagesOfHosts:
    """The images of all hosts. The hosts that answer at the worker's start are opened then, the others when they are first used."""

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
        """Runs `HostImages.using` on that host. If the host does not answer, the sandbox will report it."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                images = await self.open(host)
            except ImageError as error:
                log.warning("cannot record the use of an image: %s", error)
            else:
                await stack.enter_async_context(images.using(claim, status))
            yield

    async def fetch_ahead(self, host: DockerHost, redis: Redis) -> None:
        """Pulls images for queued requests to that host until cancelled, if the settings ask for it."""
        while True:
            try:
                images = await self.open(host)
                break
            except ImageError:
                await asyncio.sleep(LOOK_EVERY_S)
        await images.fetch_ahead(redis)
