"""`python -m workers.run`: one worker process. Builds the tools, starts the arq worker, tells the fleet that it lives.

Interchangeable: it needs Redis, the router and a Docker engine, and no recipe. SIGTERM gives running episodes a grace time, then hands
back what is unfinished; the next worker takes it at once.
"""

import argparse
import asyncio
import contextlib
import functools
import logging
import signal
import sys
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import TYPE_CHECKING

from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import census, connection, queue
from pipeline.connection import RedisUnavailable
from pipeline.errors import SandboxError
from pipeline.request import Claim
from pipeline.settings import redis_settings, telemetry_settings
from pipeline.telemetry import start_telemetry
from pipeline.trajectory import Trajectory
from workers.breaker import Breakers
from workers.claim import Claimer, Progress, TailHandler
from workers.docker.host import DockerHost
from workers.sandbox.disk import check_temporary
from workers.settings import (
    DiskSettings,
    ImageSettings,
    WorkerSettings,
    disk_settings,
    docker_hosts,
    image_settings,
    worker_settings,
)
from workers.taker import Taker
from workers.temporary import remove_stale

if TYPE_CHECKING:
    from workers.sandbox.docker import DockerSandboxes
    from workers.sandbox.pool import EnginePool

log = logging.getLogger("swerve.worker")


async def serve(
    settings: WorkerSettings, for_images: ImageSettings, hosts: Sequence[DockerHost], disk: DiskSettings
) -> None:
    """Work until told to stop."""
    from workers.grading.grade import Grader
    from workers.images.hosts import ImagesOfHosts
    from workers.policy.sglang import SglangPolicies
    from workers.rollout import run_rollout

    for path in remove_stale():
        log.warning("removed %s, left by a worker that was killed", path)
    redis = await connection.connect(redis_settings().url)
    pool, images = await _pool(redis, settings, hosts, disk), ImagesOfHosts(for_images)
    for engine in await pool.check():
        await images.open(engine.host)
    async with SglangPolicies(settings.router_url, redis) as policies:

        async def stage(claim: Claim, progress: Progress) -> Trajectory:
            engine = pool.of(claim.request.id)
            async with images.using(engine.host, claim, progress):
                return await run_rollout(
                    claim,
                    progress,
                    policies=policies,
                    sandboxes=engine.sandboxes,
                    grader=Grader(engine.sandboxes),
                )

        probes = {
            "redis": lambda: connection.check(redis),
            "engine": policies.check,
            "disk space": functools.partial(check_temporary, disk.min_free_bytes),
        }
        breakers = Breakers(probes, gates={"docker": pool})
        claimer = Claimer(redis=redis, worker=settings.name, stage=stage, breakers=breakers)
        beside = [_beat(redis, claimer, settings), breakers.watch()]
        for engine in pool.engines:
            beside += [_reap(redis, engine.sandboxes, settings), images.fetch_ahead(engine.host, redis)]
        async with _background(*beside):
            await work(claimer, settings)
    await images.close()
    await pool.close()
    with contextlib.suppress(RedisError):
        await census.forget_worker(redis, settings.name)
    await redis.aclose()


async def _pool(
    redis: ArqRedis, settings: WorkerSettings, hosts: Sequence[DockerHost], disk: DiskSettings
) -> "EnginePool":
    from workers.sandbox.docker import DockerSandboxes
    from workers.sandbox.pool import EnginePool

    fleet = await census.fleet_id(redis)
    engines = [
        DockerSandboxes(fleet=fleet, max_starting=settings.max_starting, host=host, disk=disk)
        for host in hosts
    ]
    return EnginePool(engines, slots=settings.slots)


async def work(claimer: Claimer, settings: WorkerSettings) -> None:
    """Take and answer until a signal; then take no more, and give what runs the grace time."""
    taker = Taker(claimer, slots=settings.slots)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, taker.stop)
    await taker.async_run()
    await taker.drain(settings.drain_s)


async def _beat(redis: ArqRedis, claimer: Claimer, settings: WorkerSettings) -> None:
    started_at, every_s = time.time(), census.BEAT_S
    while True:
        status = census.WorkerStatus(
            name=settings.name,
            slots=settings.slots,
            running=tuple(claimer.running),
            finished=claimer.finished,
            failed=claimer.failed,
            started_at=started_at,
            updated_at=time.time(),
            paused=claimer.breakers.paused,
            set_aside=claimer.breakers.set_aside,
        )
        with contextlib.suppress(RedisError, OSError):
            every_s = await census.beat_worker(redis, status, every_s=every_s)
        await asyncio.sleep(every_s)


async def _reap(redis: ArqRedis, sandboxes: "DockerSandboxes", settings: WorkerSettings) -> None:
    """Remove containers of this fleet whose claim breathes no more: a killed worker's, on this host."""
    from workers.sandbox.orphans import reap

    async def alive(request_id: str, attempt: int) -> bool:
        return await queue.is_leased(redis, request_id, attempt)

    while True:
        with contextlib.suppress(RedisError, OSError, SandboxError):
            for name in await reap(sandboxes, alive=alive):
                log.warning("removed orphan container %s", name)
        await asyncio.sleep(settings.reap_every_s)


@contextlib.asynccontextmanager
async def _background(*loops: Coroutine[None, None, None]) -> AsyncGenerator[None]:
    """Endless loops beside the body; cancelled and awaited when it ends. One that breaks ends the body too: a worker
    whose reaper or heartbeat has died in silence is worse than one that is started again.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop) for loop in loops]
        yield
        for task in tasks:
            task.cancel()


def main() -> int:
    """Exit status 0 after a stop in good order, 2 for settings that make no sense or a Redis that is not there."""
    argparse.ArgumentParser(prog="python -m workers.run", description=__doc__).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("arq").setLevel(logging.WARNING)
    logging.getLogger().addHandler(TailHandler())
    try:
        settings, images = worker_settings(), image_settings()
        hosts, disk = docker_hosts(), disk_settings()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    provider = start_telemetry("worker", telemetry_settings())
    try:
        asyncio.run(serve(settings, images, hosts, disk))
    except RedisUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        provider.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
