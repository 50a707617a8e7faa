"""Judging begins when the rollout is over: no container is held while a judge works. The spans of real processes say so."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from arq.connections import ArqRedis

from infra import processes
from pipeline import keys, queue, stream, telemetry
from pipeline.judge import Judge
from pipeline.kinds import JUDGE
from tests.workers.conftest import RepoImage
from tests.workers.judge.rollouts import judge_request

pytestmark = pytest.mark.docker

PATIENCE_S = 240.0
SLOW = "import time\n\ndef slow(issue, turns, index):\n    time.sleep(0.05)\n    return 1.0\n"


# Quick: judging holds no container.
async def test_a_rollouts_container_is_gone_before_its_judging_begins(
    pool: ArqRedis, redis_url: str, repo_image: RepoImage, tiny_model: Path, tmp_path: Path
) -> None:
    spans = tmp_path / "spans.jsonl"
    environment = os.environ | {"SWERVE_REDIS_URL": redis_url, "SWERVE_TRACE_FILE": str(spans)}
    words = [str(tiny_model), repo_image.tag, repo_image.commit]
    play = [sys.executable, "-m", "tests.workers.judge.traced_rollout", *words]
    played = await asyncio.to_thread(subprocess.run, play, env=environment, capture_output=True, text=True)
    assert played.returncode == 0, played.stderr
    (rollout,) = await stream.newest_heads(pool, "run", 9)
    assert rollout.head.reward == 1.0, "it was played and graded"

    await _judge(pool, telemetry.group_wait(rollout.head.request_id), environment, tmp_path)
    found = [json.loads(line) for line in spans.read_text().splitlines()]
    (judging,) = [one for one in found if one["name"] == "judge attempt"]
    whole = [one for one in found if one["name"] in ("rollout attempt", "agent", "grade", "container")]
    assert [one["attributes"]["swerve.role"] for one in whole if one["name"] == "container"] == [
        "agent",
        "grade",
    ]
    assert {one["trace_id"] for one in [*whole, judging]} == {judging["trace_id"]}, "one trace"
    (of_rollout,) = [one for one in whole if one["name"] == "rollout attempt"]
    assert rollout.head.traceparent.split("-")[2] == of_rollout["span_id"]
    assert judging["parent_id"] == telemetry.parts(telemetry.group_wait("traced"))[1], "beside the attempt"
    assert all(one["ended_ns"] < judging["started_ns"] for one in whole)
    assert judging["attributes"]["swerve.outcome"] == "judged"


async def _judge(pool: ArqRedis, traceparent: str, environment: dict[str, str], tmp_path: Path) -> None:
    """Judge the rollout by a process that cannot reach a Docker host."""
    file = tmp_path / "mine.py"
    file.write_text(SLOW)
    request = judge_request(
        "traced", Judge(method="function", name="slow"), run_id="run", traceparent=traceparent
    )
    await queue.enqueue(pool, request, JUDGE)
    own = environment | {"SWERVE_JUDGE_FUNCTIONS": f"{file}:slow", "DOCKER_HOST": "tcp://127.0.0.1:1"}
    command = [sys.executable, "-m", "workers.judge"]
    child = processes.start("judge", command, log=tmp_path / "judge.log", environment=own)
    try:
        await _published(pool, request.id)
        child.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.process.wait, PATIENCE_S) == 0, "its last spans are written"
    finally:
        child.stop(grace_s=10)


async def _published(pool: ArqRedis, request_id: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not await pool.exists(keys.published(request_id, JUDGE)):
        assert time.monotonic() < deadline, "no judgement"
        await asyncio.sleep(0.02)
