"""A worker holds a request only while it renews the lease, and returns at its end what it has not finished."""

import asyncio
import os
import signal
import time
from typing import Any

import pytest
from arq.connections import ArqRedis

from pipeline import deadletters, keys, queue, stream
from pipeline.kinds import ROLLOUT
from pipeline.request import Claim, EpisodeStatus
from pipeline.trajectory import Trajectory
from tests.pipeline import samples
from tests.workers.claiming.worker import (
    enqueued,
    for_ever,
    life,
    published,
    solve,
    until,
    worker,
)
from workers.breaker import Breakers
from workers.claim import Claimer
from workers.process import Taker, work

GRACE_S = 240.0


@pytest.fixture
def awake(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """No lease is renewed before this is set."""
    awake, renew = asyncio.Event(), queue.renew

    async def when_awake(*arguments: Any) -> bool:
        await awake.wait()
        return await renew(*arguments)

    monkeypatch.setattr(queue, "renew", when_awake)
    return awake


async def test_a_worker_that_ends_returns_its_requests_at_once(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    async with worker(pool, for_ever, name="old") as claimer:

        async def is_running() -> bool:
            return bool(claimer.running)

        await until(is_running)
    assert await queue.current_lease(pool, request_id) is None
    async with worker(pool, solve, name="new"):
        await until(lambda: published(pool, request_id))
    (head,) = await stream.newest_heads(pool, samples.RUN, 1)
    assert (head.head.worker, head.head.attempt) == ("new", 2)
    assert await deadletters.failures(pool, request_id) == ()


@pytest.mark.slow
async def test_sigterm_gives_what_runs_a_grace_time_and_returns_the_rest(
    pool: ArqRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the request that ends in the grace time is settled, the clock of the loop is put forward to the end of that time."""
    short, long = await enqueued(pool), await enqueued(pool)
    draining, drain = asyncio.Event(), Taker.drain

    async def told_drain(taker: Taker[Any, Any, Any], grace_s: float) -> None:
        draining.set()
        await drain(taker, grace_s)

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        await draining.wait()
        return await (solve if claim.request.id == short else for_ever)(claim, status)

    monkeypatch.setattr(Taker, "drain", told_drain)
    claimer = Claimer(kind=ROLLOUT, redis=pool, worker="host/1", stage=stage, breakers=Breakers({}))
    working = asyncio.create_task(work(claimer, slots=2, drain_s=GRACE_S))

    async def both_run() -> bool:
        return len(claimer.running) == 2

    await until(both_run)
    late = await enqueued(pool)
    os.kill(os.getpid(), signal.SIGTERM)
    await draining.wait()

    async def only_long_runs() -> bool:
        return [*claimer.running] == [long]

    await until(only_long_runs)
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + GRACE_S)
    await working
    assert await published(pool, short)
    assert not await published(pool, long)
    taken = await queue.take(pool, "host/2", 3)
    assert {one.request.id for one in taken if isinstance(one, Claim)} == {long, late}
    assert await deadletters.failures(pool, long) == ()


async def test_a_worker_that_slept_through_its_lease_does_not_run_the_request_twice(
    pool: ArqRedis, awake: asyncio.Event
) -> None:
    request_id = await enqueued(pool)
    async with worker(pool, for_ever, slots=2) as claimer:

        async def was_returned() -> bool:
            return "returned" in await life(pool, request_id)

        await until(lambda: queue.current_lease(pool, request_id))
        await pool.delete(keys.lease(request_id))
        await pool.zadd(keys.queue(), {request_id: time.time() * 1000})
        await pool.lpush(keys.wake(), "1")
        await until(was_returned)
        awake.set()

        async def is_idle() -> bool:
            return not claimer.running

        await until(is_idle)
    assert (await life(pool, request_id))[:4] == ["enqueued", "claimed", "claimed", "returned"]


async def test_what_was_taken_and_not_begun_is_returned_too(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    (taken,) = await queue.take(pool, "host/1", 1)
    assert isinstance(taken, Claim)
    claimer = Claimer(kind=ROLLOUT, redis=pool, worker="host/1", stage=solve, breakers=Breakers({}))
    claimer.taken[request_id] = taken
    await Taker(claimer, slots=1).drain(0)
    assert await queue.current_lease(pool, request_id) is None


async def test_a_withdrawn_request_stops_its_stage(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    ended = asyncio.Event()

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        try:
            return await for_ever(claim, status)
        finally:
            ended.set()

    async with worker(pool, stage) as claimer:

        async def is_running() -> bool:
            return bool(claimer.running)

        await until(is_running)
        await queue.withdraw(pool, samples.RUN, [request_id])
        await ended.wait()
        assert not await published(pool, request_id)


async def test_an_overtaken_worker_publishes_nothing(pool: ArqRedis, awake: asyncio.Event) -> None:
    request_id = await enqueued(pool)
    go_on = asyncio.Event()

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        await go_on.wait()
        return samples.trajectory(claim)

    async with worker(pool, stage) as claimer:

        async def has_ended() -> bool:
            return not claimer.running

        await until(lambda: queue.current_lease(pool, request_id))
        await pool.delete(keys.lease(request_id))
        successor = await queue.claim(pool, request_id, "host/2")
        assert isinstance(successor, Claim)
        go_on.set()
        await until(has_ended)
    assert not await published(pool, request_id)
    assert await stream.publish(pool, samples.trajectory(successor)) == "published"
