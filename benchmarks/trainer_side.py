"""The real trainer without the learning, in its own process: it enqueues, takes in trajectories, closes groups, makes
batches, keeps checkpoints and publishes weights.
"""

import asyncio
import math
import os
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import sleeping_trainer, swe_episode
from trainer.recipe import AdmissionRecipe

GROUP_SIZE = 8
NUM_TASKS = 500
CHECKPOINT_EVERY_STEPS = 10
LOOK_S = 1.0  # how soon a run that broke is noticed
FOREVER = 10**9
AMPLE_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class Load:
    """The load on the trainer: this many outstanding requests at any time, and this many trajectories a second."""

    num_requests: int
    per_s: float

    @property
    def groups_per_step(self) -> int:
        """A step a second, or one for each group if groups are rarer."""
        return max(1, round(self.per_s / GROUP_SIZE))

    @property
    def max_lag_versions(self) -> int:
        """The lag that admission needs to enqueue that many requests."""
        return max(1, math.ceil(self.num_requests / GROUP_SIZE / self.groups_per_step) - 1)


def run(parent: Connection, url: str, directory: Path, load: Load) -> None:
    """Train for ever, in `directory`. Reply to every message with the CPU seconds used so far."""
    os.environ["SWERVE_REDIS_URL"] = url
    asyncio.run(_run(parent, directory, load))


async def _run(parent: Connection, directory: Path, load: Load) -> None:
    training = asyncio.create_task(_train(directory, load))
    while not training.done():
        if await asyncio.to_thread(parent.poll, LOOK_S):
            parent.recv()
            parent.send(time.process_time())
    await training


async def _train(root: Path, load: Load) -> None:
    recipe = sleeping_trainer.recipe(
        num_steps=FOREVER,
        group_size=GROUP_SIZE,
        groups_per_step=load.groups_per_step,
        max_tokens=swe_episode.NUM_TOKENS,
        admission=AdmissionRecipe(
            max_lag_versions=load.max_lag_versions,
            max_queue_bytes=AMPLE_BYTES,
            max_held_bytes=AMPLE_BYTES,
        ),
        checkpoint_every_steps=CHECKPOINT_EVERY_STEPS,
    )
    tasks = [swe_episode.task(f"t{number}") for number in range(NUM_TASKS)]
    ending = await sleeping_trainer.train(recipe, root, tasks, vocab_size=swe_episode.VOCAB_SIZE, train_s=0.0)
    raise RuntimeError(f"the run ended as {ending!r}")
