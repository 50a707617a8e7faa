"""What becomes of trajectories from a real stream: held, dropped, rejected, settled."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from benchmarks.scripted_fleet import answer, played, work_off
from pipeline import connection, deadletters, keys, queue, stream
from pipeline.message import encode, pack_float32s, pack_int32s, unpack_int32s
from pipeline.request import Claim
from pipeline.trajectory import head_of
from tests.trainer.trainer_side import TrainerSide
from tests.trainer.trajectories import behind
from trainer.records.journal_writer import Journal


@pytest.fixture
async def side(redis_url: str, redis: Redis, tmp_path: Path) -> AsyncIterator[TrainerSide]:
    pool = await connection.connect(redis_url)
    with Journal(tmp_path) as journal:
        made = TrainerSide(pool, journal)
        await made.streams.recover()
        yield made
    await pool.aclose()


async def test_a_whole_group_becomes_ready_with_the_tokens_that_were_drawn(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await work_off(side.pool)
    assert await side.streams.read(block_ms=10) == 3
    (group,) = side.book.take(behind(0)) or []
    sampled = [member.samples[0].num_trained_tokens for _, member in sorted(group.members.items())]
    assert sampled == [8, 10, 12]
    assert side.pending() == [], "a group that waits for its step is not settled"


async def test_an_entry_delivered_twice_is_held_once_and_acknowledged_twice(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    (first, *_) = await work_off(side.pool, limit=1)
    original = (await stream.newest_heads(side.pool, "run", 1))[0]
    await side.pool.xadd(keys.stream("run"), {"head": encode(original.head)})
    await work_off(side.pool)
    await side.streams.read(block_ms=10)
    (group,) = side.book.take(behind(0)) or []
    assert len(group.members[0].entries) == 2
    assert side.intake.num_arrived == 3
    assert group.members[0].head.request_id == first


async def test_a_copy_that_comes_after_its_group_was_settled_leaves_no_second_row(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await work_off(side.pool, lambda request: 1.0)
    await side.streams.read(block_ms=10)
    original = (await stream.newest_heads(side.pool, "run", 1))[0]
    copy = (await side.pool.xadd(keys.stream("run"), {"head": encode(original.head)})).decode()
    await side.streams.read(block_ms=10)
    assert side.fates() == ["zero_variance"] * 3
    assert side.pending()[-1] == (copy, original.head.request_id)


async def test_a_group_of_equal_rewards_is_dropped_and_settled_at_once(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await work_off(side.pool, lambda request: 1.0)
    await side.streams.read(block_ms=10)
    assert side.book.num_live == 0
    assert side.fates() == ["zero_variance"] * 3
    assert len(side.pending()) == 3


async def test_a_dead_member_closes_its_group_without_a_reward(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await work_off(side.pool, lambda request: None if request.member == 0 else float(request.member == 1))
    await side.streams.read(block_ms=10)
    (group,) = side.book.take(behind(0)) or []
    assert group.rewards == {1: 1.0, 2: 0.0}


async def test_a_dead_member_that_was_requeued_in_time_joins_its_group(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    dead = (await queue.open_ids(side.pool, "run"))[0]
    await answer(side.pool, dead, lambda request: None)
    await side.streams.read(block_ms=10)
    await deadletters.requeue(side.pool, "run", dead)
    await work_off(side.pool)
    await side.streams.read(block_ms=10)
    (group,) = side.book.take(behind(0)) or []
    assert group.rewards == {0: 0.0, 1: 1.0, 2: 0.0}
    assert len(group.members[0].entries) == 2


async def test_a_dead_member_requeued_after_its_group_closed_is_late(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    dead = (await queue.open_ids(side.pool, "run"))[0]
    await work_off(side.pool, lambda request: None if request.id == dead else 1.0)
    await side.streams.read(block_ms=10)
    await deadletters.requeue(side.pool, "run", dead)
    await work_off(side.pool)
    await side.streams.read(block_ms=10)
    assert side.fates() == ["failed", "zero_variance", "zero_variance", "late"]


async def test_tokens_that_do_not_add_up_are_refused_and_train_nothing(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    broken = (await queue.open_ids(side.pool, "run"))[0]
    claim = await queue.claim(side.pool, broken, "w")
    assert isinstance(claim, Claim)
    sound = played(claim, 1.0)
    torn = replace(sound.turns[1], logprobs=pack_float32s([-1.0]))
    await stream.publish(side.pool, replace(sound, turns=(sound.turns[0], torn)))
    await side.pool.zrem(keys.queue(), broken)
    await work_off(side.pool)
    await side.streams.read(block_ms=10)
    assert side.intake.num_refused == 1
    (group,) = side.book.take(behind(0)) or []
    assert group.rewards == {1: 1.0, 2: 0.0}
    assert group.fates("trained")[0] == "refused"


async def test_a_trajectory_that_is_not_what_the_engine_sampled_trains_nothing_and_is_counted(
    side: TrainerSide,
) -> None:
    await side.dispatcher.open_groups(1, version=0)
    altered = (await queue.open_ids(side.pool, "run"))[0]
    claim = await queue.claim(side.pool, altered, "w")
    assert isinstance(claim, Claim)
    sound = played(claim, 1.0)
    first, second = sound.turns
    ids = [token + 1 for token in unpack_int32s(second.sampled)]
    changed = replace(second, sampled=pack_int32s(ids))
    await stream.publish(side.pool, replace(sound, turns=(first, changed)))
    await side.pool.zrem(keys.queue(), altered)
    await work_off(side.pool, lambda request: 1.0)
    await side.streams.read(block_ms=10)
    assert side.fates() == ["altered", "zero_variance", "zero_variance"]


async def test_an_unreadable_entry_does_not_stop_the_stream(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await side.pool.xadd(keys.stream("run"), {"head": b"\xc1 not msgpack"})
    await work_off(side.pool)
    await side.streams.read(block_ms=10)
    assert side.book.num_ready == 1


async def test_a_restarted_trainer_finds_what_it_had_not_acknowledged(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(2, version=0)
    await work_off(side.pool)
    await side.streams.read(block_ms=10)
    other = await side.restarted()
    taken = other.book.take(behind(0))
    assert taken is not None
    assert other.book.num_ready == 1


async def test_a_recovery_after_a_lost_connection_holds_nothing_twice(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await work_off(side.pool)
    await side.streams.read(block_ms=10)
    assert await side.streams.recover() == 0
    assert side.intake.num_arrived == 3


async def test_a_head_of_a_strange_group_is_refused_and_settled(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    claim = await queue.claim(side.pool, (await queue.open_ids(side.pool, "run"))[0], "w")
    assert isinstance(claim, Claim)
    strange = replace(head_of(played(claim, 1.0), body_bytes=1), group_id="elsewhere")
    await side.pool.xadd(keys.stream("run"), {"head": encode(strange)})
    await side.streams.read(block_ms=10)
    assert side.fates() == ["refused"]
    assert len(side.pending()) == 1
