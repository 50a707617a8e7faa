"""Carries each call of the learner from rank 0, which decides, to all ranks, whose collectives must be entered together.

Rank 0 calls the methods of a `Feed`. Each call is announced to the other ranks, which wait in `follow` and call the same
method of their own learner with the same arguments. With one process nothing is sent. Calls from several threads take turns.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import distributed

from trainer.batching.batch import Batch, Sample
from trainer.learner.config import NotFinite, StepMetrics
from trainer.learner.forward import Logprobs
from trainer.learner.megatron import Learner

LONGEST_WAIT = timedelta(days=30)
"""How long the other ranks wait in a collective between two batches: as long as rollouts may take."""


class LearnerCommand(msgspec.Struct, frozen=True, tag=True):
    """What all ranks do next."""


class StepCommand(LearnerCommand, frozen=True):
    batch: Batch


class AccumulateCommand(LearnerCommand, frozen=True):
    batch: Batch


class ApplyCommand(LearnerCommand, frozen=True):
    step: int


class LogprobsCommand(LearnerCommand, frozen=True):
    version: int | None  # None for the present weights
    samples: tuple[Sample, ...]
    temperature: float


class SnapshotCommand(LearnerCommand, frozen=True):
    version: int


class ExportCommand(LearnerCommand, frozen=True):
    directory: str


class BeginSaveCommand(LearnerCommand, frozen=True):
    directory: str
    extra: bytes


class FinishSaveCommand(LearnerCommand, frozen=True):
    pass


class RestoreCommand(LearnerCommand, frozen=True):
    directory: str


class StopCommand(LearnerCommand, frozen=True):
    """Leave `follow`."""


def encode(command: LearnerCommand) -> bytes:
    return msgspec.msgpack.encode(command, enc_hook=_array_to_wire)


def decode(body: bytes) -> LearnerCommand:
    commands = (
        StepCommand
        | AccumulateCommand
        | ApplyCommand
        | LogprobsCommand
        | SnapshotCommand
        | ExportCommand
        | BeginSaveCommand
        | FinishSaveCommand
        | RestoreCommand
        | StopCommand
    )
    return msgspec.msgpack.decode(body, type=commands, dec_hook=_array_from_wire)


def perform(learner: Learner, command: LearnerCommand) -> Any:
    """Call the learner's method that the command names."""
    match command:
        case StepCommand(batch):
            return learner.step(batch)
        case AccumulateCommand(batch):
            return learner.accumulate(batch)
        case ApplyCommand(step):
            return learner.apply(step)
        case LogprobsCommand(None, samples, temperature):
            return learner.logprobs(samples, temperature)
        case LogprobsCommand(int(version), samples, temperature):
            return learner.logprobs_under(version, samples, temperature)
        case SnapshotCommand(version):
            return learner.snapshot(version)
        case ExportCommand(directory):
            return learner.export(Path(directory))
        case BeginSaveCommand(directory, extra):
            return learner.begin_save(Path(directory), extra)
        case FinishSaveCommand():
            return learner.finish_save()
        case RestoreCommand(directory):
            return learner.restore(Path(directory))
    raise AssertionError(command)


class Feed:
    """A learner on all ranks, called from rank 0. Every rank builds one."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._turn = threading.Lock()
        self._alone = distributed.get_world_size() == 1
        self._group = None if self._alone else _gloo_group()

    def step(self, batch: Batch) -> StepMetrics | NotFinite:
        return self._everywhere(StepCommand(batch))

    def accumulate(self, batch: Batch) -> None:
        self._everywhere(AccumulateCommand(batch))

    def apply(self, step: int) -> StepMetrics | NotFinite:
        return self._everywhere(ApplyCommand(step))

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> Logprobs:
        return self._everywhere(LogprobsCommand(None, tuple(samples), temperature))

    def logprobs_under(self, version: int, samples: Sequence[Sample], temperature: float) -> Logprobs:
        return self._everywhere(LogprobsCommand(version, tuple(samples), temperature))

    def snapshot(self, version: int) -> None:
        self._everywhere(SnapshotCommand(version))

    def export(self, directory: Path) -> None:
        self._everywhere(ExportCommand(str(directory)))

    def begin_save(self, directory: Path, extra: bytes) -> None:
        self._everywhere(BeginSaveCommand(str(directory), extra))

    def finish_save(self) -> None:
        self._everywhere(FinishSaveCommand())

    def restore(self, directory: Path) -> bytes:
        return self._everywhere(RestoreCommand(str(directory)))

    def stop(self) -> None:
        """Make the other ranks return from `follow`. Rank 0 calls it last."""
        with self._turn:
            self._announce(StopCommand())

    def follow(self) -> None:
        """On every rank but 0: do what rank 0 announces until it stops."""
        while not isinstance(command := self._hear(), StopCommand):
            perform(self.learner, command)

    def _everywhere(self, command: LearnerCommand) -> Any:
        with self._turn:
            self._announce(command)
            return perform(self.learner, command)

    def _announce(self, command: LearnerCommand) -> None:
        if self._alone:
            return
        body = torch.frombuffer(bytearray(encode(command)), dtype=torch.uint8)
        distributed.broadcast(torch.tensor([len(body)]), src=0, group=self._group)
        distributed.broadcast(body, src=0, group=self._group)

    def _hear(self) -> LearnerCommand:
        length = torch.zeros(1, dtype=torch.int64)
        distributed.broadcast(length, src=0, group=self._group)
        body = torch.empty(int(length), dtype=torch.uint8)
        distributed.broadcast(body, src=0, group=self._group)
        return decode(body.numpy().tobytes())


def _gloo_group() -> distributed.ProcessGroup:
    """All ranks, over the CPU's network: commands are no tensors on a GPU."""
    group = distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    assert isinstance(group, distributed.ProcessGroup)
    return group


def _array_to_wire(value: Any) -> tuple[str, bytes]:
    if isinstance(value, np.ndarray):
        array = cast(np.ndarray[Any, Any], value)
        return array.dtype.str, array.tobytes()
    raise NotImplementedError(f"cannot send a {type(value).__name__} to the other ranks")


def _array_from_wire(_type: Any, wire: Any) -> Any:
    dtype, content = wire
    return np.frombuffer(content, dtype)
