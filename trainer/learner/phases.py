"""How long the phases of a step took on this rank: forward pass, backward pass, optimizer.

On a GPU the phases are measured by events in its stream, so measuring makes nothing wait until the seconds are read.
"""

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass

import torch

from trainer.learner import backend


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Of one step. Recomputed activations count as backward pass, the reduction of gradients over ranks as optimizer."""

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
        """The seconds since it was read last."""
        if self._pairs:
            torch.cuda.synchronize()
            self._total_s += sum(begin.elapsed_time(end) for begin, end in self._pairs) / 1000
            self._pairs = []
        taken_s, self._total_s = self._total_s, 0.0
        return taken_s


class _Unmeasured:
    def start(self, barrier: bool = False) -> None:
        """Part of a phase that is measured as a whole, or none."""

    def stop(self, barrier: bool = False) -> None:
        """As `start`."""


class Phases:
    """What Megatron takes as `timers`: it asks for one by name around each pass of a micro-batch."""

    def __init__(self) -> None:
        self._forward, self._backward, self._optimizer = Stopwatch(), Stopwatch(), Stopwatch()
        self._named = {"forward-compute": self._forward, "backward-compute": self._backward}
        self._rest = _Unmeasured()

    def __call__(self, name: str, log_level: int = 0) -> Stopwatch | _Unmeasured:
        del log_level
        return self._named.get(name, self._rest)

    @contextlib.contextmanager
    def optimizer(self) -> Generator[None]:
        """Count the block as the optimizer's."""
        self._optimizer.start()
        yield
        self._optimizer.stop()

    def take(self) -> PhaseSeconds:
        """The seconds since they were read last."""
        return PhaseSeconds(self._forward.take_s(), self._backward.take_s(), self._optimizer.take_s())


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
