"""Two runs on one Redis and its engines, as processes: the second is refused, and who lost the engines ends itself."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pipeline import keys
from pipeline.journal.reading import read
from pipeline.journal.rows import EndRow
from pipeline.weights import PolicyHolder
from tests.trainer.processes import TrainerProcess, keep_engines, sets, start
from tests.trainer.processes import recipe as recipe

OTHER = PolicyHolder("other", host="elsewhere", pid=7)


@pytest.fixture(autouse=True)
def _no_engine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWERVE_ROUTER_URL", "http://127.0.0.1:1")
        yield


async def begin(redis_url: str, recipe: Path, *arguments: str | Path) -> TrainerProcess:
    where = ("--run-dir", recipe.parent / "run")
    return await start(redis_url, recipe, *where, *arguments, *sets("weights.engines=router"))


async def until_it_holds(redis: Redis, trainer: TrainerProcess) -> None:
    while await redis.hget(keys.policy_lease(), "run") != b"mine":
        assert trainer.process.returncode is None, trainer.output
        await asyncio.sleep(0.02)


# Quick: two runs never share engines.
async def test_a_second_run_is_refused_with_the_name_of_the_first(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    await keep_engines(redis, OTHER)
    trainer = await begin(redis_url, recipe)
    assert await trainer.ended() == 2
    assert "the engines of this Redis serve run other (process 7 on elsewhere)" in trainer.output
    assert "Stop that process first (if it is gone already, wait 15 s)" in trainer.output
    assert "Traceback" not in trainer.output
    assert not (recipe.parent / "run").exists()


@pytest.mark.slow
async def test_a_killed_trainer_is_resumed_at_once_and_an_ended_one_frees_the_engines(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    killed = await begin(redis_url, recipe, "--run-id", "mine")
    await until_it_holds(redis, killed)
    await killed.kill()
    token = await redis.hget(keys.policy_lease(), "token")
    resumed = await begin(redis_url, recipe, "--resume")
    await resumed.reaches(lambda: "waiting for one" in resumed.output)
    assert await redis.hget(keys.policy_lease(), "token") != token
    resumed.process.terminate()
    assert await resumed.ended() == 0, resumed.output
    assert await redis.exists(keys.policy_lease()) == 0


@pytest.mark.slow
async def test_a_trainer_whose_lease_was_taken_over_ends_itself_and_says_by_whom(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    trainer = await begin(redis_url, recipe, "--run-id", "mine")
    await trainer.reaches(lambda: "waiting for one" in trainer.output)
    async with redis.pipeline() as pipe:  # as after an outage longer than the lease
        pipe.delete(keys.policy_lease())
        pipe.hset(
            keys.policy_lease(), mapping={"run": "other", "token": "t", "host": "elsewhere", "pid": "7"}
        )
        await pipe.execute()
    assert await trainer.ended() == 0, trainer.output
    (end,) = read(recipe.parent / "run" / "journal", EndRow)
    assert end.reason == "stopped"
    assert end.detail.endswith("run other (process 7 on elsewhere) took the engines over")
    assert await redis.hget(keys.policy_lease(), "run") == b"other", "it left the other's lease alone"
