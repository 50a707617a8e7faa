"""A worker without a process, stages for it, and what tests ask about its requests."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from arq.connections import ArqRedis

from pipeline import connection, keys, queue, request_store
from pipeline.kinds import ROLLOUT, H, JobKind, T
from pipeline.request import Budget, Claim, EpisodeStatus, Limits, R, Retries
from pipeline.trajectory import Failed, Trajectory
from tests.pipeline import samples
from workers.breaker import Breakers
from workers.claim import Claimer, Obstacle, Stage, no_obstacle
from workers.process import Taker

QUICK = Budget(tries=2, first_s=0.01)
RETRIES = Retries(infrastructure=Budget(tries=3, first_s=0.01), grader=QUICK, unended_claims=2)
LIMITS = Limits(retries=RETRIES)
PATIENCE_S = 240.0


async def solve(claim: Claim, status: EpisodeStatus) -> Trajectory:
    return samples.trajectory(claim)


def failing(boundary: str, *, transient: bool = True, is_own: bool = False) -> Stage:
    described = {"type": "failed", "boundary": boundary, "message": "broke", "transient": transient}

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        failed = msgspec.convert(described | {"is_own": is_own}, Failed)
        return samples.trajectory(claim, turns=(), outcome=failed, reward=None)

    return stage


async def for_ever(claim: Claim, status: EpisodeStatus) -> Trajectory:
    status.phase = "agent"
    await asyncio.Event().wait()
    raise AssertionError


def ready_when(told: asyncio.Event) -> Stage:
    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        await told.wait()
        return samples.trajectory(claim)

    return stage


@asynccontextmanager
async def worker(
    pool: ArqRedis,
    stage: Stage[R, T],
    *,
    slots: int = 2,
    name: str = "host/1",
    probe: Callable[[], Awaitable[object]] | None = None,
    kind: JobKind[R, T, H] = ROLLOUT,
    obstacle: Obstacle[R] = no_obstacle,
) -> AsyncIterator[Claimer[R, T, H]]:
    """A worker process without the process."""
    probes = {"redis": lambda: connection.check(pool)} | ({"docker": probe, "engine": probe} if probe else {})
    claimer = Claimer(
        kind=kind, redis=pool, worker=name, stage=stage, breakers=Breakers(probes), obstacle=obstacle
    )
    one = Taker(claimer, slots=slots)
    working = asyncio.create_task(one.async_run())
    watching = asyncio.create_task(claimer.breakers.watch())
    try:
        yield claimer
    finally:
        one.stop()
        await working
        await one.drain(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def enqueued(pool: ArqRedis, **fields: object) -> str:
    request = samples.request(**({"limits": LIMITS} | fields))
    await queue.enqueue(pool, request)
    return request.id


async def until(holds: Callable[[], Awaitable[object]]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not await holds():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE_S:.0f} s in vain")
        await asyncio.sleep(0.01)


async def published(pool: ArqRedis, request_id: str) -> bool:
    return bool(await pool.exists(keys.published(request_id)))


async def life(pool: ArqRedis, request_id: str) -> list[str]:
    return [event.what for event in await request_store.events(pool, request_id)]
