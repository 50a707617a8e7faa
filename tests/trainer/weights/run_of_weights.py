"""A run's publisher and deliveries without the rest of it, and engines that do as a test says."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Set
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import aiohttp.test_utils
import aiohttp.web
from redis.asyncio import Redis

from pipeline.weights import ServedWeights, WeightVersion
from tests.tiny_llama import write_checkpoint
from trainer.weights.deliveries import Deliveries
from trainer.weights.engines import Engines, PauseMode
from trainer.weights.publish import Publisher
from trainer.weights.transport import DiskTransport, WeightTransport

RUN = "publishing"
FOREVER_S = 3600.0
"""Beyond the time limit of any test."""
CONTROL_S = 120.0
"""Deadline of a call that moves no weights, to a real engine that shares its cores with other tests."""


class RunOfWeights:
    """Delivers inside its block."""

    def __init__(
        self,
        redis: Redis,
        engines: Engines | None,
        directory: Path,
        *,
        transport: WeightTransport | None = None,
        mode: PauseMode = "retract",
        deadline_s: float = 240.0,
        at_once: int = 0,
    ) -> None:
        transport = transport or DiskTransport(RUN, directory=directory, export=write_checkpoint, keep=2)
        self.publisher = Publisher(redis, RUN, transport=transport)
        self.deliveries = Deliveries(
            redis,
            RUN,
            transport=transport,
            engines=engines,
            mode=mode,
            deadline_s=deadline_s,
            at_once=at_once,
        )
        self.reported: list[ServedWeights] = []
        self._looks = 0
        self._looked = asyncio.Condition()

    async def announce(self, version: int) -> WeightVersion:
        made = await self.publisher.prepare(version, version)
        await self.publisher.announce(made)
        return made

    async def publish(self, version: int) -> None:
        """Announce a version and have it delivered, without waiting for that."""
        self.deliveries.offer(await self.announce(version))

    async def serve(self, version: int) -> bool:
        """Publish a version; whether the engines serve it."""
        await self.publish(version)
        return await self.deliveries.settled(version)

    async def serve_at_last(self, version: int) -> None:
        """Publish a version, until the engines serve it. Unlike `serve`, it goes on where all engines are late at the same moment: a
        real one may be, beside one that hangs.
        """
        await self.publish(version)
        await self.deliveries.served(version)

    async def another_look(self) -> None:
        """Return after a look at the engines that began after this call."""
        seen = self._looks
        async with self._looked:
            await self._looked.wait_for(lambda: self._looks > seen + 1)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.deliveries.run(self._note, while_ours=self._count))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _note(self, served: ServedWeights, _: float) -> None:
        self.reported.append(served)

    def _count(self) -> bool:
        self._looks += 1
        self._counting = asyncio.create_task(self._tell())
        return True

    async def _tell(self) -> None:
        async with self._looked:
            self._looked.notify_all()


class FakeEngine:
    """In good health, and takes weights as a test says."""

    def __init__(self) -> None:
        self.url = ""
        self.weight_version, self.model_path = "0", "fake"
        self.refuses = False  # answers an update with an error
        self.answers = asyncio.Event()  # cleared: it accepts a request to load weights, and never answers
        self.answers.set()
        self.asked: list[str] = []  # the versions that it was told to load
        self.is_paused = False
        self.when_paused: Callable[[], None] = lambda: None
        self._changed = asyncio.Condition()

    async def is_asked(self, times: int) -> None:
        """Return when it was told to load a version so many times."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.asked) >= times)

    async def handle(self, request: aiohttp.web.BaseRequest) -> aiohttp.web.Response:
        match request.path:
            case "/pause_generation":
                self.is_paused = True
                self.when_paused()
            case "/continue_generation":
                self.is_paused = False
            case "/update_weights_from_disk":
                return await self._load(await request.json())
            case _:
                about = {"model_path": self.model_path, "weight_version": self.weight_version}
                return aiohttp.web.json_response(about)
        return aiohttp.web.json_response({})

    async def _load(self, body: dict[str, str]) -> aiohttp.web.Response:
        async with self._changed:
            self.asked.append(body["weight_version"])
            self._changed.notify_all()
        await self.answers.wait()
        if self.refuses:
            return aiohttp.web.Response(status=500)
        self.model_path, self.weight_version = body["model_path"], body["weight_version"]
        return aiohttp.web.json_response({"success": True})


@contextlib.asynccontextmanager
async def fake_engine(engines: Engines, fake: FakeEngine | None = None) -> AsyncGenerator[FakeEngine]:
    """In routing inside the block; gone afterwards."""
    fake = fake or FakeEngine()
    async with aiohttp.test_utils.RawTestServer(fake.handle, host="127.0.0.1") as server:
        fake.url = str(server.make_url("")).rstrip("/")
        others = {engine.url for engine in await engines.routed()}
        await engines.readmit(fake.url)
        await eventually_routed(engines, others | {fake.url})
        yield fake
        fake.answers.set()


async def eventually_routed(engines: Engines, urls: Set[str]) -> None:
    """Return once the router's list is `urls` and, if there are any, one of them gets requests; the test's own time limit ends a
    wait in vain.
    """
    while {one.url for one in await engines.routed()} != urls:  # noqa: ASYNC110 - the router sets no Event
        await asyncio.sleep(0.05)
    async with aiohttp.ClientSession() as http:
        while urls:
            async with http.get(f"{engines.router_url}/readiness") as response:
                if response.ok:
                    return
            await asyncio.sleep(0.05)
