"""`python -m workers.run`: one worker process. Builds its tools, takes requests from the queue, sends heartbeats.

Workers are interchangeable: each needs Redis, the router and a Docker host, and no recipe. After SIGTERM, running episodes get a grace
time; then unfinished episodes return to the queue, where the next worker takes them at once.

Exit status: 0 after SIGTERM or SIGINT; 2 if a setting is wrong, or if Redis or every Docker host is absent at the start. What goes away
later is an outage: the worker waits and says so in its heartbeat.
"""

import argparse
import asyncio
import contextlib
import functools
import logging
import signal
import sys
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Protocol

from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import census, connection
from pipeline.connection import RedisUnavailable
from pipeline.errors import SandboxError
from pipeline.kinds import ROLLOUT, H, T
from pipeline.request import Claim, R
from pipeline.settings import redis_settings, telemetry_settings
from pipeline.telemetry import start_telemetry
from pipeline.trajectory import Trajectory
from workers.breaker import Breakers
from workers.claim import Claimer, TailHandler
from workers.policy.requested import RequestedPolicies
from workers.rollout import Policies, run_rollout
from workers.sandbox.backend import WorkerHosts, worker_hosts
from workers.sandbox.free_space import check_temporary
from workers.settings import SandboxSettings, WorkerSettings, sandbox_settings, worker_settings
from workers.status import EpisodeStatus
from workers.taker import Taker

log = logging.getLogger("swerve.worker")

# How long to wait at the start for a Docker host and for Redis, which may be starting together with the worker. After that the worker ends,
# and what started it (systemd, compose) starts it again.
DOCKER_PATIENCE_S = 5.0
REDIS_PATIENCE_S = 30.0


class LivePolicies(Policies, Protocol):
    """Policies whose engines can be asked whether they are there."""

    async def check(self) -> None:
        """Raises EngineError."""
        ...


class CannotStart(Exception):
    """What the worker needs is absent, or a setting is wrong. The text is one line with the fix."""


async def serve(settings: WorkerSettings, sandboxes: SandboxSettings) -> None:
    """Work until told to stop. Raises CannotStart, RedisUnavailable."""
    from workers.policy.endpoint import EndpointPolicies
    from workers.policy.sglang import SglangPolicies, announced_tokenizers

    async with contextlib.AsyncExitStack() as cleanup:
        redis = await connection.connect(redis_settings().url, patience_s=REDIS_PATIENCE_S)
        cleanup.push_async_callback(redis.aclose)
        fleet = await _fleet(redis)
        hosts = worker_hosts(redis, fleet=fleet, worker=settings, settings=sandboxes)
        cleanup.push_async_callback(hosts.close)
        try:
            await hosts.start(patience_s=DOCKER_PATIENCE_S)
        except SandboxError as error:
            raise CannotStart(str(error)) from error
        engines = await cleanup.enter_async_context(
            SglangPolicies(settings.router_url, announced_tokenizers(redis))
        )
        endpoints = await cleanup.enter_async_context(EndpointPolicies())
        policies = RequestedPolicies(engines, endpoints)
        claimer = _claimer(redis, settings, sandboxes, hosts, policies)
        async with _background(_beat(redis, claimer, settings), claimer.breakers.watch(), hosts.maintain()):
            await work(claimer, settings)
        with contextlib.suppress(RedisError):
            await census.forget_worker(redis, settings.name)


async def _fleet(redis: ArqRedis) -> str:
    url = redis_settings().url
    try:
        return await census.fleet_id(redis)
    except (RedisError, OSError) as error:
        raise connection.unavailable(url, error) from error


def _claimer(
    redis: ArqRedis,
    settings: WorkerSettings,
    sandboxes: SandboxSettings,
    hosts: WorkerHosts,
    policies: LivePolicies,
) -> Claimer:
    """Plays rollouts on `hosts`, guarded by a breaker for each thing that the worker depends on."""
    from workers.grading.grade import Grader
    from workers.grading.survey import Surveys

    surveys = Surveys()

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        async with hosts.using(claim, status) as opened:
            grader = Grader(opened, surveys=surveys)
            return await run_rollout(claim, status, policies=policies, sandboxes=opened, grader=grader)

    probes = {
        "redis": lambda: connection.check(redis),
        "engine": policies.check,
        "disk space": functools.partial(check_temporary, sandboxes.disk.min_free_bytes),
    }
    breakers = Breakers(probes, gates={"docker": hosts.gate})
    return Claimer(kind=ROLLOUT, redis=redis, worker=settings.name, stage=stage, breakers=breakers)


async def work(claimer: Claimer[R, T, H], settings: WorkerSettings) -> None:
    """Take and run requests until a signal; then take no more, and give running episodes the grace time."""
    taker = Taker(claimer, slots=settings.slots)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, taker.stop)
    await taker.async_run()
    await taker.drain(settings.drain_s)


async def _beat(redis: ArqRedis, claimer: Claimer[R, T, H], settings: WorkerSettings) -> None:
    """Send heartbeats for ever."""
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


@contextlib.asynccontextmanager
async def _background(*loops: Coroutine[None, None, None]) -> AsyncGenerator[None]:
    """Run endless loops beside the block; cancel and await them at its end.

    A loop that fails ends the block too, because a worker without heartbeat or breakers is worse than one that is restarted.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop) for loop in loops]
        yield
        for task in tasks:
            task.cancel()


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m workers.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("arq").setLevel(logging.WARNING)
    logging.getLogger().addHandler(TailHandler())
    try:
        settings, sandboxes = worker_settings(), sandbox_settings()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    provider = start_telemetry("worker", telemetry_settings())
    try:
        asyncio.run(serve(settings, sandboxes))
    except (RedisUnavailable, CannotStart) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        provider.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
