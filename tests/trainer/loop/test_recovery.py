"""A Redis that was killed may have forgotten its last second."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from benchmarks.scripted_fleet import answer
from pipeline import connection, keys, queue, request_store
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow
from tests.pipeline import samples
from tests.trainer.trainer_side import RUN, TrainerSide
from trainer.records.journal_writer import Journal
from trainer.rollouts.ledger import LedgerState


@pytest.fixture
async def pool(redis_url: str, redis: Redis) -> AsyncIterator[ArqRedis]:
    pool = await connection.connect(redis_url)
    yield pool
    await pool.aclose()


@pytest.fixture
def side(pool: ArqRedis, tmp_path: Path) -> Iterator[TrainerSide]:
    with Journal(tmp_path) as journal:
        yield TrainerSide(pool, journal, tasks=("t0", "t1", "t2"))


async def forget(pool: ArqRedis, request_id: str) -> None:
    await pool.delete(keys.request(request_id), keys.arq_job(request_id), keys.events(request_id))
    await pool.zrem(keys.open_requests(RUN), request_id)
    await pool.zrem(keys.queue(), request_id)


async def members(pool: ArqRedis) -> list[tuple[int, int]]:
    found = [await request_store.read(pool, one) for one in await queue.open_ids(pool, RUN)]
    return sorted((request.cursor, request.member) for request in found if request is not None)


async def test_what_redis_forgot_is_enqueued_anew_and_the_rest_is_left_alone(
    side: TrainerSide, pool: ArqRedis, tmp_path: Path
) -> None:
    await side.dispatcher.open_groups(2, version=1)
    before = await queue.open_ids(pool, RUN)
    await forget(pool, before[1])
    assert await side.recovery.replace_forgotten() == 1
    await side.dispatcher.open_groups(0, version=1)
    after = await queue.open_ids(pool, RUN)
    assert set(before) - set(after) == {before[1]}
    assert await members(pool) == [(cursor, member) for cursor in (0, 1) for member in range(3)]
    (row,) = read(tmp_path, EpisodeRow)
    assert (row.request_id, row.fate, row.member) == (before[1], "withdrawn", 1)
    assert await side.recovery.replace_forgotten() == 0


async def test_the_end_of_training_leaves_the_requests_of_an_evaluation(
    side: TrainerSide, pool: ArqRedis
) -> None:
    heldout = samples.request(id="heldout", run_id=RUN, purpose="eval", group_id="heldout_before:0")
    await queue.enqueue(pool, heldout)
    await side.dispatcher.open_groups(1, version=1)
    await side.requests.withdraw_training()
    # The loop waits for all of an evaluation's trajectories before it ends.
    assert await queue.open_ids(pool, RUN) == ["heldout"]


async def test_what_waits_for_redis_to_answer_is_not_forgotten(side: TrainerSide, pool: ArqRedis) -> None:
    await pool.config_set("maxmemory", "1")
    try:
        with pytest.raises(OutOfMemoryError):
            await side.dispatcher.open_groups(1, version=1)
        assert await side.recovery.replace_forgotten() == 0
    finally:
        await pool.config_set("maxmemory", "0")
    await side.dispatcher.open_groups(0, version=1)
    assert await members(pool) == [(0, 0), (0, 1), (0, 2)]


async def test_a_group_that_is_settled_while_a_resume_reads_is_not_enqueued_again(
    side: TrainerSide, pool: ArqRedis
) -> None:
    await side.streams.open()
    await side.dispatcher.open_groups(2, version=0)
    for request_id in await queue.open_ids(pool, RUN):
        request = await request_store.read(pool, request_id)
        if request is not None and request.cursor == 1:
            await answer(pool, request_id, lambda request: 1.0)
    await side.streams.read(block_ms=10)  # and ends before a checkpoint
    resumed = TrainerSide(pool, side.journal, tasks=("t0", "t1", "t2"))
    await resumed.recovery.restore(LedgerState())
    assert resumed.ledger.is_closed(1)
    assert not resumed.ledger.is_closed(0)
    await resumed.recovery.enqueue_missing(version=0)
    await resumed.dispatcher.open_groups(1, version=0)
    assert await members(pool) == [(cursor, member) for cursor in (0, 1, 2) for member in range(3)]
