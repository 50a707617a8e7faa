"""A model behind a server, evaluated by the fleet: real queue and stream, scripted workers."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from benchmarks.scripted_fleet import fleet, task, work_off
from pipeline import connection, deadletters, keys, queue, stream
from pipeline.request import Claim, RolloutRequest
from pipeline.rollout_store.reading import RolloutStore
from pipeline.taskfile import write_tasks
from trainer.evaluate.results import EpisodeResult, Manifest

AGENT = Path("workers/agent/prompts/default.yaml")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_tasks(tmp_path / "tasks.jsonl", [task(f"bench:h{i}") for i in range(3)])
    return tmp_path / "tasks.jsonl"


@pytest.fixture
async def pool(redis_url: str, redis: Redis) -> AsyncIterator[ArqRedis]:
    pool = await connection.connect(redis_url)
    yield pool
    await pool.aclose()


async def start(redis_url: str, tasks: Path, *options: str) -> Process:
    where = ("--api-base", "http://x/v1", "--model", "m", "--agent", str(AGENT))
    return await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "trainer.evaluate",
            str(tasks),
            *where,
            "--out",
            str(out_of(tasks)),
            *options,
        ),
        stdout=PIPE,
        stderr=PIPE,
        env=os.environ | {"SWERVE_REDIS_URL": redis_url},
    )


def out_of(tasks: Path) -> Path:
    return tasks.with_name("out")


def rows(tasks: Path) -> list[EpisodeResult]:
    record = out_of(tasks) / "results.jsonl"
    lines = record.read_bytes().splitlines() if record.exists() else []
    return [msgspec.json.decode(line, type=EpisodeResult) for line in lines]


def run_id(tasks: Path) -> str:
    return msgspec.json.decode((out_of(tasks) / "evaluation.json").read_bytes(), type=Manifest).run_id


def verdict(request: RolloutRequest) -> float | None:
    """h0 always, h1 every second time, h2 breaks."""
    return {"bench:h0": 1.0, "bench:h1": float(request.member % 2)}.get(request.task.id)


async def waiting(redis: Redis, number: int) -> None:
    while await redis.zcard(keys.queue()) < number:  # noqa: ASYNC110 - another process enqueues
        await asyncio.sleep(0.05)


async def test_the_fleet_plays_and_what_broke_is_told_apart_from_what_failed(
    tasks: Path, redis_url: str, redis: Redis
) -> None:
    async with fleet(redis_url, verdict):
        process = await start(redis_url, tasks, "--samples", "2")
        out, err = await process.communicate()
    assert process.returncode == 1, err.decode()
    assert {row.key: row.resolved for row in rows(tasks)} == {
        ("bench:h0", 0): True,
        ("bench:h0", 1): True,
        ("bench:h1", 0): False,
        ("bench:h1", 1): True,
        ("bench:h2", 0): None,
        ("bench:h2", 1): None,
    }
    assert {row.error for row in rows(tasks) if row.resolved is None} == {"the container vanished"}
    assert b"of them 2 without a verdict" in out
    assert b"(the container vanished)" in err
    assert await queue.open_ids(redis, run_id(tasks)) == []
    kept = [stored.head for stored in RolloutStore(out_of(tasks) / "rollouts").heads()]
    assert sorted((head.task_id, head.member) for head in kept) == sorted(row.key for row in rows(tasks))


async def test_a_redis_that_has_forgotten_the_evaluation_is_asked_again(
    tasks: Path, redis_url: str, redis: Redis
) -> None:
    process = await start(redis_url, tasks)
    await waiting(redis, 3)
    await redis.flushdb()
    async with fleet(redis_url, lambda _: 1.0):
        _, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert [row.resolved for row in rows(tasks)] == [True] * 3
    assert await queue.open_ids(redis, run_id(tasks)) == []


async def test_a_request_names_the_server_and_no_tokenizer(
    tasks: Path, redis_url: str, pool: ArqRedis
) -> None:
    process = await start(
        *(redis_url, tasks, "--max-instances", "1", "--temperature", "0.5", "--step-limit", "7"),
        *("--agent", "environment.cwd=/elsewhere"),
    )
    await waiting(pool, 1)
    (claim,) = await queue.take(pool, "w", 1)
    assert isinstance(claim, Claim)
    request = claim.request
    assert request.endpoint is not None
    assert (request.endpoint.api_base, request.endpoint.model, request.tokenizer) == ("http://x/v1", "m", "")
    assert (request.endpoint.options, request.limits.turns, request.purpose) == (
        {"temperature": 0.5},
        7,
        "eval",
    )
    process.send_signal(signal.SIGTERM)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"warning: environment.cwd is /elsewhere" in err
    assert await queue.open_ids(pool, run_id(tasks)) == [], "nobody waits for it any more"


async def test_after_a_kill_outstanding_episodes_are_taken_over_and_finished_ones_are_read(
    tasks: Path, redis_url: str, pool: ArqRedis
) -> None:
    first = await start(redis_url, tasks)
    await waiting(pool, 3)
    first.kill()
    await first.communicate()
    (played,) = await work_off(pool, limit=1)  # while nobody listens
    before = set(await queue.open_ids(pool, run_id(tasks)))
    second = await start(redis_url, tasks)
    async with fleet(redis_url, lambda _: 1.0) as answered:
        await second.communicate()
    assert second.returncode == 0
    assert {*answered, played} == before, "nothing was enqueued twice"
    assert sorted(row.instance_id for row in rows(tasks)) == ["h0", "h1", "h2"]
    assert await queue.open_ids(pool, run_id(tasks)) == []
    assert await stream.read_unacknowledged(pool, run_id(tasks)) == []
    assert await deadletters.unanswered(pool, run_id(tasks)) == []
