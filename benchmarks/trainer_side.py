"""The trainer as it is, in a process of its own, but for the learning: it asks, takes in, closes groups, makes batches,
keeps checkpoints and announces weights.
"""

import asyncio
import io
import math
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from benchmarks import chat_tokenizer, swe_episode
from benchmarks.sleeping_learner import SleepingLearner
from trainer.assembly import assembled
from trainer.inputs import Inputs
from trainer.learner.config import LearnerConfig
from trainer.progress import open_progress
from trainer.recipe import (
    AdmissionRecipe,
    BatchRecipe,
    CheckpointRecipe,
    LimitsRecipe,
    Recipe,
    Rollout,
    TaskFiles,
    WeightsRecipe,
)

if TYPE_CHECKING:
    from trainer.feed import Feed

RUN_ID = "bench"
GROUP_SIZE = 8
NUM_TASKS = 500
CHECKPOINT_EVERY_STEPS = 10
FOREVER = 10**9
AMPLE_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the trainer: so many requests unanswered at any time, and so many answers a second."""

    num_requests: int
    per_s: float

    @property
    def groups_per_step(self) -> int:
        """A step a second, or as often as a group comes in."""
        return max(1, round(self.per_s / GROUP_SIZE))

    @property
    def max_lag_versions(self) -> int:
        """The bound asks for as many groups as can be trained within it."""
        return max(1, math.ceil(self.num_requests / GROUP_SIZE / self.groups_per_step) - 1)


def run(parent: Connection, url: str, directory: Path, load: Load) -> None:
    """Trains for ever, in `directory`. Answers every message with the CPU seconds used so far."""
    os.environ["SWERVE_REDIS_URL"] = url
    asyncio.run(_run(parent, directory, load))


async def _run(parent: Connection, directory: Path, load: Load) -> None:
    training = asyncio.create_task(_train(directory, load))
    while not training.done():
        await asyncio.to_thread(parent.recv)
        parent.send(time.process_time())
    await training


async def _train(root: Path, load: Load) -> None:
    inputs = Inputs(
        train=[swe_episode.task(f"t{number}") for number in range(NUM_TASKS)],
        heldout=[],
        agent_config="",
        tokenizer=replace(chat_tokenizer.bundle(), vocab_size=swe_episode.VOCAB_SIZE),
        num_unverified=0,
    )
    with open_progress(io.StringIO()) as progress:
        run = assembled(
            _recipe(load),
            inputs,
            root=root,
            run_id=RUN_ID,
            router_url="",
            progress=progress,
            make_feed=lambda: cast("Feed", SleepingLearner(0.0)),
        )
        async with run as loop:
            ending = await loop.run()
    raise RuntimeError(f"the run ended as {ending!r}")


def _recipe(load: Load) -> Recipe:
    return Recipe(
        name="bench",
        model="",
        num_steps=FOREVER,
        tasks=TaskFiles(train=""),
        rollout=Rollout(
            group_size=GROUP_SIZE, agent="", limits=LimitsRecipe(context_tokens=swe_episode.NUM_TOKENS)
        ),
        batch=BatchRecipe(groups_per_step=load.groups_per_step),
        learner=LearnerConfig(lr=1e-6, micro_batch_tokens=swe_episode.NUM_TOKENS),
        admission=AdmissionRecipe(
            max_lag_versions=load.max_lag_versions,
            max_queue_bytes=AMPLE_BYTES,
            max_held_bytes=AMPLE_BYTES,
        ),
        weights=WeightsRecipe(engines="none"),
        checkpoint=CheckpointRecipe(every_steps=CHECKPOINT_EVERY_STEPS),
    )
