"""A pool as trainer and workers use it, on the Redis of the session."""

from collections.abc import AsyncIterator

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from pipeline import connection, queue


@pytest.fixture(autouse=True)
def _claims_outlast_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: leases lapse where a test says so."""
    monkeypatch.setattr(queue, "LEASE_S", 3600.0)


@pytest.fixture
async def pool(redis: Redis, redis_url: str) -> AsyncIterator[ArqRedis]:
    """Speaks to arq's queue; the database is empty at first."""
    pool = await connection.connect(redis_url)
    yield pool
    await pool.aclose()
