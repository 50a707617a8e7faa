"""`python -m workers.run`: one worker process. Builds the tools, starts the arq worker, tells the fleet that it lives.

Interchangeable: it needs Redis, the router and a Docker engine, and no recipe. SIGTERM gives running episodes a grace time, then hands
back what is unfinished; the next worker takes it at once.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import TYPE_CHECKING

from arq.connections import ArqRedis
from arq.worker import Worker, func
from redis.exceptions import RedisError

from pipeline import census, keys, queue
from pipeline.errors import SandboxError
from pipeline.request import Claim
from pipeline.settings import redis_settings, telemetry_settings
from pipeline.telemetry import start_telemetry
from pipeline.trajectory import Trajectory
from workers.claim import Claimer, Progress
from workers.settings import WorkerSettings, worker_settings

if TYPE_CHECKING:
    from workers.sandbox.docker import DockerSandboxes

log = logging.getLogger("swerve.worker")

BEAT_S = 2.0
POLL_S = 0.1
QUEUE_READ = 10_000  # ids arq looks at per poll; running ones stay at the head of its queue and would starve small workers


async def serve(settings: WorkerSettings) -> None:
    """Work until told to stop."""
    from workers.grading.grade import Grader
    from workers.policy.sglang import SglangPolicies
    from workers.rollout import run_rollout
    from workers.sandbox.docker import DockerSandboxes

    redis = await queue.connect(redis_settings().url)
    sandboxes = DockerSandboxes(fleet=await census.fleet_id(redis), max_starting=settings.max_starting)
    await sandboxes.check()
    async with SglangPolicies(settings.router_url, redis) as policies:
        grader = Grader(sandboxes)

        async def stage(claim: Claim, progress: Progress) -> Trajectory:
            return await run_rollout(claim, progress, policies=policies, sandboxes=sandboxes, grader=grader)

        claimer = Claimer(redis=redis, worker=settings.name, stage=stage)
        async with _background(_beat(redis, claimer, settings), _reap(redis, sandboxes, settings)):
            await _work(redis, claimer, settings)
    await sandboxes.close()
    await census.forget_worker(redis, settings.name)
    await redis.aclose()


async def _work(redis: ArqRedis, claimer: Claimer, settings: WorkerSettings) -> None:
    """Run arq's worker until a signal; the first one stops claiming and starts the grace time."""
    worker = Worker(
        functions=[func(claimer.answer, name=queue.JOB_NAME)],
        queue_name=keys.QUEUE,
        redis_pool=redis,
        max_jobs=settings.slots,
        job_timeout=30 * 24 * 3600,  # the request's own limits end it
        max_tries=1_000_000,  # the request's own budget ends it
        keep_result=0,
        poll_delay=POLL_S,
        queue_read_limit=QUEUE_READ,
        handle_signals=False,
        job_serializer=queue.encode_job,
        job_deserializer=queue.decode_job,
        log_results=False,
    )
    worker.in_progress_timeout_s = queue.LEASE_S
    main = asyncio.create_task(worker.async_run())
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({main, stop}, return_when=asyncio.FIRST_COMPLETED)
    worker.allow_pick_jobs = False
    if worker.tasks and not main.done():
        log.info("draining %d episodes for up to %.0f s", len(worker.tasks), settings.drain_s)
        await asyncio.wait(worker.tasks.values(), timeout=settings.drain_s)
    for task in worker.job_tasks.values():
        task.cancel()
    await asyncio.gather(*worker.tasks.values(), return_exceptions=True)
    stop.cancel()
    if main.done():
        await main
    main.cancel()
    await asyncio.gather(main, return_exceptions=True)


async def _beat(redis: ArqRedis, claimer: Claimer, settings: WorkerSettings) -> None:
    started_at = time.time()
    while True:
        status = census.WorkerStatus(
            name=settings.name,
            slots=settings.slots,
            running=tuple(claimer.running),
            finished=claimer.finished,
            failed=claimer.failed,
            started_at=started_at,
            updated_at=time.time(),
        )
        with contextlib.suppress(RedisError):
            await census.beat_worker(redis, status)
        await asyncio.sleep(BEAT_S)


async def _reap(redis: ArqRedis, sandboxes: "DockerSandboxes", settings: WorkerSettings) -> None:
    """Remove containers of this fleet whose claim breathes no more: a killed worker's, on this host."""
    from workers.sandbox.reaper import reap

    async def alive(request_id: str, attempt: int) -> bool:
        return await queue.is_leased(redis, request_id, attempt)

    while True:
        with contextlib.suppress(RedisError, SandboxError):
            for name in await reap(sandboxes, alive=alive):
                log.warning("removed orphan container %s", name)
        await asyncio.sleep(settings.reap_every_s)


@contextlib.asynccontextmanager
async def _background(*loops: Coroutine[None, None, None]) -> AsyncGenerator[None]:
    """Endless loops beside the body; cancelled and awaited when it ends."""
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> int:
    """Exit status 0 after a stop in good order, 2 for settings that make no sense."""
    argparse.ArgumentParser(prog="python -m workers.run", description=__doc__).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("arq").setLevel(logging.WARNING)
    try:
        settings = worker_settings()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    provider = start_telemetry("worker", telemetry_settings())
    try:
        asyncio.run(serve(settings))
    finally:
        provider.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
