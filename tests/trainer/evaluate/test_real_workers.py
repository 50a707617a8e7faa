"""A model behind a server, evaluated by real worker processes over Redis: real containers and grader, no engine of ours."""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from benchmarks import bug
from infra import processes
from pipeline.taskfile import write_tasks
from tests.trainer.evaluate.chat_server import chat_server
from trainer.evaluate.results import EpisodeResult

pytestmark = [pytest.mark.docker, pytest.mark.slow]

RIGHT = bug.replies((bug.FIX, "git diff", bug.SUBMIT))
WRONG = bug.replies((bug.FIX.replace("100", "10"), bug.SUBMIT))
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def worker(redis_url: str, tmp_path: Path, task_image: str) -> Iterator[processes.Child]:
    """`python -m workers.run` without engines."""
    with bug.image():
        environment = os.environ | {
            "SWERVE_REDIS_URL": redis_url,
            "SWERVE_ROUTER_URL": "",
            "SWERVE_WORKER_NAME": "evaluator",
            "SWERVE_SLOTS": "2",
        }
        command = [sys.executable, "-m", "workers.run"]
        child = processes.start("evaluator", command, log=tmp_path / "worker.log", environment=environment)
        yield child
        child.stop(grace_s=10)


def script(task: str) -> Sequence[str]:
    return WRONG if "wrongly" in task else RIGHT


async def test_real_workers_play_and_grade_for_a_model_behind_a_server(
    worker: processes.Child, redis_url: str, redis: Redis, tmp_path: Path
) -> None:
    one, out = bug.task(), tmp_path / "out"
    problems = {"bench:right": one.problem, "bench:wrong": one.problem + " Do it wrongly."}
    write_tasks(
        tmp_path / "tasks.jsonl", [replace(one, id=id, problem=text) for id, text in problems.items()]
    )
    async with chat_server(script) as server:
        evaluation = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "trainer.evaluate", str(tmp_path / "tasks.jsonl"), "--samples", "2"),
            *("--api-base", server.url, "--model", "m", "--out", str(out)),
            *("--agent", str(REPOSITORY / "workers/agent/prompts/default.yaml")),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"SWERVE_REDIS_URL": redis_url},
        )
        try:
            printed, errors = await evaluation.communicate()
        finally:
            if evaluation.returncode is None:
                evaluation.kill()
    assert evaluation.returncode == 0, errors.decode() + (tmp_path / "worker.log").read_text()[-2000:]
    lines = (out / "results.jsonl").read_bytes().splitlines()
    results = [msgspec.json.decode(line, type=EpisodeResult) for line in lines]
    assert {row.key: row.resolved for row in results} == {
        ("bench:right", 0): True,
        ("bench:right", 1): True,
        ("bench:wrong", 0): False,
        ("bench:wrong", 1): False,
    }
    assert b"50.0" in printed
