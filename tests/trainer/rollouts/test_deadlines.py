"""Members that fail are enqueued again by themselves; members that are late are left out when their group closes."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from benchmarks.scripted_fleet import alternating, answer, finish, work_off
from pipeline import census, connection, keys, queue, request_store, stream
from pipeline.errors import Boundary
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow
from pipeline.message import encode
from pipeline.request import Claim, RolloutRequest
from pipeline.trajectory import Failed
from tests.trainer.trainer_side import TrainerSide
from tests.trainer.trajectories import behind
from trainer.records.journal_writer import Journal
from trainer.rollouts.closing import Deadlines
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.open_requests import fail_unreadable


@pytest.fixture
async def side(redis_url: str, redis: Redis, tmp_path: Path) -> AsyncIterator[TrainerSide]:
    pool: ArqRedis = await connection.connect(redis_url)
    with Journal(tmp_path) as journal:
        made = TrainerSide(pool, journal, max_refills=2)
        await made.streams.recover()
        yield made
    await pool.aclose()


def broken(boundary: Boundary, *, transient: bool) -> Failed:
    return Failed(boundary=boundary, message="broke", transient=transient)


async def open_requests(side: TrainerSide) -> list[RolloutRequest]:
    """Open requests, in the order they were enqueued."""
    waiting = [await request_store.read(side.pool, one) for one in await queue.open_ids(side.pool, "run")]
    return [request for request in waiting if request is not None]


def rows(side: TrainerSide) -> list[tuple[int, str]]:
    return [(row.member, row.fate) for row in read(side.journal.directory, EpisodeRow)]


async def fail_member(side: TrainerSide, member: int, failed: Failed) -> str:
    """Answer the newest request for a member with a failure; returns its id."""
    newest = [request.id for request in await open_requests(side) if request.member == member][-1]
    await answer(side.pool, newest, lambda request: failed)
    await side.streams.read(block_ms=10)
    return newest


@pytest.mark.parametrize(
    ("failed", "is_refilled"),
    [
        (broken("sandbox", transient=True), True),
        (broken("engine", transient=True), True),
        (broken("worker", transient=True), True),
        (broken("grader", transient=True), True),
        (broken("grader", transient=False), False),
        (broken("sandbox", transient=False), False),
        (broken("engine", transient=False), False),
        (broken("request", transient=False), False),
    ],
)
async def test_a_member_is_enqueued_again_if_it_failed_through_no_fault_of_policy_or_task(
    side: TrainerSide, failed: Failed, is_refilled: bool
) -> None:
    await side.dispatcher.open_groups(1, version=0)
    first = await fail_member(side, 1, failed)
    await side.dispatcher.open_groups(0, version=3)
    again = [request for request in await open_requests(side) if request.member == 1 and request.id != first]
    assert [(one.cursor, one.group_id, one.version_at_enqueue) for one in again] == [(0, "g00000000", 3)] * (
        is_refilled
    )
    assert rows(side) == [(1, "failed")] * is_refilled, "one that is not refilled waits for its group"
    assert side.ledger.since_step.refilled == is_refilled


async def test_a_refilled_group_is_trained_whole_and_never_enqueued_anew(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await fail_member(side, 1, broken("sandbox", transient=True))
    await side.dispatcher.open_groups(0, version=0)
    assert len(await work_off(side.pool)) == 3
    await side.streams.read(block_ms=10)
    (group,) = side.book.take(behind(0)) or []
    assert group.rewards == {0: 0.0, 1: 1.0, 2: 0.0}
    assert side.dispatcher.num_enqueued == 4


async def test_a_group_is_refilled_within_its_budget_then_the_failure_counts(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    for _ in range(3):
        await fail_member(side, 1, broken("sandbox", transient=True))
        await side.dispatcher.open_groups(0, version=0)
    assert rows(side) == [(1, "failed")] * 2
    await work_off(side.pool, lambda request: float(request.member == 2))
    await side.streams.read(block_ms=10)
    (group,) = side.book.take(behind(0)) or []
    assert group.fates("trained") == {0: "trained", 1: "failed", 2: "trained"}


async def test_the_budget_of_an_open_group_survives_a_checkpoint(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await fail_member(side, 1, broken("sandbox", transient=True))
    resumed = Ledger(side.journal, side.ledger.state(step=0, version=0, cursor=1))
    assert resumed.num_refills(0) == 1
    resumed.close(0)
    assert resumed.state(step=0, version=0, cursor=1).refills == {}


async def test_a_copy_of_a_failure_that_was_refilled_changes_nothing(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await fail_member(side, 1, broken("sandbox", transient=True))
    head = (await stream.newest_heads(side.pool, "run", 1))[0].head
    await side.pool.xadd(keys.stream("run"), {"head": encode(head)})
    await side.streams.read(block_ms=10)
    await side.dispatcher.open_groups(0, version=0)
    assert len([request for request in await open_requests(side) if request.member == 1]) == 2
    assert (rows(side), len(side.pending())) == ([(1, "failed")], 2)


async def test_after_a_restart_the_refill_is_the_request_that_counts(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await fail_member(side, 1, broken("sandbox", transient=True))
    await side.dispatcher.open_groups(0, version=0)
    other = TrainerSide(side.pool, side.journal, max_refills=2)
    await other.recovery.restore(other.ledger.state(step=0, version=0, cursor=0))
    await other.recovery.enqueue_missing(version=0)
    assert len([request for request in await open_requests(other) if request.member == 1]) == 2, (
        "not a third time"
    )
    await work_off(side.pool)
    await other.streams.read(block_ms=10)
    (group,) = other.book.take(behind(0)) or []
    assert group.rewards == {0: 0.0, 1: 1.0, 2: 0.0}


async def test_a_refill_that_was_never_enqueued_is_enqueued_after_a_restart(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await fail_member(side, 1, broken("sandbox", transient=True))
    state = side.ledger.state(step=0, version=0, cursor=1)
    await stream.acknowledge(side.pool, "run", list(state.pending))
    other = TrainerSide(side.pool, side.journal, max_refills=2)
    await other.recovery.restore(state)
    await other.recovery.enqueue_missing(version=0)
    assert sorted(request.member for request in await open_requests(other)) == [0, 1, 2]


# Deadlines


async def claimed(side: TrainerSide, *members: int) -> list[Claim]:
    """Claims of these members, by a worker that takes its time."""
    found = [
        await queue.claim(side.pool, one.id, "slow")
        for one in await open_requests(side)
        if one.member in members
    ]
    return [claim for claim in found if isinstance(claim, Claim)]


async def close_overdue(side: TrainerSide) -> int:
    """As if its deadline were the time that has passed since the first claim."""
    closed = await Deadlines(
        side.pool, side.book, side.closer, deadline_s=lambda cursor: 0.0, queue_s=None
    ).close_overdue()
    await side.requests.withdraw_surplus()
    return len(closed)


async def test_nothing_is_closed_before_a_first_claim_however_long_it_waited(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    assert await close_overdue(side) == 0
    assert await queue.first_claims(side.pool, await queue.open_ids(side.pool, "run")) == {}


async def test_a_group_that_nobody_claims_is_given_up_when_its_wait_has_a_bound(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(2, version=0)
    await claimed(side, 0)  # of both groups
    (first, second) = sorted(side.book._open.values(), key=lambda group: group.cursor)
    await side.pool.delete(*(keys.claims(one.request_id) for one in second.outstanding))
    deadlines = Deadlines(side.pool, side.book, side.closer, deadline_s=lambda cursor: 1e9, queue_s=0.0)
    assert await deadlines.close_overdue() == [second]
    await side.requests.withdraw_surplus()
    assert rows(side) == [(0, "withdrawn"), (1, "withdrawn"), (2, "withdrawn")]
    assert side.ledger.brake.failed_groups == 1
    assert first.started_at is not None


async def test_a_request_that_nobody_can_read_counts_as_failed(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    spoilt = (await open_requests(side))[0]
    await side.pool.set(keys.request(spoilt.id), b"\xc1")
    await census.beat_run(side.pool, census.RunStatus(run_id="run", phase="waiting"))
    await queue.take(side.pool, "w", 1)
    for _ in range(2):
        await fail_unreadable(side.pool, "run", side.book.outstanding)
    await side.streams.read(block_ms=10)
    await work_off(side.pool)
    await side.streams.read(block_ms=10)
    (group,) = side.book.take(behind(0)) or []
    assert group.fates("trained") == {0: "failed", 1: "trained", 2: "trained"}


async def test_the_deadline_runs_from_the_first_claim_also_if_that_try_returned_to_the_queue(
    side: TrainerSide,
) -> None:
    await side.dispatcher.open_groups(1, version=0)
    (claim,) = await claimed(side, 0)
    await queue.return_to_queue(side.pool, claim)
    await side.pool.hincrby(keys.claims(claim.request.id), "first_at", -60_000)
    await claimed(side, 0)
    ages = await queue.first_claims(side.pool, await queue.open_ids(side.pool, "run"))
    assert list(ages) == [claim.request.id]
    assert 60 <= ages[claim.request.id] < 120


async def test_members_that_are_running_or_queued_at_the_deadline_are_withdrawn_and_counted(
    side: TrainerSide,
) -> None:
    side = TrainerSide(side.pool, side.journal, group_size=4)
    await side.dispatcher.open_groups(1, version=0)
    slow = await claimed(side, 2)
    for claim in await claimed(side, 0, 1):
        await finish(side.pool, claim, alternating)
    await side.streams.read(block_ms=10)
    assert await close_overdue(side) == 1
    assert rows(side) == [(2, "withdrawn"), (3, "withdrawn")]
    assert side.ledger.since_step.withdrawn == 2
    assert await side.pool.zcard(keys.queue()) == 0
    await finish(side.pool, slow[0], alternating)
    assert await side.streams.read(block_ms=10) == 0, "its worker cannot publish any more"
    (group,) = side.book.take(behind(0)) or []
    assert group.rewards == {0: 0.0, 1: 1.0}


@pytest.mark.parametrize(("reward", "fate"), [(1.0, "late"), (None, "failed")])
async def test_an_answer_that_was_on_its_way_is_not_withdrawn(
    side: TrainerSide, reward: float | None, fate: str
) -> None:
    await side.dispatcher.open_groups(1, version=0)
    for claim in await claimed(side, 0, 1):
        await finish(side.pool, claim, alternating)
    await side.streams.read(block_ms=10)
    (late,) = await claimed(side, 2)
    await finish(side.pool, late, lambda request: reward)
    assert await close_overdue(side) == 1
    assert rows(side) == []
    assert side.book.take(behind(0)) is not None
    await side.streams.read(block_ms=10)
    assert rows(side) == [(2, fate)]


async def test_what_a_closed_group_left_behind_is_withdrawn_after_a_restart(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    side.ledger.close(0)
    state = side.ledger.state(step=1, version=0, cursor=1)
    other = TrainerSide(side.pool, side.journal, restored=state)
    await other.recovery.restore(state)
    await other.requests.withdraw_surplus()
    assert await open_requests(other) == []
    assert rows(side) == [(0, "withdrawn"), (1, "withdrawn"), (2, "withdrawn")]


async def test_a_request_that_nobody_can_read_keeps_no_run_from_resuming_or_ending(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    spoilt = (await open_requests(side))[0]
    await side.pool.set(keys.request(spoilt.id), b"\xc1")
    other = TrainerSide(side.pool, side.journal)
    await other.recovery.restore(other.ledger.state(step=0, version=0, cursor=1))
    await other.recovery.enqueue_missing(version=0)
    assert not isinstance((await queue.take(side.pool, "w", 1))[0], Claim), "it is dead-lettered"
    assert len(await work_off(side.pool)) == 3, "its member was enqueued again"
    await other.requests.withdraw_training()
