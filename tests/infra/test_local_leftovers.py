import asyncio
from pathlib import Path

from redis.asyncio import Redis

from infra.local import __main__ as local
from pipeline import connection, queue, stream
from pipeline.kinds import JUDGE
from tests.pipeline import judging, samples


def a_run(place: Path, run_id: str) -> None:
    place.mkdir()
    (place / "run.json").write_text(f'{{"run_id": "{run_id}", "started_at": 1.0}}')


def test_a_run_is_abandoned_when_it_was_set_aside_or_is_to_be_forgotten(tmp_path: Path) -> None:
    for name in ("demo", "demo-seed1", "demo-seed1-20260101-000000", "other-seed1"):
        a_run(tmp_path / name, f"run of {name}")
    aside = {"run of demo-seed1", "run of demo-seed1-20260101-000000"}
    assert set(local.abandoned_runs(tmp_path / "demo", fresh=False)) == aside
    assert set(local.abandoned_runs(tmp_path / "demo", fresh=True)) == aside | {"run of demo"}


def test_requests_of_an_abandoned_run_are_withdrawn_and_its_trajectories_stay(redis_url: str) -> None:
    async def ask() -> None:
        redis = await connection.connect(redis_url)
        await redis.flushdb()
        for run_id in ("old", "old", "old", "new"):
            await queue.enqueue(redis, samples.request(run_id=run_id))
        await judging.enqueued(redis, run_id="old")
        (claim,) = await queue.take(redis, "worker", 1)
        assert isinstance(claim, samples.Claim)
        await stream.publish(redis, samples.trajectory(claim))
        await redis.aclose()

    async def left() -> tuple[int, ...]:
        async with Redis.from_url(redis_url) as redis:
            open_ids = [len(await queue.open_ids(redis, run_id)) for run_id in ("old", "new")]
            judge_ids = await queue.open_ids(redis, "old", JUDGE)
            return (*open_ids, len(judge_ids), len(await stream.newest_heads(redis, "old", 10)))

    asyncio.run(ask())
    assert local.cancel_requests(redis_url, ["old"]) == 3
    assert asyncio.run(left()) == (1, 1, 0, 1)
