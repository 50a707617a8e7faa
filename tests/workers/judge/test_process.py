"""`python -m workers.judge` as a process: it judges what is in the queue, needs no Docker, and says what is wrong with its settings."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from arq.connections import ArqRedis

from infra import processes
from pipeline import census, deadletters, keys, stream
from pipeline.judge import Judge, Judgement
from pipeline.kinds import JUDGE
from tests.pipeline import samples
from tests.workers.judge.rollouts import judging_enqueued, published

PATIENCE_S = 240.0


@asynccontextmanager
async def judge(redis_url: str, log: Path, **environment: str) -> AsyncIterator[processes.Child]:
    """A judge process that hears no Docker host."""
    own = os.environ | {"SWERVE_REDIS_URL": redis_url, "DOCKER_HOST": "tcp://127.0.0.1:1", **environment}
    child = processes.start("judge", [sys.executable, "-m", "workers.judge"], log=log, environment=own)
    try:
        yield child
    finally:
        child.stop(grace_s=10)


async def judgement_of(pool: ArqRedis, request_id: str) -> Judgement:
    deadline = time.monotonic() + PATIENCE_S
    while not await pool.exists(keys.published(request_id, JUDGE)):
        assert time.monotonic() < deadline, "no judgement"
        await asyncio.sleep(0.02)
    found = await stream.read_body(pool, request_id, JUDGE)
    assert found is not None
    return found


async def only_worker(pool: ArqRedis) -> census.WorkerStatus:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := (await census.workers(pool))[0]):
        assert time.monotonic() < deadline, "no heartbeat"
        await asyncio.sleep(0.02)
    (status,) = found
    return status


async def test_a_judge_scores_rollouts_by_rules_and_by_its_operators_functions(
    pool: ArqRedis, redis_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def first(issue, turns, index):\n    return 1 if index == 0 else None\n")
    made = await published(pool)
    other = await published(pool)
    rule = await judging_enqueued(pool, made.claim.request.id, Judge(method="rule", name="commands"))
    mine = await judging_enqueued(pool, other.claim.request.id, Judge(method="function", name="first"))
    async with judge(redis_url, tmp_path / "log", SWERVE_JUDGE_FUNCTIONS=f"{file}:first") as child:
        assert (await judgement_of(pool, rule.id)).scores == {2: -1.0, 3: 1.0}
        assert (await judgement_of(pool, mine.id)).scores == {0: 1.0}
        status = await only_worker(pool)
        assert (status.kind, status.slots, status.paused) == ("judge", 8, "")
        assert "SWERVE_JUDGE_ROUTER_URL is empty" in status.set_aside
        child.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.process.wait, PATIENCE_S) == 0
    assert (await census.workers(pool))[0] == []
    heads = await stream.newest_heads(pool, samples.RUN, 10, JUDGE)
    assert {one.head.request_id for one in heads} == {rule.id, mine.id}


@pytest.mark.slow
async def test_a_function_that_raises_is_tried_again_and_then_dead_lettered(
    pool: ArqRedis, redis_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def broken(issue, turns, index):\n    return turns[99]\n")
    made = await published(pool)
    request = await judging_enqueued(pool, made.claim.request.id, Judge(method="function", name="broken"))
    async with judge(redis_url, tmp_path / "log", SWERVE_JUDGE_FUNCTIONS=f"{file}:broken"):
        judgement = await judgement_of(pool, request.id)
    assert judgement.scores == {}
    letter = (await deadletters.listed(pool, samples.RUN, JUDGE))[request.id]
    assert (letter.kind, len(letter.failures)) == ("infrastructure", 2)
    assert "IndexError" in letter.failures[-1].detail


@pytest.mark.parametrize(
    ("variable", "text", "fix"),
    [
        ("SWERVE_JUDGE_SLOTS", "no", "SWERVE_JUDGE_SLOTS='no': give a whole number of at least 1"),
        ("SWERVE_JUDGE_FUNCTIONS", "mine.py", "SWERVE_JUDGE_FUNCTIONS: 'mine.py': write it as"),
        ("SWERVE_JUDGE_FUNCTIONS", "/none/mine.py:f", "has to be importable"),
    ],
)
def test_a_wrong_setting_is_named(variable: str, text: str, fix: str) -> None:
    command = [sys.executable, "-m", "workers.judge"]
    environment = os.environ | {variable: text}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert fix in ended.stderr
