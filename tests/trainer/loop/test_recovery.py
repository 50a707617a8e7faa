"""A Redis that was killed may have forgotten its last second."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from benchmarks.scripted_fleet import task
from pipeline import connection, keys, queue, request_store
from pipeline.request import Limits, Sampling
from trainer.loop.parts import Parts
from trainer.loop.recovery import ask_again
from trainer.records.journal import EpisodeRow, Journal, read
from trainer.rollouts.admission import Admission
from trainer.rollouts.dispatch import Dispatcher, RequestForm, TaskOrder, new_ids
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.quarantine import Quarantine

RUN = "run"


@pytest.fixture
async def pool(redis_url: str, redis: Redis) -> AsyncIterator[ArqRedis]:
    pool = await connection.connect(redis_url)
    yield pool
    await pool.aclose()


@pytest.fixture
def parts(pool: ArqRedis, tmp_path: Path) -> Iterator[Parts]:
    """As much of a run as asking takes."""
    admission = Admission(max_lag_versions=1, groups_per_step=2, num_steps=9)
    book = GroupBook(admission, min_valid_members=2, stragglers="wait")
    with Journal(tmp_path) as journal:
        ledger, quarantine = Ledger(journal), Quarantine(journal)
        dispatcher = Dispatcher(
            pool,
            RequestForm(run_id=RUN, limits=Limits(), agent_config="", tokenizer="", ids=new_ids()),
            TaskOrder([task(f"t{i}") for i in range(3)], seed=5),
            book,
            ledger=ledger,
            quarantine=quarantine,
            group_size=3,
            sampling=Sampling(),
        )
        yield cast(Parts, SimpleNamespace(redis=pool, book=book, ledger=ledger, dispatcher=dispatcher))


async def forget(pool: ArqRedis, request_id: str) -> None:
    await pool.delete(keys.request(request_id), keys.arq_job(request_id), keys.events(request_id))
    await pool.zrem(keys.open_requests(RUN), request_id)
    await pool.zrem(keys.QUEUE, request_id)


async def members(pool: ArqRedis) -> list[tuple[int, int]]:
    found = [await request_store.read(pool, one) for one in await queue.open_ids(pool, RUN)]
    return sorted((request.cursor, request.member) for request in found if request is not None)


async def test_what_redis_forgot_is_asked_for_anew_and_the_rest_is_left_alone(
    parts: Parts, pool: ArqRedis, tmp_path: Path
) -> None:
    await parts.dispatcher.open_groups(2, version=1)
    before = await queue.open_ids(pool, RUN)
    await forget(pool, before[1])
    assert await ask_again(parts, RUN) == 1
    await parts.dispatcher.open_groups(0, version=1)
    after = await queue.open_ids(pool, RUN)
    assert set(before) - set(after) == {before[1]}
    assert await members(pool) == [(cursor, member) for cursor in (0, 1) for member in range(3)]
    (row,) = read(tmp_path, EpisodeRow)
    assert (row.request_id, row.fate, row.member) == (before[1], "withdrawn", 1)
    assert await ask_again(parts, RUN) == 0


async def test_what_waits_for_redis_to_answer_is_not_forgotten(parts: Parts, pool: ArqRedis) -> None:
    await pool.config_set("maxmemory", "1")
    try:
        with pytest.raises(OutOfMemoryError):
            await parts.dispatcher.open_groups(1, version=1)
        assert await ask_again(parts, RUN) == 0
    finally:
        await pool.config_set("maxmemory", "0")
    await parts.dispatcher.open_groups(0, version=1)
    assert await members(pool) == [(0, 0), (0, 1), (0, 2)]
