"""Batches that are not finite, in a whole run of the trainer: the first is skipped, a second in a row ends the run."""

from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from benchmarks.scripted_fleet import fleet, work_off
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow, PublicationRow, SkippedBatchRow
from tests.trainer.processes import recipe as recipe
from tests.trainer.processes import sets, start, steps
from tests.trainer.rollouts.test_intake import side as side
from tests.trainer.trainer_side import TrainerSide
from tests.trainer.trajectories import behind
from trainer.learner.config import NotFinite
from trainer.learner.gpu_use import GpuUse
from trainer.loop.step import Steps, TakenStep
from trainer.report.summary import summarize

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


class ToldLearner:
    """Finds batches finite or not, as it is told."""

    def __init__(self, *are_finite: bool) -> None:
        self._are_finite = list(are_finite)
        self.here = self
        self.gpu_use = GpuUse(None)

    async def call(self, name: str, *arguments: object) -> object:
        assert name == "step"
        return "metrics" if self._are_finite.pop(0) else NotFinite(what="loss")

    def take_tokens(self) -> list[object]:
        return []


async def test_only_two_skipped_batches_in_a_row_end_a_run(side: TrainerSide) -> None:
    nothing = cast(Any, None)
    side.run.learner = cast(Any, ToldLearner(False, True, False, False))
    side.run.state.publish(0)
    loop = Steps(side.run, nothing, nothing, nothing)
    await side.dispatcher.open_groups(4, version=0)
    await work_off(side.pool)
    await side.streams.read(block_ms=10)

    async def taken() -> TakenStep | None:
        return await loop._take(side.book.take(behind(0)) or [])

    assert await taken() is None
    assert await taken() is not None
    assert await taken() is None
    with pytest.raises(FloatingPointError, match="and so was the batch before it"):
        await taken()
