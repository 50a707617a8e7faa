"""The real trainer without the arithmetic: an optimizer step only takes time, and nothing is learned."""

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from benchmarks import chat_tokenizer
from pipeline.journal.rows import EndReason
from pipeline.task import Task
from trainer.batching.batch import Batch
from trainer.inputs import Inputs, TaskSource
from trainer.learner.config import LearnerConfig, StepMetrics
from trainer.learner.directories import atomic_directory
from trainer.loop.loop import Loop
from trainer.loop.run import open_run
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
from trainer.records.console import open_console

if TYPE_CHECKING:
    from trainer.feed import Feed

RUN_ID = "bench"


def recipe(
    *,
    num_steps: int,
    group_size: int,
    groups_per_step: int,
    max_tokens: int,
    admission: AdmissionRecipe,
    checkpoint_every_steps: int,
) -> Recipe:
    return Recipe(
        name="bench",
        model="",
        num_steps=num_steps,
        tasks=TaskFiles(train=""),
        rollout=Rollout(group_size=group_size, agent="", limits=LimitsRecipe(context_tokens=max_tokens)),
        batch=BatchRecipe(groups_per_step=groups_per_step),
        learner=LearnerConfig(lr=1e-6, micro_batch_tokens=max_tokens),
        admission=admission,
        weights=WeightsRecipe(engines="none"),
        checkpoint=CheckpointRecipe(every_steps=checkpoint_every_steps),
    )


async def train(
    recipe: Recipe, root: Path, tasks: Sequence[Task], *, vocab_size: int, train_s: float
) -> EndReason:
    """Run in `root` on the Redis of SWERVE_REDIS_URL; each step takes `train_s`."""
    inputs = Inputs(
        sources=(TaskSource("", list(tasks), ""),),
        heldout=[],
        heldout_sets={},
        agent_config="",
        tokenizer=replace(chat_tokenizer.bundle(), vocab_size=vocab_size),
        num_unverified=0,
        num_uncontrolled=0,
        num_too_weak=0,
    )
    with open_console(io.StringIO()) as progress:
        opening = open_run(
            recipe,
            inputs,
            root=root,
            run_id=RUN_ID,
            router_url="",
            console=progress,
            make_feed=lambda: cast("Feed", SleepingLearner(train_s)),
        )
        async with opening as run:
            return await Loop(run).run()


class SleepingLearner:
    """What the loop needs of a feed and of its learner."""

    def __init__(self, train_s: float) -> None:
        self._train_s = train_s
        self.learner = self
        self.versions_held: Sequence[int] = ()
        self.num_threads = 1

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def step(self, batch: Batch) -> StepMetrics:
        time.sleep(self._train_s)
        measures: dict[str, Any] = dict.fromkeys(StepMetrics.__struct_fields__, 0.0)
        counts = {
            "step": batch.step,
            "num_trained_tokens": batch.num_trained_tokens,
            "num_microbatches": 1,
            "num_updates": 1,
            "by_lag": (),
            "signal": None,
        }
        return StepMetrics(**measures | counts)

    def take_tokens(self) -> tuple[()]:
        """Nothing was done with any."""
        return ()

    def logprobs_under(self, version: int, samples: Sequence[object], temperature: float) -> list[object]:
        raise AssertionError("no version is held")

    def snapshot(self, version: int) -> None:
        """Nothing is kept."""

    def export(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(bytes(64))

    def begin_save(self, directory: Path, extra: bytes) -> None:
        with atomic_directory(directory) as partial:
            (partial / "extra").write_bytes(extra)

    def finish_save(self) -> None:
        """It was written at once."""

    @property
    def is_save_written(self) -> bool:
        return True

    def stop(self) -> None:
        """There are no other ranks."""
