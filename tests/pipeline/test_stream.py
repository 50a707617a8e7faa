"""Each answer is published once, read until it is acknowledged, and never blocks those behind it."""

import asyncio
import random

import pytest
from arq.connections import ArqRedis
from redis.exceptions import OutOfMemoryError

from pipeline import census, connection, keys, queue, stream, weights
from pipeline.request import Claim
from pipeline.trajectory import Submitted, TrajectoryHead
from pipeline.weights import WeightVersion
from tests.pipeline import samples


async def taken(pool: ArqRedis) -> Claim:
    request = samples.request()
    await queue.enqueue(pool, request)
    claim = await queue.claim(pool, request.id, "host/1")
    assert isinstance(claim, Claim)
    return claim


async def answered(pool: ArqRedis, number: int = 1) -> list[str]:
    """Publish so many trajectories; returns their request ids."""
    ids: list[str] = []
    for _ in range(number):
        claim = await taken(pool)
        assert await stream.publish(pool, samples.trajectory(claim)) == "published"
        ids.append(claim.request.id)
    return ids


def ids_of(deliveries: list[stream.Delivery]) -> list[str]:
    return [delivery.head.request_id for delivery in deliveries]


def pairs(deliveries: list[stream.Delivery]) -> list[tuple[str, str]]:
    return [(delivery.entry_id, delivery.head.request_id) for delivery in deliveries]


@pytest.fixture
async def reader(pool: ArqRedis) -> ArqRedis:
    await stream.open_reader(pool, samples.RUN)
    return pool


async def test_a_trajectory_arrives_whole(reader: ArqRedis) -> None:
    claim = await taken(reader)
    sent = samples.trajectory(claim)
    await stream.publish(reader, sent)
    (delivery,) = await stream.read_new(reader, samples.RUN)
    assert delivery.head.request_id == claim.request.id
    assert await stream.read_body(reader, claim.request.id) == sent
    assert delivery.head.body_bytes == await reader.strlen(keys.body(claim.request.id))


async def test_one_request_is_published_once(reader: ArqRedis) -> None:
    claim = await taken(reader)
    verdicts = await asyncio.gather(*(stream.publish(reader, samples.trajectory(claim)) for _ in range(5)))
    assert sorted(verdicts) == ["duplicate"] * 4 + ["published"]
    assert len(await stream.read_new(reader, samples.RUN)) == 1


async def test_a_publication_ends_the_lease(reader: ArqRedis) -> None:
    claim = await taken(reader)
    await stream.publish(reader, samples.trajectory(claim))
    assert await queue.current_lease(reader, claim.request.id) is None


async def test_what_arrived_before_the_reader_is_unread(pool: ArqRedis) -> None:
    ids = await answered(pool, 2)
    await stream.open_reader(pool, samples.RUN)
    await stream.open_reader(pool, samples.RUN)
    assert ids_of(await stream.read_new(pool, samples.RUN)) == ids


async def test_an_unacknowledged_answer_is_read_again_after_a_restart(reader: ArqRedis) -> None:
    ids = await answered(reader, 3)
    first = await stream.read_new(reader, samples.RUN)
    await stream.acknowledge(reader, samples.RUN, pairs(first[:1]))
    await stream.open_reader(reader, samples.RUN)
    again = await stream.read_unacknowledged(reader, samples.RUN)
    assert ids_of(again) == ids[1:]
    assert again == first[1:]
    assert await stream.read_new(reader, samples.RUN, block_ms=1) == []


async def test_more_unacknowledged_answers_than_one_reply_holds_are_all_read(reader: ArqRedis) -> None:
    head = (await head_of_one(reader)).head
    async with reader.pipeline(transaction=False) as pipe:
        for _ in range(1100):
            pipe.xadd(keys.stream(samples.RUN), {"head": stream.encode(head)})
        await pipe.execute()
    while await stream.read_new(reader, samples.RUN, count=500, block_ms=1):
        pass
    assert len(await stream.read_unacknowledged(reader, samples.RUN)) == 1101


async def head_of_one(pool: ArqRedis) -> stream.Delivery:
    await answered(pool)
    (delivery,) = await stream.newest_heads(pool, samples.RUN, 1)
    return delivery


async def test_an_acknowledged_request_is_owed_no_longer_and_fades(reader: ArqRedis) -> None:
    (request_id,) = await answered(reader)
    assert await queue.open_ids(reader, samples.RUN) == [request_id]
    await stream.acknowledge(reader, samples.RUN, pairs(await stream.read_new(reader, samples.RUN)))
    assert await queue.open_ids(reader, samples.RUN) == []
    assert await stream.read_body(reader, request_id) is not None, "`show` finds it for a while"
    for key in (keys.request, keys.claims, keys.events, keys.body):
        assert 0 < await reader.ttl(key(request_id)) <= stream.KEEP_ANSWERED_S


async def test_answered_bodies_make_room_for_younger_ones(
    reader: ArqRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await answered(reader, 3)
    read = await stream.read_new(reader, samples.RUN)
    monkeypatch.setattr(stream, "KEEP_ANSWERED_BYTES", sum(one.head.body_bytes for one in read[1:]))
    await stream.acknowledge(reader, samples.RUN, pairs(read))
    kept = [await stream.read_body(reader, request_id) is not None for request_id in ids]
    assert kept == [False, True, True]


async def test_acknowledging_twice_does_no_harm(reader: ArqRedis) -> None:
    await answered(reader)
    read = await stream.read_new(reader, samples.RUN)
    await stream.acknowledge(reader, samples.RUN, pairs(read))
    await stream.acknowledge(reader, samples.RUN, pairs(read))
    assert await stream.read_unacknowledged(reader, samples.RUN) == []


@pytest.mark.parametrize("fields", [{"head": b"\xff rubbish"}, {"body": b"no head at all"}])
async def test_an_undecodable_head_is_set_aside_and_blocks_nobody(
    reader: ArqRedis, fields: dict[str | bytes, bytes]
) -> None:
    entry = await reader.xadd(keys.stream(samples.RUN), fields)  # pyright: ignore[reportArgumentType]
    (request_id,) = await answered(reader)
    assert ids_of(await stream.read_new(reader, samples.RUN)) == [request_id]
    assert ids_of(await stream.read_unacknowledged(reader, samples.RUN)) == [request_id]
    (aside,) = await reader.lrange(keys.malformed(samples.RUN), 0, -1)  # pyright: ignore[reportGeneralTypeIssues]
    assert aside.startswith(entry)
    assert b"TrajectoryHead" in aside


async def test_a_body_that_cannot_be_read_says_so(reader: ArqRedis) -> None:
    (request_id,) = await answered(reader)
    await reader.set(keys.body(request_id), b"rubbish")
    with pytest.raises(stream.MalformedMessage):
        await stream.read_body(reader, request_id)
    assert await stream.read_body(reader, "never-asked") is None


async def test_the_newest_heads_come_first_and_are_left_for_the_reader(reader: ArqRedis) -> None:
    ids = await answered(reader, 3)
    assert ids_of(await stream.newest_heads(reader, samples.RUN, 2)) == ids[:0:-1]
    assert len(await stream.read_new(reader, samples.RUN)) == 3


async def test_heads_are_followed_from_where_one_was(reader: ArqRedis) -> None:
    await answered(reader)
    (seen,) = await stream.newest_heads(reader, samples.RUN, 1)
    ids = await answered(reader, 2)
    await reader.xadd(keys.stream(samples.RUN), {"head": b"rubbish"})
    found = await stream.heads_after(reader, {samples.RUN: seen.entry_id, "another": "0"}, block_ms=1)
    assert [run_id for run_id, _ in found] == [samples.RUN] * 3
    assert ids_of([arrived for _, arrived in found if isinstance(arrived, stream.Delivery)]) == ids
    assert isinstance(found[-1][1], stream.Unreadable), "a follower must be able to step over it"


async def test_every_head_is_listed_once_over_as_many_pages_as_it_takes(
    reader: ArqRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PAGE", 70)
    await add(reader, (await head_of_one(reader)).head, stream.FIRST_PAGE + 3 * stream.PAGE)
    listed = [delivery.entry_id async for delivery in stream.heads_backwards(reader, samples.RUN)]
    entries = await reader.xrevrange(keys.stream(samples.RUN))
    assert listed == [entry.decode() for entry, _ in entries]


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_HEADS", 10)


@pytest.mark.usefixtures("_short")
async def test_trimming_keeps_what_is_unacknowledged(reader: ArqRedis) -> None:
    await add(reader, (await head_of_one(reader)).head, 499)
    read = await stream.read_new(reader, samples.RUN, count=1000)
    owed, settled = read[250], [*read[:250], *read[251:]]
    await stream.acknowledge(reader, samples.RUN, [(delivery.entry_id, "settled") for delivery in settled])
    assert await stream.read_unacknowledged(reader, samples.RUN) == [owed]
    assert await reader.xlen(keys.stream(samples.RUN)) < 500, "acknowledged heads before it are gone"


@pytest.mark.usefixtures("_short")
async def test_trimming_keeps_what_is_unread(reader: ArqRedis) -> None:
    await add(reader, (await head_of_one(reader)).head, 799)
    read = await stream.read_new(reader, samples.RUN, count=400)
    await stream.acknowledge(reader, samples.RUN, [(delivery.entry_id, "settled") for delivery in read])
    assert len(await stream.read_new(reader, samples.RUN, count=1000)) == 400
    assert await reader.xlen(keys.stream(samples.RUN)) < 800, "acknowledged heads before them are gone"


async def add(pool: ArqRedis, head: TrajectoryHead, number: int) -> None:
    async with pool.pipeline(transaction=False) as pipe:
        for _ in range(number):
            pipe.xadd(keys.stream(samples.RUN), {"head": stream.encode(head)})
        await pipe.execute()


async def test_kept_bodies_make_room_in_a_redis_with_a_bound(reader: ArqRedis) -> None:
    noise = random.Random(1).randbytes(300_000)
    for _ in range(3):
        await stream.publish(reader, samples.trajectory(await taken(reader), outcome=Submitted(patch=noise)))
    read = await stream.read_new(reader, samples.RUN)
    await reader.config_set("maxmemory", 8 * 400_000)
    try:
        await stream.acknowledge(reader, samples.RUN, pairs(read))
    finally:
        await reader.config_set("maxmemory", 0)
    kept = [await stream.read_body(reader, one.head.request_id) is not None for one in read]
    assert kept == [False, False, True]


async def test_a_full_redis_takes_nothing_in_and_lets_everything_go(reader: ArqRedis) -> None:
    (request_id,) = await answered(reader)
    claim, handed = await taken(reader), await taken(reader)
    version = WeightVersion(
        run_id=samples.RUN, version=1, step=1, directory="/w", num_bytes=1, published_at=1.0
    )
    lease = queue.Lease(worker="host/1", attempt=1, claimed_at=1.0)
    await reader.config_set("maxmemory", 1)
    try:
        with pytest.raises(OutOfMemoryError):
            await connection.check(reader)
        with pytest.raises(OutOfMemoryError):
            await queue.enqueue(reader, samples.request())
        with pytest.raises(OutOfMemoryError):
            await queue.take(reader, "host/2", 1)
        with pytest.raises(OutOfMemoryError):
            await stream.publish(reader, samples.trajectory(claim))
        assert await queue.renew(reader, claim, lease)
        assert await queue.return_to_queue(reader, handed)
        await stream.open_reader(reader, samples.RUN)
        read = await stream.read_new(reader, samples.RUN)
        assert ids_of(read) == [request_id]
        await stream.acknowledge(reader, samples.RUN, pairs(read))
        await weights.announce(reader, version)
        await census.beat_run(reader, census.RunStatus(run_id=samples.RUN, phase="waiting"))
        await queue.withdraw(reader, samples.RUN, [handed.request.id])
    finally:
        await reader.config_set("maxmemory", 0)
    assert await stream.publish(reader, samples.trajectory(claim)) == "published"
    assert await queue.open_ids(reader, samples.RUN) == [claim.request.id]
