"""A run whose disk is full: it ends with one line that says which disk and what was kept, and goes on once there is room."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import fleet
from pipeline import census
from pipeline.journal.reading import read
from pipeline.journal.rows import EndRow
from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import sets, start, steps
from tests.trainer.small_disk import fill, small_disk
from trainer.report.summary import summarize


@pytest.mark.slow
async def test_a_run_that_fills_its_disk_says_which_and_what_was_kept_and_goes_on_once_there_is_room(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run, wishes = recipe.parent / "run", sets("num_steps=8", "evaluation.after=false")
    # The journal's disk, for that is where the end has to be written down, too.
    # The trainer's log is on a full disk from the beginning.
    with (
        small_disk(run / "logs", 64 * 1024) as disk_of_logs,
        small_disk(run / "journal", 2 * 1024**2) as disk,
    ):
        fill(disk_of_logs)
        async with fleet(redis_url):
            trainer = await start(redis_url, recipe, "--run-dir", run, "--run-id", "full", *wishes)
            await trainer.reaches(lambda: (run / "checkpoints/latest").is_file())
            fill(disk)
            assert await trainer.ended() == 1
        assert "Traceback" not in trainer.output
        said, kept = trainer.output.splitlines()[-1], int((run / "checkpoints/latest").read_text()[-8:])
        assert said.startswith(f"error: the disk at {disk} is full, so {disk}/")
        assert (
            f"; kept: the checkpoint of step {kept} and, in Redis, the trajectories since; make room" in said
        )
        (end,) = read(run / "journal", EndRow)
        assert f"the disk at {disk} is full" in end.detail
        status = await census.run_status(redis, "full")
        assert status is not None
        assert status.phase == "error"
        assert f"the disk at {disk} is full" in status.ended
        assert f"make room and resume with `python -m trainer.run {run}/recipe.toml" in status.ended
        (disk / "filler").unlink()
        async with fleet(redis_url):
            resumed = await start(redis_url, recipe, "--run-dir", run, "--resume", *wishes)
            assert await resumed.ended() == 0, resumed.output
        assert [row.step for row in steps(run)] == list(range(1, 9))
        report = summarize(run)
        assert (report.lost, report.trained_twice, report.open) == (0, 0, 0)
        assert not (disk / "reserve").exists()


async def test_a_run_on_a_full_disk_is_refused_before_it_starts(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    with small_disk(run, 64 * 1024):
        trainer = await start(redis_url, recipe, "--run-dir", run)
        assert await trainer.ended() == 2, trainer.output
        assert list(run.iterdir()) == []
    assert f"--run-dir {run} cannot be written (No space left on device: {run}); make room" in trainer.output
