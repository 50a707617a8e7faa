"""A server of the pages on a port of its own, and the directory of a run that it shows."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from arq.connections import ArqRedis
from redis.asyncio import Redis

from infra.web.actions import ActionLog, DeadLetters
from infra.web.app import RunServer, make_app
from infra.web.fleet import RedisReader
from infra.web.runs import RunCatalogue
from pipeline import connection
from tests.infra.web.example_run import (
    NO_REDIS,
    Client,
    Serve,
    append,
    finished,
    judging,
    settled,
    step,
    store,
)
from tests.pipeline import samples


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts a server for the directories; without a URL there is no Redis."""
    clients: list[Client] = []
    readers: list[RedisReader] = []

    async def start(
        *roots: Path, redis_url: str = NO_REDIS, token: str | None = None, action_log: Path | None = None
    ) -> Client:
        reader = RedisReader(redis_url)
        app = make_app(
            RunServer(RunCatalogue(roots), reader),
            DeadLetters(reader, None if action_log is None else ActionLog(action_log)),
            token=token,
            checks_host=token is None,
        )
        client = TestClient(TestServer(app))
        await client.start_server()
        clients.append(client)
        readers.append(reader)
        return client

    yield start
    for client in clients:
        await client.close()
    for reader in readers:
        await reader.close()


@pytest.fixture
async def pool(redis: Redis, redis_url: str) -> AsyncIterator[ArqRedis]:
    """Speaks to arq's queue; the database is empty at first."""
    pool = await connection.connect(redis_url)
    yield pool
    await pool.aclose()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two groups: one was trained, the other taught nothing; a third rollout is not settled yet."""
    directory = tmp_path / "runs" / "mine"
    (directory / "journal").mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"run_id": samples.RUN, "started_at": 1000.0}))
    (directory / "recipe.toml").write_text("num_steps = 9\n")
    trained, same = finished("solved", reward=1.0), finished("unsolved", reward=0.0)
    store(directory, trained, same, finished("fresh", reward=0.0))
    append(directory, "steps", {**step(1, [trained.claim.request.id]), "judging": judging(num_judged=2)})
    append(directory, "episodes", settled(trained, "trained"), settled(same, "zero_variance"))
    append(directory, "publications", {"version": 4, "step": 1, "num_bytes": 7, "at": 2100.0})
    evaluation = {"name": "heldout_after", "version": 4, "step": 1, "success": 0.5, "at": 2200.0}
    append(directory, "evaluations", {**evaluation, "success_low": 0.2, "success_high": 0.8})
    return directory
