"""Why there is no connection to Redis is said in one line with the fix, and never with the password."""

import itertools
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from infra.redis_server import FORGETFUL, own_redis
from pipeline import connection, queue
from pipeline.connection import RedisUnavailable, RedisUnreachable
from pipeline.redis_calls import command
from tests.conftest import free_ports
from tests.pipeline import samples

NOBODY = "redis://:s3cret@127.0.0.1:1/0"


@pytest.fixture
async def locked(pool: ArqRedis, redis_url: str) -> AsyncIterator[str]:
    """The URL of a Redis with a password, without it."""
    await pool.config_set("requirepass", "s3cret")
    yield redis_url
    await pool.config_set("requirepass", "")


def with_login(url: str, login: str) -> str:
    return url.replace("unix://", f"unix://{login}@")


async def refusal(url: str, patience_s: float = 30) -> RedisUnavailable:
    with pytest.raises(RedisUnavailable) as caught:
        await connection.connect(url, patience_s=patience_s)
    assert "s3cret" not in str(caught.value)
    assert "wr0ng" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


async def test_a_password_opens_and_a_wrong_one_does_not_over_tcp_as_well() -> None:
    (port,) = free_ports(1)
    with own_redis({**FORGETFUL, "requirepass": "s3cret", "port": str(port)}):
        redis = await connection.connect(f"redis://:s3cret@127.0.0.1:{port}/0")
        await queue.enqueue(redis, samples.request())
        await redis.aclose()
        said = await refusal(f"redis://:wr0ng@127.0.0.1:{port}/0")
        assert "refuses the password" in str(said)
        said = await refusal(f"redis://:s3cret@127.0.0.1:{port}/99")
        assert "DB index is out of range" in str(said)
        assert not isinstance(said, RedisUnreachable)


@pytest.mark.parametrize("login", [":wr0ng", "somebody:s3cret"])
async def test_a_wrong_password_is_said_without_another_try(
    locked: str, login: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = await refusal(with_login(locked, login))
    assert "refuses the password" in str(said)
    assert "set SWERVE_REDIS_URL to redis://[USER:]PASSWORD@HOST:PORT/DB" in str(said)
    assert not isinstance(said, RedisUnreachable)
    assert not [row for row in caplog.records if row.levelno >= logging.WARNING]


async def test_a_missing_password_is_said_without_another_try(locked: str) -> None:
    said = await refusal(locked)
    assert "wants a password" in str(said)
    assert not isinstance(said, RedisUnreachable)


async def test_a_user_that_may_not_use_our_keys_is_told_so(pool: ArqRedis, redis_url: str) -> None:
    await command(pool, "ACL", "SETUSER", "limited", "on", ">s3cret", "~other:*", "+@all")
    try:
        said = await refusal(with_login(redis_url, "limited:s3cret"))
    finally:
        await command(pool, "ACL", "DELUSER", "limited")
    assert "grant all commands on the keys swerve:* and arq:*" in str(said)
    assert not isinstance(said, RedisUnreachable)


async def test_a_redis_that_starts_is_waited_for_and_one_that_does_not_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock of its own, so that the first try does not use up the patience, however long it takes.
    clock = itertools.count()
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    said = await refusal(NOBODY, patience_s=1.5)
    assert isinstance(said, RedisUnreachable)
    assert str(said).startswith("Redis at redis://:***@127.0.0.1:1/0 does not answer")
    assert "start it, or set SWERVE_REDIS_URL" in str(said)
    assert "trying for" in caplog.text
    assert "s3cret" not in caplog.text


async def test_a_full_redis_lets_everybody_in(pool: ArqRedis, redis_url: str) -> None:
    await pool.config_set("maxmemory", 1)
    try:
        redis: Redis = await connection.connect(redis_url)
        await redis.aclose()
    finally:
        await pool.config_set("maxmemory", 0)
