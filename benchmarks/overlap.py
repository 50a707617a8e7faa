"""How much of its time a learner waits for rollouts whose lengths have a long tail: the trainer's own loop, with a lag of at
most 1, 2 and 4 versions, against a loop that enqueues a batch, waits for all of it, and trains.

Queue, claims, intake, admission, groups, checkpoints and publications are real; episodes and optimizer steps only sleep.
The rival has no overhead at all: its episodes are sleeps of the same lengths in as many slots. It runs beside ours. A step
takes nine tenths of the time that all slots need for its episodes, so that without the tail both could be kept busy.
`python -m benchmarks.overlap [--json] [--short]`
"""

import asyncio
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import scripted_fleet, sleeping_trainer
from benchmarks.child_process import child
from benchmarks.report import Comparison, main
from benchmarks.scripted_fleet import Durations
from infra.redis_server import own_redis
from pipeline.journal.reading import read
from pipeline.journal.rows import StepRow
from trainer.recipe import AdmissionRecipe

RIVAL = "synchronous batch, no overhead"
TRAIN_SHARE = 0.9
NUM_TASKS = 200
MAX_TOKENS = 8192
CHECKPOINT_EVERY_STEPS = 5


@dataclass(frozen=True, slots=True)
class OverlapPlan:
    lags: tuple[int, ...]
    groups_per_step: int
    group_size: int
    num_steps: int
    median_s: float

    @property
    def durations(self) -> Durations:
        return Durations(self.median_s, p99_over_median=20.0)

    @property
    def slots(self) -> int:
        """One slot for each episode of a step."""
        return self.groups_per_step * self.group_size

    @property
    def train_s(self) -> float:
        return TRAIN_SHARE * self.durations.mean_s


LONG = OverlapPlan((1, 2, 4), groups_per_step=8, group_size=8, num_steps=16, median_s=0.4)
SHORT = OverlapPlan((2,), groups_per_step=2, group_size=4, num_steps=4, median_s=0.1)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Measured from the end of the first step to the end of the last."""

    share: float  # of the time, that the learner waits
    steps_per_s: float


async def overlap(short: bool) -> list[Comparison]:
    plan = SHORT if short else LONG
    found: list[Comparison] = []
    for lag in plan.lags:
        ours, rival = await asyncio.gather(_ours(lag, plan), synchronous(plan))
        against = partial(Comparison, "overlap", rival_name=RIVAL)
        what = f"at most {lag} versions late"
        found.append(
            against(
                ours=ours.share, rival=rival.share, unit=f"share of its time that the learner waits, {what}"
            )
        )
        found.append(
            against(
                ours=ours.steps_per_s, rival=rival.steps_per_s, unit=f"optimizer steps per second, {what}"
            )
        )
    return found


async def synchronous(plan: OverlapPlan) -> Waiting:
    """The rival: every batch is complete before its step, and the next one is enqueued after it."""
    slots = asyncio.Semaphore(plan.slots)

    async def episode(cursor: int, member: int) -> None:
        async with slots:
            await asyncio.sleep(plan.durations.of(cursor, member))

    waited_s, first_ended = 0.0, 0.0
    for step in range(plan.num_steps):
        began = time.monotonic()
        cursors = range(step * plan.groups_per_step, (step + 1) * plan.groups_per_step)
        await asyncio.gather(*(episode(c, member) for c in cursors for member in range(plan.group_size)))
        waited_s += (time.monotonic() - began) * bool(step)
        await asyncio.sleep(plan.train_s)
        first_ended = first_ended or time.monotonic()
    return _waiting(waited_s, time.monotonic() - first_ended, plan)


async def _ours(lag: int, plan: OverlapPlan) -> Waiting:
    with own_redis() as url, tempfile.TemporaryDirectory(prefix="swerve-bench-") as directory:
        os.environ["SWERVE_REDIS_URL"] = url
        with child(scripted_fleet.work_in_process, url, plan.slots, plan.durations):
            await _train(Path(directory), lag, plan)
        rows = sorted(read(Path(directory, "journal"), StepRow), key=lambda row: row.step)
    return _waiting(sum(row.wait_s for row in rows[1:]), rows[-1].at - rows[0].at, plan)


async def _train(root: Path, lag: int, plan: OverlapPlan) -> None:
    recipe = sleeping_trainer.recipe(
        num_steps=plan.num_steps,
        group_size=plan.group_size,
        groups_per_step=plan.groups_per_step,
        max_tokens=MAX_TOKENS,
        admission=AdmissionRecipe(max_lag_versions=lag),
        checkpoint_every_steps=CHECKPOINT_EVERY_STEPS,
    )
    tasks = [scripted_fleet.task(f"t{number}") for number in range(NUM_TASKS)]
    ending = await sleeping_trainer.train(
        recipe, root, tasks, vocab_size=scripted_fleet.VOCAB_SIZE, train_s=plan.train_s
    )
    if ending != "finished":
        raise RuntimeError(f"the run ended as {ending!r}")


def _waiting(waited_s: float, lasted_s: float, plan: OverlapPlan) -> Waiting:
    return Waiting(share=waited_s / lasted_s, steps_per_s=(plan.num_steps - 1) / lasted_s)


if __name__ == "__main__":
    sys.exit(main("overlap", __doc__, overlap))
