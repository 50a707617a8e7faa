"""Whatever happens to a claim, its request ends where it belongs: answered, handed back or dead, and never twice."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from infra.redis_server import DURABLE, start_in, url_in
from pipeline import census, connection, deadletters, events, keys, queue, stream
from pipeline.errors import EngineError
from pipeline.request import Budget, Claim, Limits, Retries
from pipeline.trajectory import Failed, Trajectory
from tests.pipeline import samples
from workers import breaker, claim, taker
from workers.breaker import Breakers
from workers.claim import Claimer, Stage, TailHandler
from workers.run import work
from workers.settings import WorkerSettings
from workers.status import EpisodeStatus
from workers.taker import Taker

QUICK = Budget(tries=2, first_s=0.01)
RETRIES = Retries(infrastructure=Budget(tries=3, first_s=0.01), grader=QUICK, unended_claims=2)
LIMITS = Limits(retries=RETRIES)


PATIENCE_S = 60.0


async def solve(claim: Claim, status: EpisodeStatus) -> Trajectory:
    return samples.trajectory(claim)


def failing(boundary: str, *, transient: bool = True) -> Stage:
    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        failed = msgspec.convert(
            {"type": "failed", "boundary": boundary, "message": "broke", "transient": transient}, Failed
        )
        return samples.trajectory(claim, turns=(), outcome=failed, reward=None)

    return stage


async def for_ever(claim: Claim, status: EpisodeStatus) -> Trajectory:
    status.phase = "agent"
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "RENEW_S", 0.2)
    monkeypatch.setattr(claim, "OUTAGE_WAIT_S", 0.02)
    monkeypatch.setattr(taker, "IDLE_S", 0.1)
    monkeypatch.setattr(taker, "PAUSE_S", 0.02)
    for name in ("WATCH_S", "FIRST_WAIT_S", "LONGEST_WAIT_S", "TRIAL_S"):
        monkeypatch.setattr(breaker, name, 0.05)
    monkeypatch.setattr(breaker, "HOLDERS_FIRST_S", 1.0)


@pytest.fixture
async def pool(redis: Redis, redis_url: str) -> AsyncIterator[ArqRedis]:
    pool = await connection.connect(redis_url)
    yield pool
    await pool.aclose()


@asynccontextmanager
async def worker(
    pool: ArqRedis,
    stage: Stage,
    *,
    slots: int = 2,
    name: str = "host/1",
    probe: Callable[[], Awaitable[object]] | None = None,
) -> AsyncIterator[Claimer]:
    """A worker process without the process."""
    probes = {"redis": lambda: connection.check(pool)} | ({"docker": probe, "engine": probe} if probe else {})
    claimer = Claimer(redis=pool, worker=name, stage=stage, breakers=Breakers(probes))
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
    return [event.what for event in await events.events(pool, request_id)]


async def test_what_is_queued_is_played_and_published(pool: ArqRedis) -> None:
    ids = [await enqueued(pool) for _ in range(5)]
    async with worker(pool, solve) as claimer:

        async def all_published() -> bool:
            return all([await published(pool, request_id) for request_id in ids])

        await until(all_published)
    assert claimer.finished == 5
    assert await pool.zcard(keys.QUEUE) == 0
    left = [key for key in await pool.keys("arq:*") if key != b"arq:queue:health-check"]
    assert left == []


async def test_a_transient_failure_is_tried_again_until_its_budget_is_spent(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    async with worker(pool, failing("sandbox")) as claimer:
        await until(lambda: published(pool, request_id))
    letter = (await deadletters.listed(pool, samples.RUN))[request_id]
    assert (letter.kind, [failure.attempt for failure in letter.failures]) == ("infrastructure", [1, 2, 3])
    assert claimer.failed == 3
    assert await life(pool, request_id) == [
        "enqueued",
        *["claimed", "failed"] * 2,
        "claimed",
        "dead-lettered",
    ]


@pytest.mark.parametrize(
    ("boundary", "transient", "kind", "tries"),
    [
        ("sandbox", False, "environment", 1),
        ("engine", False, "policy", 1),
        ("request", False, "poison", 1),
        ("grader", True, "grader", 2),
        ("worker", True, "infrastructure", 3),
    ],
)
async def test_each_class_of_failures_has_its_budget(
    pool: ArqRedis, boundary: str, transient: bool, kind: str, tries: int
) -> None:
    request_id = await enqueued(pool)
    async with worker(pool, failing(boundary, transient=transient)):
        await until(lambda: published(pool, request_id))
    letter = (await deadletters.listed(pool, samples.RUN))[request_id]
    assert (letter.kind, len(letter.failures)) == (kind, tries)


async def test_a_back_off_is_waited_out_in_the_queue_not_in_a_slot(pool: ArqRedis) -> None:
    slow = Limits(retries=Retries(infrastructure=Budget(tries=3, first_s=60.0)))
    failed, fine = await enqueued(pool, limits=slow), await enqueued(pool)
    stages = {failed: failing("sandbox"), fine: solve}

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        return await stages[claim.request.id](claim, status)

    async with worker(pool, stage, slots=1):
        await until(lambda: published(pool, fine))
    (waiting,) = await census.open_requests(pool, samples.RUN)
    assert (waiting.request_id, isinstance(waiting, census.Queued)) == (failed, True)


async def test_a_bug_of_ours_is_evidence_with_what_was_logged(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    log = logging.getLogger("swerve.worker")
    handler = TailHandler()
    logging.getLogger().addHandler(handler)

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        log.warning("about to divide")
        raise ZeroDivisionError(str(1))

    async with worker(pool, stage):
        await until(lambda: published(pool, request_id))
    logging.getLogger().removeHandler(handler)
    failure = (await deadletters.listed(pool, samples.RUN))[request_id].failures[0]
    assert failure.message == "ZeroDivisionError: 1"
    assert "about to divide" in failure.detail
    assert "Traceback" in failure.detail
    assert failure.worker == "host/1"


async def test_a_request_that_kills_its_workers_is_poison(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    for number in range(2):
        assert isinstance(await queue.claim(pool, request_id, f"dead/{number}"), Claim)
        await pool.delete(keys.lease(request_id))
        await pool.zadd(keys.QUEUE, {request_id: 0})

    async with worker(pool, for_ever):
        await until(lambda: published(pool, request_id))
    letter = (await deadletters.listed(pool, samples.RUN))[request_id]
    assert letter.kind == "poison"
    assert "2 workers fell silent" in letter.failures[-1].message


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


async def test_a_worker_that_ends_hands_back_at_once(pool: ArqRedis) -> None:
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


async def test_sigterm_gives_what_runs_a_grace_time_and_hands_the_rest_back(pool: ArqRedis) -> None:
    short, long = await enqueued(pool), await enqueued(pool)
    signalled = asyncio.Event()

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        await signalled.wait()
        return await (solve if claim.request.id == short else for_ever)(claim, status)

    claimer = Claimer(redis=pool, worker="host/1", stage=stage, breakers=Breakers({}))
    settings = WorkerSettings(
        name="host/1", slots=2, router_url="", max_starting=1, reap_every_s=1.0, drain_s=0.5
    )
    working = asyncio.create_task(work(claimer, settings))

    async def both_run() -> bool:
        return len(claimer.running) == 2

    await until(both_run)
    late = await enqueued(pool)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)
    signalled.set()
    await working
    assert await published(pool, short)
    assert not await published(pool, long)
    taken = await queue.take(pool, "host/2", 3)
    assert {one.request.id for one in taken if isinstance(one, Claim)} == {long, late}
    assert await deadletters.failures(pool, long) == ()


async def test_a_worker_that_slept_through_its_lease_does_not_run_the_request_twice(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    async with worker(pool, for_ever, slots=2) as claimer:

        async def was_handed_back() -> bool:
            return "returned" in await life(pool, request_id)

        await until(lambda: queue.current_lease(pool, request_id))
        await pool.delete(keys.lease(request_id))
        await pool.zadd(keys.QUEUE, {request_id: time.time() * 1000})
        await pool.lpush(keys.wake(), "1")
        await until(was_handed_back)

        async def is_idle() -> bool:
            return not claimer.running

        await until(is_idle)
    assert (await life(pool, request_id))[:4] == ["enqueued", "claimed", "claimed", "returned"]


async def test_what_was_taken_and_not_begun_is_handed_back_too(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    (taken,) = await queue.take(pool, "host/1", 1)
    assert isinstance(taken, Claim)
    claimer = Claimer(redis=pool, worker="host/1", stage=solve, breakers=Breakers({}))
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


async def test_an_overtaken_worker_publishes_nothing(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    go_on = asyncio.Event()

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        await go_on.wait()
        return samples.trajectory(claim)

    async with worker(pool, stage):
        await until(lambda: queue.current_lease(pool, request_id))
        await pool.delete(keys.lease(request_id))
        successor = await queue.claim(pool, request_id, "host/2")
        assert isinstance(successor, Claim)
        go_on.set()
    assert not await published(pool, request_id)
    assert await stream.publish(pool, samples.trajectory(successor)) == "published"


@pytest.mark.parametrize(
    "job",
    [
        b"\xc1 rubbish",
        msgspec.msgpack.encode({"t": None, "f": "rollout", "a": [], "k": {}, "et": 10**18}),
        msgspec.msgpack.encode({"t": None, "f": "fly", "a": ["x"], "k": {"colour": "blue"}, "et": 0}),
        msgspec.msgpack.encode({"t": 10**9, "f": "rollout", "a": ["x"], "k": {}, "et": 0}),
        None,
    ],
)
async def test_a_job_that_arq_cannot_read_is_written_anew(pool: ArqRedis, job: bytes | None) -> None:
    request_id = await enqueued(pool)
    await (pool.set(keys.arq_job(request_id), job) if job else pool.delete(keys.arq_job(request_id)))
    async with worker(pool, solve):
        await until(lambda: published(pool, request_id))


async def test_three_workers_of_very_different_sizes_all_stay_busy(pool: ArqRedis) -> None:
    sizes = {"small": 1, "middle": 8, "large": 60}
    for _ in range(80):
        await enqueued(pool)
    async with (
        worker(pool, for_ever, name="large", slots=60) as large,
        worker(pool, for_ever, name="middle", slots=8) as middle,
        worker(pool, for_ever, name="small", slots=1) as small,
    ):

        async def all_full() -> bool:
            return [len(one.running) for one in (small, middle, large)] == list(sizes.values())

        await until(all_full)


async def test_a_short_queue_is_shared(pool: ArqRedis) -> None:
    for _ in range(5):
        await enqueued(pool)
    assert len(await queue.take(pool, "large", taker.TAKE_AT_ONCE)) == taker.TAKE_AT_ONCE
    async with worker(pool, for_ever, slots=1) as small:

        async def is_running() -> bool:
            return bool(small.running)

        await until(is_running)


def ready_when(told: asyncio.Event) -> Stage:
    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        await told.wait()
        return samples.trajectory(claim)

    return stage


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
