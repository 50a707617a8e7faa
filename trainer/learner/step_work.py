"""How much one step computed and how long it took, from which its speed follows."""

import contextlib
import time
from collections.abc import Generator

import torch
from torch import distributed

from trainer.batching.batch import Batch
from trainer.learner import backend
from trainer.learner.architecture import Architecture
from trainer.learner.flops import training_flops
from trainer.plan.devices import recognise


class StepWork:
    """Of a step under way. Its clock runs from the beginning, but for what lies between two `resumed` blocks."""

    def __init__(self, architecture: Architecture) -> None:
        self._architecture = architecture
        self._flops = 0
        self._spent_s = 0.0
        self._running_since: float | None = time.perf_counter()
        self.num_trained_tokens = 0

    def add(self, batch: Batch, *, num_passes: int) -> None:
        """Count the samples of `batch`, each trained `num_passes` times."""
        lengths = [sample.num_tokens - 1 for sample in batch.samples]
        flops = training_flops(self._architecture, lengths, num_head_positions=batch.num_trained_tokens)
        self._flops += num_passes * flops
        self.num_trained_tokens += batch.num_trained_tokens

    @contextlib.contextmanager
    def resumed(self) -> Generator[None]:
        """The clock runs inside the block, and stands still after it."""
        if self._running_since is None:
            self._running_since = time.perf_counter()
        yield
        self.stop()

    def stop(self) -> float:
        """Stop the clock; returns the seconds that it ran."""
        if self._running_since is not None:
            self._spent_s += time.perf_counter() - self._running_since
            self._running_since = None
        return self._spent_s

    def utilisation(self, train_s: float) -> float | None:
        """The operations that the step needed over what all devices can do in its time; None where that is not known."""
        peak = _peak_flops_per_s()
        return None if peak is None else self._flops / (train_s * peak * distributed.get_world_size())


def _peak_flops_per_s() -> float | None:
    """Of this process's device, in dense bf16 matrix products."""
    if not backend.has_cuda():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = recognise(found.name, found.total_memory)
    return None if device is None else device.flops_per_s
