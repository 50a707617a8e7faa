"""An outage of Docker, an engine or Redis costs a request no try, and ends by itself."""

import asyncio
from pathlib import Path

from arq.connections import ArqRedis

from infra.redis_server import DURABLE, start_in, url_in
from pipeline import census, connection, deadletters, keys, queue, stream
from pipeline.errors import EngineError
from pipeline.request import Claim, Endpoint, EpisodeStatus
from pipeline.trajectory import Trajectory
from tests.pipeline import samples
from tests.workers.claiming.worker import (
    enqueued,
    failing,
    published,
    ready_when,
    solve,
    until,
    worker,
)


async def test_an_outage_costs_a_request_nothing_and_ends_by_itself(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    is_out = True

    async def probe() -> None:
        if is_out:
            raise EngineError("connection refused")

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        return await (failing("engine") if is_out else solve)(claim, status)

    async with worker(pool, stage, probe=probe) as claimer:

        async def is_paused() -> bool:
            return "engine is out: connection refused" in claimer.breakers.paused

        await until(is_paused)
        is_out = False
        await until(lambda: published(pool, request_id))
    assert await deadletters.failures(pool, request_id) == ()
    assert await deadletters.listed(pool, samples.RUN) == {}


async def test_a_server_that_requests_name_themselves_opens_no_breaker_and_costs_tries(
    pool: ArqRedis,
) -> None:
    """As many in a row as would hold back what the fleet's own engines could play."""
    endpoint = Endpoint(api_base="http://127.0.0.1:1/v1", model="m")
    asked = [await enqueued(pool, id=f"{samples.RUN}.{number}", endpoint=endpoint) for number in range(4)]

    async def probe() -> None:
        """The engines are well."""

    async with worker(pool, failing("engine"), probe=probe) as claimer:
        for request_id in asked:
            await until(lambda id=request_id: published(pool, id))
            assert len(await deadletters.failures(pool, request_id)) == 3
        assert claimer.breakers.paused == ""


async def test_a_failure_that_a_patch_may_have_caused_costs_a_try_however_many_requests_have_it(
    pool: ArqRedis,
) -> None:
    asked = [await enqueued(pool, id=f"{samples.RUN}.{number}") for number in range(4)]

    async def probe() -> None:
        """Docker is well."""

    async with worker(pool, failing("grader", is_own=True), probe=probe) as claimer:
        for request_id in asked:
            await until(lambda id=request_id: published(pool, id))
            assert len(await deadletters.failures(pool, request_id)) == 2
        assert claimer.breakers.paused == ""


async def test_a_full_redis_delays_a_publication_and_holds_claims_back(pool: ArqRedis) -> None:
    request_id, ready = await enqueued(pool), asyncio.Event()
    async with worker(pool, ready_when(ready)) as claimer:

        async def is_publishing() -> bool:
            return any(status.phase == "publishing" for status in claimer.running.values())

        async def is_paused() -> bool:
            return "redis is out" in claimer.breakers.paused

        await until(lambda: queue.current_lease(pool, request_id))
        try:
            await pool.config_set("maxmemory", 1)
            ready.set()
            await until(is_publishing)
            await until(is_paused)
            await pool.pexpire(keys.lease(request_id), 1)
            await until(lambda: queue.current_lease(pool, request_id))
            status = census.WorkerStatus(
                name="host/1", slots=1, running=(), finished=0, failed=0, started_at=0.0, updated_at=1.0
            )
            await census.beat_worker(pool, status)
            assert not await published(pool, request_id)
        finally:
            await pool.config_set("maxmemory", 0)
        await until(lambda: published(pool, request_id))
    assert await deadletters.failures(pool, request_id) == ()


async def test_an_episode_survives_a_redis_that_takes_no_writes_for_a_while(pool: ArqRedis) -> None:
    request_id, ready = await enqueued(pool), asyncio.Event()
    async with worker(pool, ready_when(ready)) as claimer:

        async def is_paused() -> bool:
            return "redis is out" in claimer.breakers.paused

        await until(lambda: queue.current_lease(pool, request_id))
        try:
            await pool.config_set("min-replicas-to-write", 1)
            ready.set()
            await until(is_paused)
        finally:
            await pool.config_set("min-replicas-to-write", 0)
        await until(lambda: published(pool, request_id))
    assert await deadletters.failures(pool, request_id) == ()


async def test_episodes_survive_a_redis_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    server = start_in(tmp_path, DURABLE)
    pool = await connection.connect(url_in(tmp_path))
    request_id = await enqueued(pool)
    back = asyncio.Event()

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        await back.wait()
        return samples.trajectory(claim)

    async with worker(pool, stage) as claimer:
        await until(lambda: queue.current_lease(pool, request_id))
        server.process.kill()
        server.process.wait()

        async def is_paused() -> bool:
            return "redis is out" in claimer.breakers.paused

        await until(is_paused)
        back.set()
        server = start_in(tmp_path, DURABLE)
        await until(lambda: published(pool, request_id))
        other = await enqueued(pool)
        await until(lambda: published(pool, other))
    # An outage longer than a lease may cost the first one an attempt, but never an answer, and never a second one.
    answered = [one.head.request_id for one in await stream.newest_heads(pool, samples.RUN, 9)]
    assert sorted(answered) == sorted([request_id, other])
    await pool.aclose()
    server.stop(grace_s=5)
