"""The durations of a step and its phases on this rank (forward pass, backward pass, optimizer), and the number of operations.

On a GPU the phases are measured by events in its stream, so nothing waits for a measurement until the seconds are read.
"""

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import distributed

from trainer.batching.batch import Batch
from trainer.learner import backend
from trainer.learner.architecture import Architecture, training_flops
from trainer.learner.devices import recognise


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """The phases of one step. Recomputed activations count as backward pass, the reduction of gradients over ranks as optimizer."""

    forward_s: float
    backward_s: float
    optimizer_s: float


class Stopwatch:
    """Adds up the time between `start` and `stop`. Megatron's schedule calls them."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._started_at = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, barrier: bool = False) -> None:
        del barrier
        if backend.has_cuda():
            self._pairs.append((_event(), torch.cuda.Event(enable_timing=True)))
        else:
            self._started_at = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        del barrier
        if backend.has_cuda():
            self._pairs[-1][1].record()
        else:
            self._total_s += time.perf_counter() - self._started_at

    def take_s(self) -> float:
        """The seconds since the last call."""
        if self._pairs:
            torch.cuda.synchronize()
            self._total_s += sum(begin.elapsed_time(end) for begin, end in self._pairs) / 1000
            self._pairs = []
        taken_s, self._total_s = self._total_s, 0.0
        return taken_s


class _Unmeasured:
    def start(self, barrier: bool = False) -> None:
        """Does nothing: the timer is for a part of a phase that is measured as a whole, or for no phase."""

    def stop(self, barrier: bool = False) -> None:
        """Does nothing."""


class Phases:
    """An object for Megatron's `timers`: Megatron looks up a timer by name around each pass of a micro-batch."""

    def __init__(self) -> None:
        self._forward, self._backward, self._optimizer = Stopwatch(), Stopwatch(), Stopwatch()
        self._named = {"forward-compute": self._forward, "backward-compute": self._backward}
        self._rest = _Unmeasured()

    def __call__(self, name: str, log_level: int = 0) -> Stopwatch | _Unmeasured:
        del log_level
        return self._named.get(name, self._rest)

    @contextlib.contextmanager
    def optimizer(self) -> Generator[None]:
        """Counts the block as part of the optimizer phase."""
        self._optimizer.start()
        yield
        self._optimizer.stop()

    def take(self) -> PhaseSeconds:
        """The seconds of each phase since the last call."""
        return PhaseSeconds(self._forward.take_s(), self._backward.take_s(), self._optimizer.take_s())


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class StepWork:
    """Counts the work of the current step. Its clock runs from the beginning, except between two `resumed` blocks."""

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
        """Lets the clock run inside the block, and stops it afterwards."""
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
        """The operations that the step needed, divided by what all devices can do in its time; None if that is not known."""
        peak = _peak_flops_per_s()
        return None if peak is None else self._flops / (train_s * peak * distributed.get_world_size())


def _peak_flops_per_s() -> float | None:
    """The peak of this process's device in dense bf16 matrix products."""
    if not backend.has_cuda():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = recognise(found.name, found.total_memory)
    return None if device is None else device.flops_per_s
