"""Versions only go up, and what engines confirmed can be read back."""

import pytest
from redis.asyncio import Redis

from pipeline import weights
from pipeline.weights import ServedWeights, WeightVersion


def version(number: int, run_id: str = "laptop") -> WeightVersion:
    return WeightVersion(
        run_id=run_id,
        version=number,
        step=number,
        directory=f"/weights/v{number}",
        num_bytes=1,
        published_at=1.0,
    )


async def test_the_newest_version_is_the_last_announced(redis: Redis) -> None:
    assert await weights.newest_version(redis, "laptop") is None
    await weights.announce(redis, version(0))
    await weights.announce(redis, version(3))
    await weights.announce(redis, version(1, run_id="another"))
    assert await weights.newest_version(redis, "laptop") == version(3)


@pytest.mark.parametrize("number", [2, 3])
async def test_a_version_is_never_announced_twice_nor_an_older_one_after_it(
    redis: Redis, number: int
) -> None:
    await weights.announce(redis, version(3))
    with pytest.raises(ValueError, match="not above the newest announced, 3"):
        await weights.announce(redis, version(number))


async def test_what_engines_confirmed_is_read_back(redis: Redis) -> None:
    served = ServedWeights(version=3, engines=("http://a",), quarantined=("http://b",), confirmed_at=2.0)
    assert await weights.served_weights(redis, "laptop") is None
    await weights.record_served(redis, "laptop", served)
    assert await weights.served_weights(redis, "laptop") == served


def test_the_base_of_a_runs_adapters_is_no_version_of_the_run_and_yet_its_own() -> None:
    name = weights.base_name("laptop-20260101-120000")
    assert weights.parse_version_name(name)[0] != "laptop-20260101-120000"
    assert weights.run_of(name) == weights.run_of("laptop-20260101-120000@7") == "laptop-20260101-120000"
    with pytest.raises(ValueError, match="not a published weight version"):
        weights.run_of("0")
