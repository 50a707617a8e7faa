"""A real judge process is killed by SIGKILL while it judges, and so is the trainer that waits for it."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import work_off
from infra import processes
from pipeline import census, connection, queue, stream
from pipeline.judge import judge_request_id
from pipeline.kinds import JUDGE
from tests.trainer.trainer_side import GROUP_SIZE, RUN, TrainerSide
from tests.trainer.trajectories import behind
from trainer.recipe import JudgeRecipe
from trainer.records.journal_writer import Journal

# Judges each step once the file `open` lies beside it, so that a kill meets judgements under way.
GATED = """import pathlib, time

def gated(issue, turns, index):
    while not pathlib.Path(__file__).with_name("open").exists():
        time.sleep(0.05)
    return 0.25 * index
"""
GATED_JUDGE = JudgeRecipe(method="function", name="gated", score_format_errors=True, score_submission=True)
PATIENCE_S = 120.0


@pytest.fixture
def judge_process(redis_url: str, tmp_path: Path) -> Callable[[str], processes.Child]:
    """Starts `python -m workers.judge` under the given name."""
    (tmp_path / "judge.py").write_text(GATED)

    def start(name: str) -> processes.Child:
        settings = {
            "SWERVE_REDIS_URL": redis_url,
            "SWERVE_JUDGE_NAME": name,
            "SWERVE_JUDGE_SLOTS": str(GROUP_SIZE),
            "SWERVE_JUDGE_FUNCTIONS": f"{tmp_path / 'judge.py'}:gated",
        }
        command = [sys.executable, "-m", "workers.judge"]
        return processes.start(name, command, log=tmp_path / f"{name}.log", environment=os.environ | settings)

    return start


@pytest.fixture
async def side(redis_url: str, redis: Redis, tmp_path: Path) -> AsyncIterator[TrainerSide]:
    pool = await connection.connect(redis_url)
    with Journal(tmp_path / "journal") as journal:
        made = TrainerSide(pool, journal, judge=GATED_JUDGE)
        await made.streams.recover()
        yield made
    await pool.aclose()


async def read(side: TrainerSide) -> None:
    await side.streams.read(block_ms=1)
    await side.judging.tend()


async def until(holds: Callable[[], Awaitable[object]], *, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not await holds():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE_S:.0f} s in vain for {what}")
        await asyncio.sleep(0.1)


# Quick: a killed judge costs no judgement, and no rollout is judged twice.
async def test_the_requests_of_a_killed_judge_are_taken_over_and_each_rollout_is_judged_once(
    redis: Redis, side: TrainerSide, judge_process: Callable[[str], processes.Child], tmp_path: Path
) -> None:
    await side.dispatcher.open_groups(1, version=0)
    rollout_ids = await work_off(side.pool)
    await read(side)
    request_ids = [judge_request_id(one) for one in rollout_ids]
    doomed = judge_process("doomed")

    async def all_under_way() -> bool:
        leases = [await queue.current_lease(redis, request_id, JUDGE) for request_id in request_ids]
        return all(lease is not None and lease.worker == "doomed" for lease in leases)

    async def heir_is_live() -> bool:
        return "heir" in {status.name for status in (await census.workers(redis))[0]}

    try:
        await until(all_under_way, what="the first judge to have all requests under way")
        heir = judge_process("heir")
        try:
            await until(heir_is_live, what="the second judge to report")
            os.kill(doomed.pid, signal.SIGKILL)
            resumed = await side.restarted()
            (tmp_path / "open").touch()

            async def group_is_judged() -> bool:
                await read(resumed)
                return not resumed.book.unjudged

            await until(group_is_judged, what="the group to be judged by the second judge")
        finally:
            await asyncio.to_thread(heir.stop, grace_s=10)
    finally:
        await asyncio.to_thread(doomed.stop, grace_s=10)
    (group,) = resumed.book.take(behind(0)) or []
    assert [member.scores for member in group.members.values()] == [{0: 0.0, 1: 0.25}] * GROUP_SIZE
    heads = [delivery.head for delivery in await stream.newest_heads(redis, RUN, 10, JUDGE)]
    assert sorted(head.rollout_id for head in heads) == sorted(rollout_ids)
    assert {(head.worker, head.attempt) for head in heads} == {("heir", 2)}
    resumed.ledger.close_group(group, group.fates("trained"))
    assert sorted((row.rollout_id, row.fate) for row in resumed.judgements_made()) == [
        (one, "joined") for one in sorted(rollout_ids)
    ]
    pending = resumed.ledger.state(step=1, version=1, cursor=1).pending_judgements
    assert sorted(request_id for _, request_id in pending) == sorted(request_ids)
