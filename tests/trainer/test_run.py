"""Whole runs of the trainer as a process, against a real Redis and a real learner; only the fleet is
scripted.
"""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pipeline import keys, queue, stream
from tests.trainer.scripted_fleet import fleet, task
from trainer.journal import EndRow, EpisodeRow, PublicationRow, StepRow, read
from trainer.tasksets.records import write_tasks

RECIPE = """
name = "tiny"
model = "{model}"
num_steps = 4
seed = 3
[tasks]
train = "train.jsonl"
heldout = "heldout.jsonl"
[rollout]
group_size = 4
agent = "agent.yaml"
[rollout.sampling]
max_new_tokens = 16
[rollout.limits]
context_tokens = 128
[admission]
max_lag_versions = 1
sweep_every_s = 0.5
[batch]
groups_per_step = 2
[learner]
lr = 1e-3
dtype = "fp32"
micro_batch_tokens = 128
snapshots_kept = 3
[weights]
engines = "none"
[checkpoint]
every_steps = 2
"""


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "agent.yaml").write_text("agent: {}\n")
    write_tasks(tmp_path / "train.jsonl", [task(f"t{i}") for i in range(5)])
    write_tasks(tmp_path / "heldout.jsonl", [task(f"h{i}") for i in range(3)])
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model=tiny_model))
    return path


class Trainer:
    """`python -m trainer.run` as a child, with everything it prints."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def output(self) -> str:
        return self.log.read_text()

    async def ended(self) -> int:
        return await self.process.wait()

    async def reaches(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.process.returncode is None, self.output
            await asyncio.sleep(0.02)

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


async def start(redis_url: str, *arguments: str | Path) -> Trainer:
    log = Path(str(arguments[0])).with_name(f"trainer-{os.urandom(3).hex()}.log")
    with log.open("w") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "trainer.run",
            *map(str, arguments),
            env={**os.environ, "SWERVE_REDIS_URL": redis_url, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=out,
        )
    return Trainer(process, log)


def steps(run: Path) -> list[StepRow]:
    return list(read(run / "journal", StepRow))


async def test_a_run_takes_its_steps_and_accounts_for_every_request(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url) as answered:
        trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "whole")
        assert await trainer.ended() == 0, trainer.output
    rows = steps(run)
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert all(row.num_gap_tokens == row.num_trained_tokens for row in rows)
    assert max(row.lag_max for row in rows) <= 1
    episodes = list(read(run / "journal", EpisodeRow))
    assert Counter(row.request_id for row in episodes) == Counter(set(answered))
    assert len(list(read(run / "journal", EndRow))) == 1
    assert [row.version for row in read(run / "journal", PublicationRow)] == [0, 1, 2, 3, 4]
    assert await queue.open_ids(redis, "whole") == []
    assert (await redis.xpending(keys.stream("whole"), stream.GROUP))["pending"] == 0


async def test_a_killed_trainer_resumes_without_losing_or_repeating_anything(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    async with fleet(redis_url):
        whole = await start(redis_url, recipe, "--run-dir", recipe.parent / "whole", "--run-id", "whole")
        assert await whole.ended() == 0, whole.output
        run = recipe.parent / "cut"
        cut = await start(redis_url, recipe, "--run-dir", run, "--run-id", "cut")
        await cut.reaches(lambda: len(steps(run)) == 3)
        await cut.kill()
        resumed = await start(redis_url, recipe, "--run-dir", run, "--resume")
        assert await resumed.ended() == 0, resumed.output
    assert "resumed from step-00000002" in resumed.output
    assert [row.loss for row in steps(run)] == [row.loss for row in steps(recipe.parent / "whole")]
    trained = Counter(request_id for row in steps(run) for request_id in row.request_ids)
    assert set(trained.values()) == {1}
    assert await queue.open_ids(redis, "cut") == []
    versions = [row.version for row in read(run / "journal", PublicationRow)]
    assert versions == sorted(set(versions)), "no version number is used twice"
