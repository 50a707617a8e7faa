"""A worker's part in its host's images: it says which ones episodes use and, if asked to, pulls what comes next.

Promises. What an episode needs is held from its claim to its end, its grading included, so that no eviction takes it.
Pulling ahead is done by one process of a host at a time, one image at a time, in the order of the queue and within the
byte budget; a claim whose image is on its way, or gone again, waits for its pull. Whatever fails here is logged, and
left to the sandbox to find out: an image that is not there is ImageMissing, as ever.
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
from workers.claim import Progress
from workers.docker.host import DockerHost
from workers.images.docker_images import ImageEngine
from workers.images.errors import ImageError
from workers.images.names import parse_name
from workers.images.parallel import in_daemon
from workers.images.pulling import Puller, PullPlan
from workers.images.shelf import Shelf
from workers.settings import ImageSettings

LOOK_EVERY_S = 5.0
AGAIN_S = 300.0  # after a pull that failed, before it is tried ahead of time once more
RETRIES = 2
HOLD_GRACE_S = 600.0  # beyond an episode's own limits

log = logging.getLogger("swerve.images")


class HostImages:
    """Made by `open`. Use `using` round an episode, and run `fetch_ahead` beside it all."""

    def __init__(self, engine: ImageEngine, shelf: Shelf, plan: PullPlan, *, prefetch: bool) -> None:
        self._engine = engine
        self._shelf = shelf
        self._plan = plan
        self._prefetch = prefetch
        self._wanted: frozenset[str] = frozenset()  # by what waits in the queue
        self._under_way: dict[str, asyncio.Task[bool]] = {}
        self._not_before: dict[str, float] = {}  # by time.monotonic(), of what could not be pulled
        self._stopping = threading.Event()

    @classmethod
    async def open(cls, settings: ImageSettings, host: DockerHost) -> Self:
        """Raises ImageError if the engine does not answer or the state directory cannot be used."""

        def make() -> Self:
            engine = ImageEngine(host)
            plan = PullPlan(
                platform=engine.platform,
                proxies=settings.proxies,
                retries=RETRIES,
                budget_bytes=settings.budget_bytes,
            )
            return cls(engine, Shelf(settings.state_dir, engine.id), plan, prefetch=settings.prefetch)

        return await asyncio.to_thread(make)

    async def close(self) -> None:
        """Pulls under way end; the next one goes on with what they brought."""
        self._stopping.set()
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        self._engine.close()

    @contextlib.asynccontextmanager
    async def using(self, claim: Claim, progress: Progress) -> AsyncGenerator[None]:
        """Holds the image of the claim's task; waits for it if it is not there and this worker may pull."""
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
                await self._await_image(name, progress)
            yield
        finally:
            await self._noted(lambda: self._shelf.release(name, holder))

    async def fetch_ahead(self, redis: Redis) -> None:
        """Endless: pulls what the queue will ask for next. Costs nothing and does nothing unless the settings say so."""
        while self._prefetch:
            try:
                pause_s = await self._look(redis)
            except (RedisError, ImageError, OSError) as error:
                log.warning("looking ahead: %s", error)
                pause_s = LOOK_EVERY_S
            await asyncio.sleep(pause_s)

    async def _look(self, redis: Redis) -> float:
        """Pulls the first image that is wanted and missing; returns after how many seconds to look again."""
        wanted = [
            name for image in await queue.waiting_images(redis) if (name := _spelled(image)) is not None
        ]
        self._wanted = frozenset(wanted)
        for name in wanted:
            if time.monotonic() < self._not_before.get(name, 0.0):
                continue
            if await asyncio.to_thread(self._engine.find, name) is not None:
                continue
            with self._shelf.alone("prefetching", wait=False) as alone:
                if not alone:
                    return LOOK_EVERY_S
                full = await self._pulled(name)
                return AGAIN_S if full else 0.0  # what was next may be another by now
        return LOOK_EVERY_S

    async def _await_image(self, name: str, progress: Progress) -> None:
        try:
            if await asyncio.to_thread(self._engine.find, name) is not None:
                return
            progress.phase = "pulling"
            await self._pulled(name)
            progress.phase = "opening"
        except ImageError as error:
            log.warning("%s: %s", name, error)

    async def _pulled(self, name: str) -> bool:
        """Waits for one pull of `name`, whoever asked for it first. True: the byte budget is full."""
        task = self._under_way.get(name)
        if task is None:
            task = self._under_way[name] = asyncio.create_task(self._pull(name))
            task.add_done_callback(lambda _: self._under_way.pop(name, None))
        return await asyncio.shield(task)

    async def _pull(self, name: str) -> bool:
        plan = replace(self._plan, keep=self._wanted)
        puller = Puller(self._engine, self._shelf, plan, stopping=self._stopping)
        outcome = await in_daemon(lambda: puller.pull(name))
        if outcome.state == "failed":
            self._not_before[name] = time.monotonic() + AGAIN_S
            log.warning("%s cannot be pulled: %s", name, outcome.reason)
        else:
            self._not_before.pop(name, None)
            log.info("%s: %s, %.0f s", name, outcome.state, outcome.seconds)
        return bool(puller.full)

    async def _noted(self, write: Callable[[], None]) -> None:
        """An episode does not end because its use of an image could not be written down."""
        try:
            await asyncio.to_thread(write)
        except ImageError as error:
            log.warning("use of an image not noted: %s", error)


def _spelled(image: str) -> str | None:
    """As the engine lists it; None for an image id, or for what no engine would take either."""
    try:
        return str(parse_name(image))
    except ValueError:
        return None
