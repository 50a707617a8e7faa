"""The players of an evaluation's episodes: a process on this machine, or the fleet's workers through its queue."""

import asyncio
import contextlib
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import queue, redis_calls, stream
from pipeline.frames import EpisodeReport, encode_frame, read_frame
from pipeline.message import MalformedMessage
from pipeline.request import RolloutRequest
from pipeline.stream import Delivery
from pipeline.task import Task
from pipeline.taskfile import fingerprint
from pipeline.trajectory import Trajectory

READ_BLOCK_MS = 500
END_PATIENCE_S = 30.0  # time to remove containers, after which the process is killed
MAX_PLAYERS = 3
MISUSE = 2  # exit status of a player that says what is wrong


class EpisodeLost(Exception):
    """An episode that will leave no trajectory."""


class Players(Protocol):
    """Plays episodes. It is an async context manager: nothing of it continues after its end."""

    async def play(self, request: RolloutRequest) -> Trajectory:
        """Returns the trajectory. Raises EpisodeLost."""
        ...

    async def settle(self, request_id: str) -> None:
        """The caller has written the trajectory to disk."""
        ...


@dataclass(slots=True)
class _Waiting:
    """An episode whose trajectory has not arrived."""

    frame: bytes  # its request, encoded
    future: asyncio.Future[Trajectory]
    num_players: int = 0  # number of players that it was given to


class LocalPlayers:
    """`python -m workers.episodes` as a child process. It ends when this process ends, for whatever reason.

    A player that is killed is started again, and its episodes start over. An episode that MAX_PLAYERS killed players have played is lost,
    because it may be what kills them. A player that reports why it cannot work (exit status 2) is not started again.
    """

    def __init__(self, on_progress: Callable[[EpisodeReport], None], say: Callable[[str], None]) -> None:
        self._on_progress = on_progress
        self._say = say
        self._waiting: dict[str, _Waiting] = {}
        self._process: Process | None = None  # None while none runs
        self._supervising: asyncio.Task[None] | None = None
        self._ending = False
        self._why_lost = ""  # why no further episode can be played

    async def __aenter__(self) -> Self:
        self._process = await self._start()
        self._supervising = asyncio.create_task(self._supervise(self._process))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._supervising is not None
        self._ending = True
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            async with asyncio.timeout(END_PATIENCE_S):
                await asyncio.shield(self._supervising)
        except TimeoutError:
            if self._process is not None:
                self._process.kill()
            await self._supervising

    async def play(self, request: RolloutRequest) -> Trajectory:
        if self._why_lost:
            raise EpisodeLost(self._why_lost)
        waiting = _Waiting(encode_frame(request), asyncio.get_running_loop().create_future())
        self._waiting[request.id] = waiting
        try:
            if self._process is not None:
                _give(waiting, self._process)
            return await waiting.future
        finally:
            del self._waiting[request.id]

    async def settle(self, request_id: str) -> None:
        """Does nothing, because no other process stores the trajectory."""

    async def _supervise(self, process: Process) -> None:
        """Keeps a player running. However this ends, no episode waits any longer."""
        try:
            await self._follow(process)
        finally:
            self._process = None
            self._why_lost = self._why_lost or "no process plays episodes any more"
            self._lose(self._waiting.values(), self._why_lost)

    async def _follow(self, process: Process) -> None:
        """Reads the output of players, and starts another one after each that was killed. Returns when no player runs any more."""
        num_silent = 0  # players in a row that were killed before they reported anything
        while True:
            has_reported = await self._read(process)
            status = await process.wait()
            self._process = None
            num_silent = 0 if has_reported else num_silent + 1
            if self._ending:
                return
            if status == MISUSE or num_silent == MAX_PLAYERS:
                self._why_lost = (
                    f"the process that plays episodes has ended (status {status}); its last lines are above"
                )
                return
            self._lose(
                [one for one in self._waiting.values() if one.num_players >= MAX_PLAYERS],
                f"{MAX_PLAYERS} processes ended while they played it, the last with status {status}",
            )
            self._say(
                f"the process that plays episodes ended (status {status}); its episodes begin anew in another"
            )
            process = await self._start()
            if self._ending:
                process.kill()
                continue
            self._process = process
            for one in self._waiting.values():
                _give(one, process)

    async def _start(self) -> Process:
        # The player gets its own process session, so that Ctrl-C reaches only this process, which then ends the player in order.
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "workers.episodes", stdin=PIPE, stdout=PIPE, start_new_session=True
        )

    async def _read(self, process: Process) -> bool:
        """Processes reports until the player ends, and ends a player whose output cannot be read. Returns True if it reported anything."""
        assert process.stdout is not None
        has_reported = False
        try:
            while (report := await read_frame(process.stdout, EpisodeReport)) is not None:
                has_reported = True
                self._on_progress(report)
                waiting = self._waiting.get(report.request_id)
                if report.trajectory is not None and waiting is not None and not waiting.future.done():
                    waiting.future.set_result(report.trajectory)
        except MalformedMessage as error:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            self._say(f"workers.episodes wrote what cannot be read: {error}")
        return has_reported

    def _lose(self, those: Iterable[_Waiting], why: str) -> None:
        for one in those:
            if not one.future.done():
                one.future.set_exception(EpisodeLost(why))


def _give(waiting: _Waiting, process: Process) -> None:
    """Sends the request. If a player ends before it has read the request, the next player gets it."""
    assert process.stdin is not None
    waiting.num_players += 1
    process.stdin.write(waiting.frame)


class FleetPlayers:
    """Plays episodes on the workers of the fleet, through the queue in Redis.

    Requests that an interrupted evaluation left in the queue are taken over, not enqueued again.
    """

    def __init__(self, redis: ArqRedis, run_id: str) -> None:
        self._redis = redis
        self._run_id = run_id
        # Stream entries of trajectories that have arrived and are not settled, by request id.
        self._entries: dict[str, str] = {}
        self._waiting: dict[str, asyncio.Future[Trajectory]] = {}
        self._asked: dict[str, RolloutRequest] = {}  # requests whose trajectories have not arrived
        self._adopted: dict[str, str] = {}  # request ids that the interrupted evaluation enqueued, by place
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
        outstanding = await redis_calls.until_answered(lambda: queue.open_ids(self._redis, self._run_id))
        await redis_calls.until_answered(lambda: queue.withdraw(self._redis, self._run_id, outstanding))

    async def play(self, request: RolloutRequest) -> Trajectory:
        adopted = self._adopted.pop(place_of(request.id), None)
        request_id = adopted or request.id
        future = self._waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
        if adopted is None:
            await redis_calls.until_answered(lambda: queue.enqueue(self._redis, request))
        if not future.done():
            self._asked[request_id] = replace(request, id=request_id)
        return await future

    async def settle(self, request_id: str) -> None:
        entry_id = self._entries.pop(request_id, None)
        if entry_id is not None:
            entries = [(entry_id, request_id)]
            await redis_calls.until_answered(lambda: stream.acknowledge(self._redis, self._run_id, entries))

    async def _read(self) -> None:
        try:
            for delivery in await redis_calls.until_answered(
                lambda: stream.read_unacknowledged(self._redis, self._run_id)
            ):
                await self._accept(delivery)
            while True:
                for delivery in await redis_calls.until_answered(self._read_new):
                    await self._accept(delivery)
        except Exception as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(EpisodeLost(f"the queue cannot be read: {error}"))
            raise

    async def _read_new(self) -> list[Delivery]:
        try:
            return await stream.read_new(self._redis, self._run_id, block_ms=READ_BLOCK_MS)
        except stream.RunForgotten:
            known = await queue.open_ids(self._redis, self._run_id)
            for request in [one for one in self._asked.values() if one.id not in known]:
                await queue.enqueue(self._redis, request)
            # The reader is opened last, because every read raises RunForgotten until then.
            await stream.open_reader(self._redis, self._run_id)
            raise

    async def _accept(self, delivery: Delivery) -> None:
        request_id = delivery.head.request_id
        self._asked.pop(request_id, None)
        self._entries[request_id] = delivery.entry_id
        future = self._waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
        if future.done():
            return
        try:
            trajectory = await redis_calls.until_answered(lambda: stream.read_body(self._redis, request_id))
        except MalformedMessage as error:
            future.set_exception(EpisodeLost(f"its trajectory cannot be read: {error}"))
            return
        if trajectory is None:
            future.set_exception(EpisodeLost(f"{delivery.head.outcome}, and its trajectory is not in Redis"))
        else:
            future.set_result(trajectory)


def request_id(run_id: str, task: Task, sample: int) -> str:
    """A new id for an episode. `place_of` finds the episode from it."""
    return f"{run_id}.{fingerprint(task)[:12]}.{sample}.{secrets.token_hex(4)}"


def place_of(request_id: str) -> str:
    """The run, task and sample in the id, which are the same for every request of one episode."""
    return request_id.rpartition(".")[0]
