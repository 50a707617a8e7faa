"""Grades predictions side by side with the production grader, keeps each verdict as soon as it is there, and shows progress."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.request import Claim, Limits
from pipeline.task import Task
from workers.grade.display import ResultTable, open_table
from workers.grade.predictions import Prediction
from workers.grade.results import PredictionResult, VerdictJournal, key_of, result_of
from workers.grading.grade import Graded, Grader
from workers.sandbox.protocol import Sandboxes
from workers.unqueued.attempts import Broken, tried
from workers.unqueued.claims import unqueued_claim
from workers.unqueued.outputs import LogDirectory
from workers.unqueued.parallel import side_by_side
from workers.unqueued.session import session

LOG_NAME = "patch.log"


class PatchLogGrader(Protocol):
    """The production grader. Raises RolloutError; never returns a verdict for an infrastructure failure."""

    async def grade_with_log(self, claim: Claim, patch: bytes) -> Graded: ...


@dataclass(frozen=True, slots=True)
class PredictionGrader:
    """Grades predictions one by one; a verdict that the journal knows is not made again."""

    grader: PatchLogGrader
    journal: VerdictJournal
    logs: LogDirectory
    limits: Limits
    image_fix: str  # what to do about an image that is not on this host
    outage: str = ""  # why nothing at all can be graded here

    async def result(self, prediction: Prediction) -> PredictionResult:
        """The result of one prediction. Raises Unwritable."""
        key = key_of(prediction, self.limits)
        if key in self.journal.known:
            return self.journal.known[key]
        task_id, began_at = prediction.task.id, time.monotonic()
        graded = Broken(self.outage) if self.outage else await self._graded(prediction.task, prediction.patch)
        seconds = time.monotonic() - began_at
        if isinstance(graded, Broken):
            return PredictionResult(task=task_id, value=None, seconds=round(seconds, 2), error=graded.why)
        self.logs.write(task_id, LOG_NAME, graded.log)
        result = result_of(task_id, graded.reward, seconds=seconds)
        self.journal.enter(key, result)
        return result

    async def _graded(self, task: Task, patch: bytes) -> Graded | Broken:
        claim = unqueued_claim(task, command="grade", limits=self.limits)
        return await tried(lambda: self.grader.grade_with_log(claim, patch), task, image_fix=self.image_fix)


async def grade_all(
    predictions: Sequence[Prediction],
    journal: VerdictJournal,
    logs: LogDirectory,
    *,
    sandboxes: Sandboxes,
    limits: Limits,
    num_jobs: int,
    image_fix: str,
) -> list[PredictionResult]:
    """The results in the order of `predictions`. Closes `sandboxes`. Raises Unwritable and Misconfigured. SIGTERM and SIGHUP
    cancel it.
    """
    found: dict[str, PredictionResult] = {}
    async with session(sandboxes) as outage:
        grader = PredictionGrader(Grader(sandboxes), journal, logs, limits, image_fix, outage)
        with open_table([one.task.id for one in predictions]) as table:

            async def work(prediction: Prediction) -> None:
                found[prediction.task.id] = await _shown(grader, prediction, table)

            await side_by_side(predictions, work, num_jobs=num_jobs)
    return [found[one.task.id] for one in predictions]


async def _shown(grader: PredictionGrader, prediction: Prediction, table: ResultTable) -> PredictionResult:
    table.begin(prediction.task.id)
    result = await grader.result(prediction)
    table.finish(result)
    return result
