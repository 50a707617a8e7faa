"""Which requests a worker takes, and when."""

import msgspec
import pytest
from arq.connections import ArqRedis

from pipeline import census, keys, queue
from pipeline.request import Budget, Claim, EpisodeStatus, Limits, Retries
from pipeline.trajectory import Trajectory
from tests.pipeline import samples
from tests.workers.claiming.worker import enqueued, failing, for_ever, published, solve, until, worker
from workers import process


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
async def test_a_job_that_arq_cannot_read_is_written_again(pool: ArqRedis, job: bytes | None) -> None:
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
    assert len(await queue.take(pool, "large", process.TAKE_AT_ONCE)) == process.TAKE_AT_ONCE
    async with worker(pool, for_ever, slots=1) as small:

        async def is_running() -> bool:
            return bool(small.running)

        await until(is_running)
