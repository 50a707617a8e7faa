from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from arq import ArqRedis
from redis.asyncio import Redis

from pipeline import connection
from trainer.records.journal_writer import Journal


@pytest.fixture
async def pool(redis_url: str, redis: Redis) -> AsyncIterator[ArqRedis]:
    pool = await connection.connect(redis_url)
    yield pool
    await pool.aclose()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "journal") as journal:
        yield journal
