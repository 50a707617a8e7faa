"""Batches that are not finite, in a whole run of the trainer: the first is skipped, a second in a row ends the run."""

from pathlib import Path

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import fleet
from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import sets, start, steps
from trainer.records.journal import EpisodeRow, PublicationRow, SkippedBatchRow, read
from trainer.records.summary import summarize

RUINOUS_LR = "learner.lr=1e36"
"""The first step takes the weights so far that the gradient of the next batch overflows."""


@pytest.mark.slow
async def test_a_batch_that_is_not_finite_is_skipped_and_a_second_one_ends_the_run(
    recipe: Path, redis_url: str, redis: Redis
) -> None:
    run = recipe.parent / "run"
    async with fleet(redis_url):
        trainer = await start(redis_url, recipe, "--run-dir", run, *sets(RUINOUS_LR))
        assert await trainer.ended() == 1, trainer.output
    assert [row.step for row in steps(run)] == [1]
    skipped = list(read(run / "journal", SkippedBatchRow))
    assert [(row.step, row.version, row.what) for row in skipped] == [(2, 1, "gradient")] * 2
    assert [row.version for row in read(run / "journal", PublicationRow)] == [0, 1], (
        "a skipped batch is no version"
    )
    fates = {row.request_id: row.fate for row in read(run / "journal", EpisodeRow)}
    settled = [request_id for row in skipped for request_id in row.request_ids]
    assert len(settled) == len(set(settled)) == 16
    assert {request_id for request_id, fate in fates.items() if fate == "not_finite"} == set(settled)
    fact = "step 2: the gradient of a batch of 8 trajectories is not finite"
    assert f"{fact}: skipped it" in trainer.output
    assert f"{fact}, and so was the batch before it" in trainer.output
    assert summarize(run).trained_twice == 0
