"""Each rollout is in the run's store before its stream entry is acknowledged, however the trainer dies."""

import asyncio
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from msgspec.structs import replace
from redis.asyncio import Redis

from pipeline import connection, deadletters, keys, stream
from pipeline.rollout_store.reading import RolloutStore, Stored
from pipeline.trajectory import TrajectoryHead, head_of
from tests.pipeline import claims, samples
from tests.pipeline.conftest import pool as pool
from tests.trainer.small_disk import fill, small_disk
from trainer.learner.directories import DiskFull
from trainer.recipe import RolloutsRecipe
from trainer.rollouts.intake import StreamReader
from trainer.rollouts.recording import Keep, RolloutRecorder, is_kept

NUM_ROLLOUTS = 240
NUM_KILLS = 6


async def answered(pool: ArqRedis, **fields: object) -> str:
    claim = await claims.taken(pool, **fields)
    assert await stream.publish(pool, samples.trajectory(claim)) == "published"
    return claim.request.id


async def recorded(pool: ArqRedis, run_dir: Path, keep: Keep = "all") -> list[Stored]:
    """What the store has once everything on the stream was recorded."""

    async def accept(delivery: stream.Delivery) -> None: ...

    await stream.open_reader(pool, samples.RUN)
    with RolloutRecorder(pool, samples.RUN, run_dir, RolloutsRecipe(keep=keep)) as recorder:
        reader = StreamReader(pool, samples.RUN, accept, record=recorder.record)
        await reader.recover()
        while await reader.read(block_ms=1):
            pass
        await recorder.flush()
        return list(RolloutStore(run_dir / "rollouts").rollouts(lambda _: True))


async def test_finished_failed_and_dead_rollouts_are_stored(pool: ArqRedis, tmp_path: Path) -> None:
    finished = await answered(pool)
    dead = (await claims.dead_lettered(pool)).request.id
    held_out = await answered(pool, purpose="eval", group_id="final:0")
    stored = {one.head.head.request_id: one for one in await recorded(pool, tmp_path)}
    assert set(stored) == {finished, dead, held_out}
    assert stored[finished].rollout.trajectory is not None
    assert stored[dead].head.is_dead
    assert [one.message for one in stored[dead].rollout.failures] == ["container vanished"]


async def test_a_rollout_whose_body_is_gone_keeps_its_head(pool: ArqRedis, tmp_path: Path) -> None:
    request_id = await answered(pool)
    await pool.delete(keys.body(request_id))
    (stored,) = await recorded(pool, tmp_path)
    assert (stored.head.head.request_id, stored.rollout.trajectory) == (request_id, None)


async def test_a_dead_request_that_is_requeued_and_finishes_is_stored_as_finished(
    pool: ArqRedis, tmp_path: Path
) -> None:
    claim = await claims.dead_lettered(pool)
    assert [one.head.is_dead for one in await recorded(pool, tmp_path)] == [True]
    await deadletters.requeue(pool, samples.RUN, claim.request.id)
    again = await claims.claimed(pool, claim.request.id)
    await stream.publish(pool, samples.trajectory(again))
    (stored,) = await recorded(pool, tmp_path)
    assert (stored.head.is_dead, stored.head.head.outcome) == (False, "submitted")


async def test_nothing_is_stored_of_a_run_that_keeps_none(pool: ArqRedis, tmp_path: Path) -> None:
    await answered(pool)
    await claims.dead_lettered(pool)
    assert await recorded(pool, tmp_path, "none") == []
    assert not (tmp_path / "rollouts").exists()


def _head(number: int, *, reward: float | None = 1.0) -> TrajectoryHead:
    claim = claims.Claim(
        request=samples.request(group_id=f"g{number // 4}"), attempt=1, worker="w", claimed_at=1
    )
    return replace(head_of(samples.trajectory(claim), 0), reward=reward)


def test_a_share_keeps_whole_groups_and_every_failure() -> None:
    kept = [is_kept(_head(number), 0.25) for number in range(4000)]
    assert 0.2 < sum(kept) / len(kept) < 0.3
    assert all(len(set(kept[start : start + 4])) == 1 for start in range(0, 4000, 4))
    assert all(is_kept(_head(number, reward=None), 0.25) for number in range(100))


async def test_a_store_that_cannot_be_written_is_reported_before_anything_is_acknowledged(
    pool: ArqRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await answered(pool)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"rollouts cannot be written \(Not a directory\).*rollouts\.keep"):
        RolloutRecorder(pool, samples.RUN, tmp_path / "file", RolloutsRecipe())
    delivery = (await stream.newest_heads(pool, samples.RUN, 1))[0]
    recorder = RolloutRecorder(pool, samples.RUN, tmp_path, RolloutsRecipe())
    (tmp_path / "rollouts").rmdir()
    await recorder.record(delivery)
    with pytest.raises(ValueError, match="No such file or directory"):
        await recorder.flush()
    with pytest.raises(ValueError, match="No such file or directory"):
        await recorder.record(delivery)


async def test_rollouts_that_fill_their_disk_name_it_before_anything_is_acknowledged(
    pool: ArqRedis, tmp_path: Path
) -> None:
    await answered(pool)
    delivery = (await stream.newest_heads(pool, samples.RUN, 1))[0]

    async def recorded() -> None:
        with RolloutRecorder(pool, samples.RUN, tmp_path, RolloutsRecipe()) as recorder:
            await recorder.record(delivery)
            await recorder.flush()

    with small_disk(tmp_path / "rollouts", 64 * 1024) as disk:
        fill(disk)
        with pytest.raises(DiskFull, match=f"the disk at {disk} is full, so {disk} could not be written"):
            await recorded()


@pytest.mark.slow
async def test_a_trainer_that_is_killed_loses_no_acknowledged_rollout_and_stores_each_once(
    pool: ArqRedis, redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    await stream.open_reader(pool, samples.RUN)
    ids: set[str] = set()
    publishing = asyncio.create_task(_publish(redis_url, ids))
    drawn = random.Random(7)
    for _ in range(NUM_KILLS):
        with _reading(redis_url, tmp_path) as process:
            for _ in range(drawn.randrange(1, 6)):
                assert await asyncio.to_thread(process.stdout.readline)
            await asyncio.sleep(drawn.uniform(0, 0.02))
            process.kill()
        assert await _acknowledged(redis) <= _stored(tmp_path)
    await publishing
    with _reading(redis_url, tmp_path) as process:
        while len(await _acknowledged(redis)) < NUM_ROLLOUTS:
            assert await asyncio.to_thread(process.stdout.readline)
        process.kill()
    assert _copies(tmp_path) == Counter(dict.fromkeys(ids, 1))


def _reading(redis_url: str, run_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.trainer.rollouts.reading_trainer"]
    command += [redis_url, str(run_dir), samples.RUN]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


async def _publish(redis_url: str, ids: set[str]) -> None:
    pool = await connection.connect(redis_url)
    while len(ids) < NUM_ROLLOUTS:
        ids.add(await answered(pool))
        await asyncio.sleep(0.02)
    await pool.aclose()


async def _acknowledged(redis: Redis) -> set[str]:
    """Delivered, and no longer pending."""
    (group,) = await redis.xinfo_groups(keys.stream(samples.RUN))
    pending = await redis.xpending_range(keys.stream(samples.RUN), stream.GROUP, "-", "+", 10_000)
    waiting = {row["message_id"].decode() for row in pending}
    entries = await redis.xrange(keys.stream(samples.RUN), max=group["last-delivered-id"])
    read = {entry.decode() for entry, _ in entries}
    heads = await stream.newest_heads(redis, samples.RUN, 10_000)
    return {one.head.request_id for one in heads if one.entry_id in read - waiting}


def _stored(run_dir: Path) -> set[str]:
    return set(_copies(run_dir))


def _copies(run_dir: Path) -> Counter[str]:
    sound = RolloutStore(run_dir / "rollouts").rollouts(lambda _: True)
    return Counter(
        one.head.head.request_id for one in sound if one.rollout.trajectory is not None and not one.fault
    )
