"""What every worker process does, whatever its kind of job: takes requests until a signal, drains, sends heartbeats and exports metrics."""

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine

from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import census
from pipeline.connection import RedisUnavailable
from pipeline.kinds import H, T
from pipeline.metrics import exported_metrics
from pipeline.request import R
from pipeline.settings import metrics_settings, telemetry_settings
from pipeline.telemetry import start_telemetry
from workers.claim import Claimer, TailHandler
from workers.metrics import observe_worker
from workers.taker import Taker

# How long to wait at the start for Redis, which may be starting together with the worker. After that the worker ends, and what started
# it (systemd, compose) starts it again.
REDIS_PATIENCE_S = 30.0


class CannotStart(Exception):
    """What the worker needs is absent, or a setting is wrong. The text is one line with the fix."""


async def work(claimer: Claimer[R, T, H], *, slots: int, drain_s: float) -> None:
    """Take and run requests until a signal; then take no more, and give those that run the grace time."""
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
    """Send heartbeats for ever. `hosts` are the machines on which a worker that plays rollouts opens sandboxes."""
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
    """Run endless loops beside the block; cancel and await them at its end.

    A loop that fails ends the block too, because a worker without heartbeat or breakers is worse than one that is restarted.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop) for loop in loops]
        yield
        for task in tasks:
            task.cancel()


def run_process(name: str, serve: Callable[[], Coroutine[None, None, None]]) -> int:
    """Serve until told to stop, with logs, spans and metrics of the process `name`; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("arq").setLevel(logging.WARNING)
    logging.getLogger().addHandler(TailHandler())
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(start_telemetry(name, telemetry_settings()).shutdown)
        try:
            cleanup.enter_context(exported_metrics(name, metrics_settings()))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        try:
            asyncio.run(serve())
        except (RedisUnavailable, CannotStart) as error:
            print(error, file=sys.stderr)
            return 2
    return 0
