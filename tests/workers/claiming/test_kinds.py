"""A worker of a second kind of job is its JobKind and its stage; claiming, leases and dead letters are the same code."""

import asyncio

from arq.connections import ArqRedis

from pipeline import deadletters, keys, queue, request_store, stream
from pipeline.judge import Judgement, JudgeRequest
from pipeline.kinds import JUDGE
from pipeline.request import Claim, EpisodeStatus
from pipeline.trajectory import Trajectory
from tests.pipeline import samples
from tests.pipeline.judging import enqueued as judging_enqueued
from tests.pipeline.judging import judgement
from tests.workers.claiming.worker import enqueued, solve, until, worker

RUN = samples.RUN


async def judge(claim: Claim[JudgeRequest], status: EpisodeStatus) -> Judgement:
    status.phase = "judging"
    return judgement(claim, 0.5, -1.0)


async def broken(claim: Claim[JudgeRequest], status: EpisodeStatus) -> Judgement:
    raise ZeroDivisionError("no steps")


async def both_published(pool: ArqRedis, rollouts: list[str], judgings: list[str]) -> bool:
    marks = [keys.published(one) for one in rollouts] + [keys.published(one, JUDGE) for one in judgings]
    return await pool.exists(*marks) == len(marks)


async def test_two_workers_of_one_redis_play_each_its_own_kind(pool: ArqRedis) -> None:
    rollouts_seen: list[str] = []
    judgings_seen: list[str] = []

    async def play(claim: Claim, status: EpisodeStatus) -> Trajectory:
        rollouts_seen.append(claim.request.task.id)
        return await solve(claim, status)

    async def watched(claim: Claim[JudgeRequest], status: EpisodeStatus) -> Judgement:
        judgings_seen.append(claim.request.rollout_id)
        return await judge(claim, status)

    await stream.open_reader(pool, RUN)
    await stream.open_reader(pool, RUN, JUDGE)
    rollouts = [await enqueued(pool) for _ in range(3)]
    judgings = [(await judging_enqueued(pool, f"judge-{n}")).id for n in range(3)]
    async with worker(pool, play) as player, worker(pool, watched, name="host/2", kind=JUDGE) as judging:
        await until(lambda: both_published(pool, rollouts, judgings))
    assert (player.finished, judging.finished) == (3, 3)
    assert (player.failed, judging.failed) == (0, 0)
    assert (len(rollouts_seen), judgings_seen) == (3, ["laptop-0001"] * 3)
    trajectories = await stream.read_new(pool, RUN, block_ms=None)
    judgements = await stream.read_new(pool, RUN, block_ms=None, kind=JUDGE)
    assert sorted(one.head.request_id for one in trajectories) == sorted(rollouts)
    assert {(one.head.request_id, one.head.num_steps) for one in judgements} == {(one, 2) for one in judgings}
    assert [key for key in await pool.keys("arq:*") if b"health-check" not in key] == []


async def test_a_worker_of_another_kind_leaves_requests_alone(pool: ArqRedis) -> None:
    rollout = await enqueued(pool)
    judging = await judging_enqueued(pool)
    async with worker(pool, judge, kind=JUDGE):
        await until(lambda: both_published(pool, [], [judging.id]))
        assert await queue.open_ids(pool, RUN) == [rollout]
        assert [event.what for event in await request_store.events(pool, rollout)] == ["enqueued"]


async def test_a_stage_that_raises_is_dead_lettered_with_the_failed_result_of_its_kind(
    pool: ArqRedis,
) -> None:
    request = await judging_enqueued(pool)
    async with worker(pool, broken, kind=JUDGE) as claimer:
        await until(lambda: both_published(pool, [], [request.id]))
    letter = (await deadletters.listed(pool, RUN, JUDGE))[request.id]
    assert (letter.kind, len(letter.failures)) == ("infrastructure", 2)
    assert "ZeroDivisionError: no steps" in letter.failures[-1].detail
    assert (claimer.finished, claimer.failed) == (0, 2)
    result = await stream.read_body(pool, request.id, JUDGE)
    assert isinstance(result, Judgement)
    assert result.failed is not None
    assert (result.failed.boundary, result.failed.message) == ("worker", "ZeroDivisionError: no steps")
    assert await deadletters.listed(pool, RUN) == {}


async def test_what_a_worker_of_the_second_kind_gives_up_returns_to_its_own_queue(pool: ArqRedis) -> None:
    request = await judging_enqueued(pool)
    begun = asyncio.Event()

    async def endless(claim: Claim[JudgeRequest], status: EpisodeStatus) -> Judgement:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with worker(pool, endless, kind=JUDGE):
        await begun.wait()
    happened = [event.what for event in await request_store.events(pool, request.id, JUDGE)]
    assert happened == ["enqueued", "claimed", "returned"]
    assert await pool.zscore(keys.queue(JUDGE), request.id) is not None
    assert await pool.zscore(keys.queue(), request.id) is None
