"""Who plays the episodes of an evaluation: a process of this machine, or the fleet's workers through its queue."""

import asyncio
import contextlib
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from arq.connections import ArqRedis

from pipeline import queue, retry, stream
from pipeline.frames import EpisodeReport, encode_frame, read_frame
from pipeline.message import MalformedMessage
from pipeline.request import RolloutRequest
from pipeline.stream import Delivery
from pipeline.task import Task
from pipeline.taskfile import fingerprint
from pipeline.trajectory import Trajectory

READ_BLOCK_MS = 500
END_PATIENCE_S = 30.0  # for containers to be removed, before the process is killed


class EpisodeLost(Exception):
    """An episode that will leave no trajectory."""


class Players(Protocol):
    """Plays episodes. An async context manager: at its end, nothing of it goes on."""

    async def play(self, request: RolloutRequest) -> Trajectory:
        """Raises EpisodeLost."""
        ...

    async def settle(self, request_id: str) -> None:
        """The trajectory is on disk."""
        ...


class LocalPlayers:
    """`python -m workers.episodes` as a child process. It ends with us, whatever happens to us."""

    def __init__(self, on_progress: Callable[[EpisodeReport], None]) -> None:
        self._on_progress = on_progress
        self._waiting: dict[str, asyncio.Future[Trajectory]] = {}
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # In a session of its own, so that Ctrl-C reaches us alone and we end it in order.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "workers.episodes", stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._reading is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_PATIENCE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def play(self, request: RolloutRequest) -> Trajectory:
        assert self._process is not None
        assert self._process.stdin is not None
        if self._reading is None or self._reading.done():
            raise EpisodeLost(self._why_ended())
        future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(encode_frame(request))
            with contextlib.suppress(ConnectionError):  # then the reading ends too, and says why
                await self._process.stdin.drain()
            return await future
        finally:
            del self._waiting[request.id]

    async def settle(self, request_id: str) -> None:
        """Nobody else keeps it."""

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            while (report := await read_frame(self._process.stdout, EpisodeReport)) is not None:
                future = self._waiting.get(report.request_id)
                self._on_progress(report)
                if report.trajectory is not None and future is not None and not future.done():
                    future.set_result(report.trajectory)
        except MalformedMessage as error:
            self._lose_all(f"workers.episodes wrote what cannot be read: {error}")
        await self._process.wait()
        self._lose_all(self._why_ended())

    def _lose_all(self, why: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EpisodeLost(why))

    def _why_ended(self) -> str:
        status = None if self._process is None else self._process.returncode
        return f"the process that plays episodes has ended (status {status}); its last words are above"


class FleetPlayers:
    """The fleet's workers. Requests of an earlier session that are still outstanding are taken over, not enqueued again."""

    def __init__(self, redis: ArqRedis, run_id: str) -> None:
        self._redis = redis
        self._run_id = run_id
        # Stream entries of trajectories that have arrived and are not settled, by request id.
        self._entries: dict[str, str] = {}
        self._waiting: dict[str, asyncio.Future[Trajectory]] = {}
        self._adopted: dict[str, str] = {}  # request ids of the earlier session, by place
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await stream.open_reader(self._redis, self._run_id)
        for request_id in await queue.open_ids(self._redis, self._run_id):
            self._adopted[place_of(request_id)] = request_id
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reading is not None
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        outstanding = await retry.until_answered(lambda: queue.open_ids(self._redis, self._run_id))
        await retry.until_answered(lambda: queue.withdraw(self._redis, self._run_id, outstanding))

    async def play(self, request: RolloutRequest) -> Trajectory:
        adopted = self._adopted.pop(place_of(request.id), None)
        request_id = adopted or request.id
        future = self._waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
        if adopted is None:
            await retry.until_answered(lambda: queue.enqueue(self._redis, request))
        return await future

    async def settle(self, request_id: str) -> None:
        entry_id = self._entries.pop(request_id, None)
        if entry_id is not None:
            entries = [(entry_id, request_id)]
            await retry.until_answered(lambda: stream.acknowledge(self._redis, self._run_id, entries))

    async def _read(self) -> None:
        try:
            for delivery in await retry.until_answered(
                lambda: stream.read_unacknowledged(self._redis, self._run_id)
            ):
                await self._accept(delivery)
            while True:
                for delivery in await retry.until_answered(
                    lambda: stream.read_new(self._redis, self._run_id, block_ms=READ_BLOCK_MS)
                ):
                    await self._accept(delivery)
        except Exception as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(EpisodeLost(f"the queue cannot be read: {error}"))
            raise

    async def _accept(self, delivery: Delivery) -> None:
        request_id = delivery.head.request_id
        self._entries[request_id] = delivery.entry_id
        future = self._waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
        if future.done():
            return
        try:
            trajectory = await retry.until_answered(lambda: stream.read_body(self._redis, request_id))
        except MalformedMessage as error:
            future.set_exception(EpisodeLost(f"its trajectory cannot be read: {error}"))
            return
        if trajectory is None:
            future.set_exception(EpisodeLost(f"{delivery.head.outcome}, and its trajectory is not in Redis"))
        else:
            future.set_result(trajectory)


def request_id(run_id: str, task: Task, sample: int) -> str:
    """A new id for an episode, from which `place_of` tells which episode it is."""
    return f"{run_id}.{fingerprint(task)[:12]}.{sample}.{secrets.token_hex(4)}"


def place_of(request_id: str) -> str:
    """Run, task and sample: the same for every request of one episode."""
    return request_id.rpartition(".")[0]
