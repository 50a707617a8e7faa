"""Verifies tasks in parallel, records each as soon as it is done, and shows progress."""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipeline.request import Limits
from pipeline.task import Task
from pipeline.taskfile import Gold, Verification
from workers.grading.grade import Grader
from workers.sandbox.protocol import Sandboxes
from workers.unqueued import session, side_by_side
from workers.verify.book import Book, Outputs
from workers.verify.calibrating import Calibrator
from workers.verify.display import VerificationTable, open_table
from workers.verify.image_leaks import ImageLeaks
from workers.verify.judging import evidence, verification
from workers.verify.states import Prober, Tries
from workers.verify.strength import StrengthMeter
from workers.verify.submitting import Submitter


@dataclass(slots=True)
class Verifier:
    """Verifies tasks. The results are in `found` and `tries`, by task id, and in `book`."""

    prober: Prober
    meter: StrengthMeter | None  # None: how strong tests are is not measured
    images: ImageLeaks
    golds: Mapping[str, Gold]
    book: Book
    found: dict[str, Verification] = field(default_factory=dict[str, Verification])
    tries: dict[str, Tries] = field(default_factory=dict[str, Tries])

    async def run(self, tasks: Sequence[Task], *, num_jobs: int) -> None:
        """Verifies `tasks`, `num_jobs` at a time. Raises Unwritable."""
        with open_table([task.id for task in tasks]) as table:
            await side_by_side(tasks, lambda task: self._verify(task, table), num_jobs=num_jobs)

    async def _verify(self, task: Task, table: VerificationTable) -> None:
        began_at = time.monotonic()
        probed = await self.prober.probe(
            task, self.golds.get(task.id), on_step=functools.partial(table.begin, task.id)
        )
        done = verification(task, probed, seconds=time.monotonic() - began_at, verified_at=time.time())
        if done.ok:
            table.begin(task.id, "leaks", 0, 1)
            done = await self.images.looked_for(done, task, self.golds[task.id])
            done = replace(done, seconds=round(time.monotonic() - began_at, 2))
        self.book.enter(done)
        if self.meter is not None and done.states["gold"] == 1:
            done = await self._with_strength(done, task, self.meter, table)
            done = replace(done, seconds=round(time.monotonic() - began_at, 2))
            self.book.enter(done)
        self.tries[task.id] = probed.tries
        self.found[task.id] = done
        table.finish(done, evidence(probed.tries))

    async def _with_strength(
        self, done: Verification, task: Task, meter: StrengthMeter, table: VerificationTable
    ) -> Verification:
        """The verification of a task whose known fix passes, with the strength of its tests."""
        measured = await meter.measure(
            replace(task, calibration=done.calibration),
            self.golds[task.id],
            on_fix=lambda number, most: table.begin(task.id, "partial fix", number - 1, most),
        )
        warning = "; ".join(text for text in (done.warning, measured.warning) if text)
        return replace(done, strength=measured.strength, warning=warning)


async def verify(
    tasks: Sequence[Task],
    golds: Mapping[str, Gold],
    book: Book,
    outputs: Outputs,
    *,
    sandboxes: Sandboxes,
    limits: Limits,
    num_repeats: int,
    num_jobs: int,
    num_controls: int,
    num_partial_fixes: int,
    image_fix: str,
    agent_config: str,
) -> Verifier:
    """Verifies all of `tasks` in `sandboxes`, and closes these. Raises Unwritable and Misconfigured. SIGTERM and SIGHUP cancel it.
    The strength of their tests is measured with at most `num_partial_fixes` of each; 0: it is not measured. Known fixes are submitted as
    the agent file with the text `agent_config` says.
    """
    async with session(sandboxes) as outage:
        grader = Grader(sandboxes)
        prober = Prober(
            grader=grader,
            submitter=Submitter(sandboxes, grader),
            calibrator=Calibrator(grader, sandboxes, num_controls),
            sandboxes=sandboxes,
            logs=outputs,
            limits=limits,
            num_repeats=num_repeats,
            agent_config=agent_config,
            image_fix=image_fix,
            outage=outage,
        )
        meter = StrengthMeter(grader, sandboxes, limits, num_partial_fixes, image_fix)
        images = ImageLeaks(sandboxes, limits, image_fix)
        verifier = Verifier(prober, meter if num_partial_fixes else None, images, golds, book)
        await verifier.run(tasks, num_jobs=num_jobs)
    return verifier
