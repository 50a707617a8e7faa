"""A policy is distilled by the real trainer, a real judge process and a real engine as teacher; only the policy's episodes are scripted."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import fleet
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow, JudgementRow
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from tests.conftest import Serving
from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import sets, start, steps, trained_times
from tests.trainer.replay.test_replay import alone as alone
from tests.trainer.replay.test_replay import replayed
from tests.workers.judge.test_process import judge


@pytest.mark.slow
async def test_a_run_is_distilled_killed_and_resumed_and_replayed_bit_for_bit(
    recipe: Path,
    serving: Serving,
    redis_url: str,
    redis: Redis,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, router = recipe.parent / "run", {"SWERVE_JUDGE_ROUTER_URL": serving.router_url}
    distill = sets(
        "rollout.group_size=1",
        "batch.groups_per_step=4",
        "judge.method=teacher",
        "judge.name=tiny",
        f"judge.tokenizer={serving.model_dir}",
        "judge.required=true",
        "credit.method=distill",
        "credit.coefficient=1",
    )
    await serving.name_weights("teacher")  # another test may have left other weights
    async with fleet(redis_url, lambda request: 0.0), judge(redis_url, recipe.parent / "judge.log", **router):
        trainer = await start(redis_url, recipe, "--run-dir", run, *distill)
        await trainer.reaches(lambda: len(steps(run)) >= 3)
        await trainer.kill()
        trainer = await start(redis_url, recipe, "--run-dir", run, *distill, "--resume")
        assert await trainer.ended() == 0, trainer.output
    assert [row.step for row in steps(run)] == [1, 2, 3, 4]
    assert trained_times(run) == {1}
    for row in steps(run):
        taught = row.distillation
        assert taught is not None
        assert (taught.num_taught, taught.num_left_out, taught.num_tokens) == (4, 0, row.num_trained_tokens)
        assert taught.reverse_kl is not None
        assert taught.reverse_kl_low is not None
        assert taught.reverse_kl_high is not None
        assert taught.reverse_kl_low < taught.reverse_kl < taught.reverse_kl_high
    fates = {row.fate for row in read(run / "journal", EpisodeRow)}
    assert fates <= {"trained", "withdrawn"}, "no failure, and no group without signal"
    assert "teacher: reverse KL to the teacher" in trainer.output
    joined = [row for row in read(run / "journal", JudgementRow) if row.fate == "joined"]
    assert {row.judge for row in joined} == {"tiny@teacher"}
    stored = RolloutStore(run / DIRECTORY).find(joined[0].rollout_id)
    assert stored is not None
    assert stored.rollout.judgement is not None
    assert stored.rollout.judgement.num_logprobs == joined[0].num_taught_tokens
    await redis.flushdb()
    status, shown, _ = replayed(capsys, run)
    assert (status, shown.splitlines()[-1]) == (0, "4 of 4 steps are bit for bit those of the run")
    status, shown, _ = replayed(capsys, run, "--steps", "1", "--set", "credit.coefficient=0.5")
    assert status == 0
    assert "B: credit.coefficient: 1.0 -> 0.5" in shown
