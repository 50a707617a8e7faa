"""Samples of the fleet: the slots of live workers, and what keeps requests from them."""

import time
from collections.abc import AsyncIterator

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from pipeline import census, connection
from pipeline.journal.rows import ClosedBy
from pipeline.kinds import JUDGE, ROLLOUT
from trainer.loop.state import RunState
from trainer.loop.status import WAITING, FleetWatch
from trainer.rollouts.ledger import LedgerState


@pytest.fixture
async def pool(redis_url: str, redis: Redis) -> AsyncIterator[ArqRedis]:
    """Of an empty database: workers of other tests count as alive until their heartbeats expire."""
    pool = await connection.connect(redis_url)
    yield pool
    await pool.aclose()


async def beat(pool: ArqRedis, name: str, *running: str, paused: str = "", kind: str = ROLLOUT.name) -> None:
    now = time.time()
    status = census.WorkerStatus(
        name=name,
        slots=4,
        running=running,
        finished=0,
        failed=0,
        started_at=now,
        updated_at=now,
        paused=paused,
        kind=kind,
    )
    await census.beat_worker(pool, status)


def watch(pool: ArqRedis, state: RunState, bound: ClosedBy, progress: str = "") -> FleetWatch:
    return FleetWatch(pool, state, closed_by=lambda: bound, heldout=lambda: progress)


async def test_slots_with_claims_and_slots_of_paused_workers_are_counted_apart(pool: ArqRedis) -> None:
    await beat(pool, "host/1", "a", "b", "c")
    await beat(pool, "host/2", "d", paused="docker is out")
    await beat(pool, "host/3", "e", kind=JUDGE.name)
    state = RunState.resumed(LedgerState(), [])
    row = await watch(pool, state, "").sample()
    assert (row.num_workers, row.slots, row.running, row.paused) == (2, 8, 4, 3)
    assert (row.closed_by, row.is_waiting) == ("", False)
    state.phase = WAITING
    assert (await watch(pool, state, "lag").sample()).is_waiting


@pytest.mark.parametrize(
    ("served_step", "progress", "why"),
    [
        (2, "", "lag"),
        (2, "heldout_step_2: 3 of 9", "lag"),
        (1, "", "weights"),
        (1, "heldout_step_1: 3 of 9", "evaluation"),
    ],
)
async def test_closed_by_the_lag_of_weights_that_are_not_served_yet_has_a_reason_of_its_own(
    pool: ArqRedis, served_step: int, progress: str, why: str
) -> None:
    state = RunState.resumed(LedgerState(step=2), [])
    state.served_steps = served_step
    row = await watch(pool, state, "lag", progress).sample()
    assert row.closed_by == why
    assert (await watch(pool, state, "redis", progress).sample()).closed_by == "redis"
