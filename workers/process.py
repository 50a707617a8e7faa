"""The parts that worker processes of all kinds of jobs share: taking requests until a signal, draining, heartbeats and metrics.

Jobs are taken by a subclass of arq's worker. arq itself reads the head of its queue, which includes jobs that other workers run, with three
round trips for each; and it settles a job by its id, whichever worker holds it now. So here one script takes (`queue.take`), an idle worker
blocks on a list that is pushed to when there is work, and a request is settled by its claim, in one fenced script. Only the format of the
job, its function, and its task remain from arq.
"""

import asyncio
import contextlib
import logging
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from typing import Generic, Protocol

from arq.connections import ArqRedis
from arq.worker import Worker, func
from opentelemetry.metrics import CallbackOptions, Observation
from redis.exceptions import RedisError

from pipeline import census, keys, queue, request_store
from pipeline.commandline import MISUSE, NotAnswering, status_of
from pipeline.connection import RedisUnavailable
from pipeline.kinds import H, T
from pipeline.queue import Unclaimable
from pipeline.request import PHASES, Claim, EpisodeStatus, R
from pipeline.running_tasks import print_tasks_on_sigquit
from pipeline.settings import metrics_settings, telemetry_settings
from pipeline.telemetry import exported_metrics, meter, start_telemetry
from workers.claim import Claimer, TailHandler

log = logging.getLogger("swerve.worker")

TAKE_AT_ONCE = 4  # claims taken at once; few, so that a large worker leaves part of a short queue to others
# Longest sleep of an idle worker. A request that comes due by itself (after a back-off, or when a dead worker's lease expires)
# wakes no worker.
IDLE_S = 2.0
PAUSE_S = 0.25  # pause between two checks for a free slot
FOREVER_S = 30 * 24 * 3600  # a job is ended by the request's own limits
NO_LIMIT = 1_000_000  # tries are limited by the request's own budget


class Taker(Worker, Generic[R, T, H]):
    """Fills `slots` with claims of the claimer's kind of job until `stop` is called."""

    def __init__(self, claimer: Claimer[R, T, H], *, slots: int) -> None:
        super().__init__(
            functions=[func(claimer.answer, name=claimer.kind.name, timeout=FOREVER_S)],
            queue_name=keys.queue(claimer.kind),
            redis_pool=claimer.redis,
            max_jobs=slots,
            job_timeout=FOREVER_S,
            max_tries=NO_LIMIT,
            keep_result=0,
            handle_signals=False,
            job_serializer=request_store.encode_job,
            job_deserializer=request_store.decode_job,
            log_results=False,
        )
        self._claimer = claimer
        self._kind = claimer.kind
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Stops taking requests. `async_run` returns; running jobs continue."""
        self._stopping.set()
        self._changed.set()

    async def drain(self, grace_s: float) -> None:
        """Gives running episodes `grace_s` to end, then returns the others to the queue."""
        if self.tasks:
            log.info("draining %d episodes for up to %.0f s", len(self.tasks), grace_s)
            await asyncio.wait(self.tasks.values(), timeout=grace_s)
        for task in self.job_tasks.values():
            task.cancel()
        for request_id in list(self._claimer.taken):  # taken, but arq has not started its job
            claim = self._claimer.taken.pop(request_id)
            with contextlib.suppress(RedisError, OSError):
                await queue.return_to_queue(self.pool, claim, why="the worker ends", kind=self._kind)
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def main(self) -> None:
        while not self._stopping.is_set():
            room = self._claimer.breakers.room(self.max_jobs - len(self.tasks))
            if room <= 0:
                await self._wait_for_room()
            elif not await self._take(room):
                await self._wait_for_work()

    async def _take(self, room: int) -> bool:
        """Takes up to `room` requests. Returns False if none was due."""
        try:
            found = await queue.take(self.pool, self._claimer.worker, min(room, TAKE_AT_ONCE), self._kind)
        except (RedisError, OSError) as error:
            self._claimer.breakers["redis"].open(str(error))
            return True
        for one in found:
            match one:
                case Unclaimable():
                    log.error(
                        "request %s is unreadable and was dead-lettered: %s", one.request_id, one.reason
                    )
                case Claim() if one.request.id in self.tasks:
                    await self._return_duplicate(one)
                case Claim():
                    self._start(one)
        return bool(found)

    async def _return_duplicate(self, claim: Claim[R]) -> None:
        """Returns a claim to the queue because an older attempt of the same request still runs in this process.

        The lease of that attempt expired unnoticed, so it ends at its next renewal.
        """
        log.warning("%s attempt %d: its older attempt still runs here", claim.request.id, claim.attempt)
        with contextlib.suppress(RedisError, OSError):
            await queue.return_to_queue(
                self.pool,
                claim,
                wait_s=queue.LEASE_S,
                why="its older attempt still ran here",
                kind=self._kind,
            )

    def _start(self, claim: Claim[R]) -> None:
        request_id = claim.request.id
        self._claimer.breakers.claimed(request_id)
        self._claimer.taken[request_id] = claim
        task = asyncio.create_task(self._run(claim), name=f"claim {request_id}")
        self.tasks[request_id] = task
        task.add_done_callback(lambda _: self._ended(request_id))

    def _ended(self, request_id: str) -> None:
        self.tasks.pop(request_id, None)
        self._claimer.taken.pop(request_id, None)
        self._claimer.breakers.ended(request_id)
        self._changed.set()

    async def _run(self, claim: Claim[R]) -> None:
        try:
            await self.run_job(claim.request.id, 0)
        except (RedisError, OSError) as error:
            # The job did not begin, so its lease expires and another worker takes it.
            self._claimer.breakers["redis"].open(str(error))

    async def _wait_for_room(self) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_S):
                await self._changed.wait()

    async def _wait_for_work(self) -> None:
        """Returns when there may be work, or when `stop` was called."""
        sleep_s = random.uniform(0.5, 1.0) * IDLE_S
        work = asyncio.create_task(
            queue.wait_for_work(self.pool, sleep_s, self._kind), name="wait for requests"
        )
        stop = asyncio.create_task(self._stopping.wait(), name="wait for a stop")
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        stop.cancel()
        await asyncio.wait({work, stop})
        error = None if work.cancelled() else work.exception()
        if isinstance(error, RedisError | OSError):
            self._claimer.breakers["redis"].open(str(error) or type(error).__name__)
        elif error is not None:
            raise error

    async def finish_job(self, *_: object, **__: object) -> None:
        """Does nothing: the claim has settled the request, and arq would do so without a fence."""

    async def finish_failed_job(self, job_id: str, result_data: bytes | None) -> None:
        """Handles a job that arq could not read: writes it again and returns the request to the queue without counting a failure."""
        claim = self._claimer.taken.pop(job_id, None)
        if claim is not None:
            await queue.rewrite_job(self.pool, claim.request, self._kind)
            await queue.return_to_queue(
                self.pool,
                claim,
                wait_s=1.0,
                why="arq's job was unreadable and was written again",
                kind=self._kind,
            )


class Claims(Protocol):
    """The claims of a process, for the thread that exports metrics."""

    @property
    def running(self) -> Mapping[str, EpisodeStatus]: ...

    @property
    def finished(self) -> int: ...

    @property
    def failed(self) -> int: ...


class Pauses(Protocol):
    """The reasons why nothing is claimed, or why a resource is not used; empty without a reason."""

    @property
    def paused(self) -> str: ...

    @property
    def set_aside(self) -> str: ...


def observe_worker(claims: Claims, pauses: Pauses, *, slots: int) -> None:
    """Measure this process whenever its metrics are exported."""

    def active(options: CallbackOptions) -> Iterable[Observation]:
        counts = Counter(status.phase for status in tuple(claims.running.values()))
        for phase in sorted({*PHASES, *counts}):
            yield Observation(counts[phase], {"swerve.phase": phase})

    def ended(options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(claims.finished, {"swerve.result": "published"})
        yield Observation(claims.failed, {"swerve.result": "failed"})

    metrics = meter()
    metrics.create_observable_up_down_counter(
        "swerve.worker.slots",
        [lambda options: [Observation(slots)]],
        unit="{slot}",
        description="Claims that the process may have at once",
    )
    metrics.create_observable_up_down_counter(
        "swerve.worker.claims.active", [active], unit="{claim}", description="Claims under way, by phase"
    )
    metrics.create_observable_counter(
        "swerve.worker.claims.ended",
        [ended],
        unit="{claim}",
        description="Claims that ended: published a result, or failed for an infrastructure reason",
    )
    metrics.create_observable_gauge(
        "swerve.worker.paused",
        [lambda options: [Observation(int(bool(pauses.paused)))]],
        description="1 while the process claims nothing, because something that it needs is out",
    )
    metrics.create_observable_gauge(
        "swerve.worker.reduced",
        [lambda options: [Observation(int(bool(pauses.set_aside)))]],
        description="1 while the process does without one of its Docker hosts",
    )


# The longest wait at the start for Redis, which may be starting together with the worker. After that the worker ends, and what started
# it (systemd, compose) starts it again, because its status is not that of a wrong setting.
REDIS_PATIENCE_S = 30.0


class CannotStart(Exception):
    """A setting is wrong. The message is one line with the fix."""


class HostsNotAnswering(CannotStart, NotAnswering):
    """A host that the worker needs does not answer, or not yet."""


async def work(claimer: Claimer[R, T, H], *, slots: int, drain_s: float) -> None:
    """Takes and runs requests until a signal; then takes no more, and gives running ones the grace time."""
    observe_worker(claimer, claimer.breakers, slots=slots)
    taker = Taker(claimer, slots=slots)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, taker.stop)
    await taker.async_run()
    await taker.drain(drain_s)


async def beat(
    redis: ArqRedis,
    claimer: Claimer[R, T, H],
    *,
    slots: int,
    hosts: Callable[[], tuple[census.HostStatus, ...]] = tuple,
) -> None:
    """Sends heartbeats until cancelled. `hosts` are the machines on which a worker that plays rollouts opens sandboxes."""
    started_at, every_s = time.time(), census.BEAT_S
    while True:
        status = census.WorkerStatus(
            name=claimer.worker,
            slots=slots,
            running=tuple(claimer.running),
            finished=claimer.finished,
            failed=claimer.failed,
            started_at=started_at,
            updated_at=time.time(),
            paused=claimer.breakers.paused,
            set_aside=claimer.breakers.set_aside,
            kind=claimer.kind.name,
            hosts=hosts(),
        )
        with contextlib.suppress(RedisError, OSError):
            every_s = await census.beat_worker(redis, status, every_s=every_s)
        await asyncio.sleep(every_s)


@contextlib.asynccontextmanager
async def background(*loops: Coroutine[None, None, None]) -> AsyncGenerator[None]:
    """Runs endless loops during the block; cancels and awaits them at its end.

    A loop that fails ends the block too, because a worker without heartbeat or breakers is worse than one that is restarted.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop, name=loop.__qualname__) for loop in loops]
        yield
        for task in tasks:
            task.cancel()


def run_process(name: str, serve: Callable[[], Coroutine[None, None, None]]) -> int:
    """Serves until a signal, with logs, spans and metrics of the process `name`; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("arq").setLevel(logging.WARNING)
    logging.getLogger().addHandler(TailHandler())
    print_tasks_on_sigquit()
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(start_telemetry(name, telemetry_settings()).shutdown)
        try:
            cleanup.enter_context(exported_metrics(name, metrics_settings()))
        except ValueError as error:
            print(error, file=sys.stderr)
            return MISUSE
        try:
            asyncio.run(serve())
        except (RedisUnavailable, CannotStart) as error:
            print(error, file=sys.stderr)
            return status_of(error)
    return 0
