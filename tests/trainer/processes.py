"""The trainer as a process, with a real Redis and a real learner, and what is looked up about its runs."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import task
from infra import processes
from pipeline import keys, stream, weights
from pipeline.journal.reading import read
from pipeline.journal.rows import StepRow
from pipeline.taskfile import write_tasks
from pipeline.weights import PolicyHolder
from tests.trainer.forking import Forked, fork

RECIPE = """
name = "tiny"
model = "{model}"
num_steps = 4
seed = 3
[tasks]
train = "train.jsonl"
heldout = "heldout.jsonl"
unverified = "allow"  # nothing is graded here
[rollout]
group_size = 4
agent = "agent.yaml"
[rollout.sampling]
max_new_tokens = 16
[rollout.limits]
context_tokens = 512
[admission]
max_lag_versions = 1
sweep_every_s = 0.5
[batch]
groups_per_step = 2
[learner]
lr = 1e-3
dtype = "fp32"
micro_batch_tokens = 512
snapshots_kept = 3
[weights]
engines = "none"
[checkpoint]
every_steps = 2
"""


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Path) -> Path:
    return write_recipe(tmp_path, tiny_model)


def write_recipe(directory: Path, model: Path) -> Path:
    """A recipe and all that it names."""
    (directory / "agent.yaml").write_text(Path("trainer/recipes/demo_agent.yaml").read_text())
    write_tasks(directory / "train.jsonl", [task(f"t{i}") for i in range(5)])
    write_tasks(directory / "heldout.jsonl", [task(f"h{i}") for i in range(3)])
    path = directory / "recipe.toml"
    path.write_text(RECIPE.format(model=model))
    return path


class TrainerProcess:
    """`python -m trainer.run` as a process of its own, with everything it prints."""

    def __init__(self, process: Forked | subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def output(self) -> str:
        return self.log.read_text()

    async def ended(self) -> int:
        while (status := self.process.poll()) is None:  # noqa: ASYNC110 - another process ends
            await asyncio.sleep(0.02)
        return status

    async def reaches(self, happened: Callable[[], bool]) -> None:
        while not happened():
            assert self.process.returncode is None, self.output
            await asyncio.sleep(0.02)

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.ended()


def start_anew(redis_url: str, *arguments: str | Path) -> TrainerProcess:
    """Starts `python -m trainer.run` without forking, for what imports native libraries in threads: a fork of ours has crashed there."""
    log = Path(str(arguments[0])).with_name("trainer.log")
    variables = {
        **os.environ,
        "SWERVE_REDIS_URL": redis_url,
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    command = [sys.executable, "-m", "trainer.run", *map(str, arguments)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=processes.dying_with_parent(signal.SIGKILL),
        )
    return TrainerProcess(process, log)


async def start(
    redis_url: str, *arguments: str | Path, module: str = "trainer.run", **environment: str
) -> TrainerProcess:
    log = Path(str(arguments[0])).with_name(f"trainer-{os.urandom(3).hex()}.log")
    variables = {"SWERVE_REDIS_URL": redis_url, "OMP_NUM_THREADS": "1", **environment}
    process = fork(module, *map(str, arguments), log=log, **variables)
    while not process.has_begun:  # noqa: ASYNC110 - another process begins
        await asyncio.sleep(0.02)
    return TrainerProcess(process, log)


def steps(run: Path) -> list[StepRow]:
    return list(read(run / "journal", StepRow))


def sets(*wishes: str) -> list[str]:
    return [word for wish in wishes for word in ("--set", wish)]


def trained_times(run: Path) -> set[int]:
    return set(Counter(request_id for row in steps(run) for request_id in row.request_ids).values())


async def pending_requests(redis: Redis, run_id: str) -> set[str]:
    """Request ids delivered to the trainer and not acknowledged."""
    rows = await redis.xpending_range(keys.stream(run_id), stream.GROUP, "-", "+", 1000)
    unacknowledged = {row["message_id"].decode() for row in rows}
    heads = await stream.newest_heads(redis, run_id, 1000)
    return {delivery.head.request_id for delivery in heads if delivery.entry_id in unacknowledged}


async def forget_acknowledgements(redis: Redis, run_id: str) -> None:
    """As if the trainer had died between checkpoint and acknowledgement."""
    for delivery in await stream.newest_heads(redis, run_id, 1000):
        entry = [delivery.entry_id]
        await redis.xclaim(
            keys.stream(run_id), stream.GROUP, stream.CONSUMER, 0, entry, force=True, justid=True
        )
        await redis.zadd(keys.open_requests(run_id), {delivery.head.request_id: delivery.head.enqueued_at})


async def keep_engines(redis: Redis, holder: PolicyHolder) -> None:
    """As a holder that renews its lease: on a busy machine, a trainer takes longer to start than a lease lasts."""
    await weights.acquire(redis, holder)
    await redis.persist(keys.policy_lease())
