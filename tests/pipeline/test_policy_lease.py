"""One policy per fleet: who may publish weights to the engines of a Redis."""

from redis.asyncio import Redis

from pipeline import keys, weights
from pipeline.weights import PolicyHolder


async def test_a_second_run_is_told_who_holds_the_lease(redis: Redis) -> None:
    first = PolicyHolder("first", host="here", pid=7)
    assert await weights.acquire(redis, first) is None
    assert await weights.acquire(redis, PolicyHolder("second")) == first
    assert str(first) == "run first (process 7 on here)"


async def test_a_run_takes_over_the_lease_of_its_own_earlier_process(redis: Redis) -> None:
    killed, restarted = PolicyHolder("run"), PolicyHolder("run")
    assert await weights.acquire(redis, killed) is None
    assert await weights.acquire(redis, restarted) is None
    assert await weights.renew(redis, killed) == restarted, "it must not go on beside its successor"
    assert await weights.renew(redis, restarted) is None


async def test_a_lease_that_nobody_renews_expires_by_itself(redis: Redis) -> None:
    await weights.acquire(redis, PolicyHolder("gone"))
    assert 0 < await redis.pttl(keys.policy_lease()) <= 1000 * weights.LEASE_S
    await redis.pexpire(keys.policy_lease(), 0)
    assert await weights.acquire(redis, PolicyHolder("next")) is None


async def test_a_lease_lasts_as_long_as_it_says_from_each_renewal(redis: Redis) -> None:
    holder = PolicyHolder("run")
    for hold in (weights.acquire, weights.renew):
        seconds, microseconds = await redis.time()
        await hold(redis, holder)
        lasts_ms = await redis.pexpiretime(keys.policy_lease()) - (1000 * seconds + microseconds // 1000)
        assert lasts_ms >= 1000 * weights.LEASE_S


async def test_a_holder_whose_lease_expired_takes_it_again_unless_another_has_it(redis: Redis) -> None:
    slow, quick = PolicyHolder("slow"), PolicyHolder("quick")
    await weights.acquire(redis, slow)
    await redis.delete(keys.policy_lease())
    assert await weights.renew(redis, slow) is None
    await redis.delete(keys.policy_lease())
    assert await weights.acquire(redis, quick) is None
    assert await weights.renew(redis, slow) == quick


async def test_a_released_lease_is_free_at_once_and_only_its_holder_can_release_it(redis: Redis) -> None:
    first, second = PolicyHolder("first"), PolicyHolder("second")
    await weights.acquire(redis, first)
    await weights.release(redis, second)
    assert await weights.acquire(redis, second) == first
    await weights.release(redis, first)
    assert await weights.acquire(redis, second) is None


async def test_a_full_redis_has_room_for_the_lease(redis: Redis) -> None:
    holder = PolicyHolder("run")
    await redis.config_set("maxmemory", 1)
    try:
        assert await weights.acquire(redis, holder) is None
        assert await weights.renew(redis, holder) is None
        await weights.release(redis, holder)
    finally:
        await redis.config_set("maxmemory", 0)
