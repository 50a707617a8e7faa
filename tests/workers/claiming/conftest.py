"""Short intervals, and a connection to an empty Redis."""

from collections.abc import AsyncIterator

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from pipeline import connection
from workers import breaker, claim, process


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "RENEW_S", 0.2)
    monkeypatch.setattr(claim, "OUTAGE_WAIT_S", 0.02)
    monkeypatch.setattr(process, "IDLE_S", 0.1)
    monkeypatch.setattr(process, "PAUSE_S", 0.02)
    for name in ("WATCH_S", "FIRST_WAIT_S", "LONGEST_WAIT_S", "TRIAL_S"):
        monkeypatch.setattr(breaker, name, 0.05)
    monkeypatch.setattr(breaker, "HOLDERS_FIRST_S", 1.0)


@pytest.fixture
async def pool(redis: Redis, redis_url: str) -> AsyncIterator[ArqRedis]:
    pool = await connection.connect(redis_url)
    yield pool
    await pool.aclose()
