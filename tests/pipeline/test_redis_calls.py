"""Which refusals of a real Redis are waited out."""

import pytest
from arq.connections import ArqRedis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from pipeline import queue, redis_calls
from tests.pipeline import samples


async def refusal(pool: ArqRedis, *words: str | int) -> RedisError:
    with pytest.raises(RedisError) as caught:
        await redis_calls.command(pool, *words)
    return caught.value


@pytest.mark.parametrize(
    ("setting", "off"), [(("maxmemory", 1), ("maxmemory", 0)), (("min-replicas-to-write", 1), ("min-replicas-to-write", 0))]
)  # fmt: skip
async def test_a_redis_that_takes_no_writes_for_now_is_waited_for(
    pool: ArqRedis, setting: tuple[str, int], off: tuple[str, int]
) -> None:
    await pool.config_set(*setting)
    try:
        assert redis_calls.is_outage(await refusal(pool, "SET", "k", "v"))
        with pytest.raises(RedisError) as caught:
            await queue.enqueue(pool, samples.request())
        assert redis_calls.is_outage(caught.value), "a script's refusal too"
        with redis_calls.tolerating_outage():
            await queue.enqueue(pool, samples.request())
    finally:
        await pool.config_set(*off)


async def test_a_redis_whose_disk_fails_is_waited_for(pool: ArqRedis) -> None:
    error = await refusal(pool, "EVAL", "return redis.error_reply('MISCONF unable to persist on disk')", 0)
    assert redis_calls.is_outage(error)


async def test_the_pauses_between_tries_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def no_pause(seconds: float) -> float:
        pauses.append(seconds)
        return 0.0

    async def away() -> str:
        if len(pauses) < 6:
            raise RedisConnectionError("away")
        return "answer"

    monkeypatch.setattr(redis_calls, "jittered", no_pause)
    assert await redis_calls.until_answered(away, longest_pause_s=1.0) == "answer"
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


async def test_a_key_of_the_wrong_kind_is_no_outage(pool: ArqRedis) -> None:
    await pool.set("k", "v")
    error = await refusal(pool, "LPUSH", "k", "v")
    assert not redis_calls.is_outage(error)
    with pytest.raises(RedisError, match="WRONGTYPE"), redis_calls.tolerating_outage():
        raise error
