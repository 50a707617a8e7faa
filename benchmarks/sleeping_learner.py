"""What the trainer's loop asks of a feed and its learner, without arithmetic: a step takes its time, and nothing is learned."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.batch import Batch
from trainer.learner.config import StepMetrics


class SleepingLearner:
    def __init__(self, train_s: float) -> None:
        self._train_s = train_s
        self.learner = self
        self.versions_held: Sequence[int] = ()

    def step(self, batch: Batch) -> StepMetrics:
        time.sleep(self._train_s)
        measures: dict[str, Any] = dict.fromkeys(StepMetrics.__struct_fields__, 0.0)
        counts = {
            "step": batch.step,
            "num_trained_tokens": batch.num_trained_tokens,
            "num_microbatches": 1,
            "num_updates": 1,
        }
        return StepMetrics(**measures | counts)

    def logprobs_under(self, version: int, samples: Sequence[object], temperature: float) -> list[object]:
        raise AssertionError("no version is held")

    def snapshot(self, version: int) -> None:
        """Nothing is kept."""

    def export(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(bytes(64))

    def save(self, directory: Path, extra: bytes) -> None:
        directory.mkdir(parents=True)
        (directory / "extra").write_bytes(extra)

    def stop(self) -> None:
        """There is nobody else."""
