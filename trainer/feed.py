"""The one bridge from rank 0, which decides, to the collectives that all ranks must enter together.

Rank 0 calls the methods of a `Feed`; each is announced to the other ranks, which sit in `follow` and call the
same method of their own learner with the same arguments. With one process nothing is sent. Calls from several
threads take turns.
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
from trainer.learner.config import StepMetrics
from trainer.learner.megatron import Learner, Logprobs

LONGEST_WAIT = timedelta(days=30)
"""Between two batches the other ranks wait in a collective, for as long as rollouts may take."""


class Command(msgspec.Struct, frozen=True, tag=True):
    """What all ranks are to do next."""


class Step(Command, frozen=True):
    batch: Batch


class Recompute(Command, frozen=True):
    version: int | None  # None for the present weights
    samples: tuple[Sample, ...]
    temperature: float


class Snapshot(Command, frozen=True):
    version: int


class Export(Command, frozen=True):
    directory: str


class Save(Command, frozen=True):
    directory: str
    extra: bytes


class Restore(Command, frozen=True):
    directory: str


class Stop(Command, frozen=True):
    """Leave `follow`."""


def encode(command: Command) -> bytes:
    return msgspec.msgpack.encode(command, enc_hook=_array_to_wire)


def decode(body: bytes) -> Command:
    commands = Step | Recompute | Snapshot | Export | Save | Restore | Stop
    return msgspec.msgpack.decode(body, type=commands, dec_hook=_array_from_wire)


def perform(learner: Learner, command: Command) -> Any:
    """Call the learner's method that the command names."""
    match command:
        case Step(batch):
            return learner.step(batch)
        case Recompute(None, samples, temperature):
            return learner.logprobs(samples, temperature)
        case Recompute(int(version), samples, temperature):
            return learner.logprobs_under(version, samples, temperature)
        case Snapshot(version):
            return learner.snapshot(version)
        case Export(directory):
            return learner.export(Path(directory))
        case Save(directory, extra):
            return learner.save(Path(directory), extra)
        case Restore(directory):
            return learner.restore(Path(directory))
    raise AssertionError(command)


class Feed:
    """A learner on all ranks, called from rank 0. Every rank builds one."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self._turn = threading.Lock()
        self._alone = distributed.get_world_size() == 1
        self._group = None if self._alone else distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)

    def step(self, batch: Batch) -> StepMetrics:
        return self._everywhere(Step(batch))

    def logprobs(self, samples: Sequence[Sample], temperature: float) -> Logprobs:
        return self._everywhere(Recompute(None, tuple(samples), temperature))

    def logprobs_under(self, version: int, samples: Sequence[Sample], temperature: float) -> Logprobs:
        return self._everywhere(Recompute(version, tuple(samples), temperature))

    def snapshot(self, version: int) -> None:
        self._everywhere(Snapshot(version))

    def export(self, directory: Path) -> None:
        self._everywhere(Export(str(directory)))

    def save(self, directory: Path, extra: bytes) -> None:
        self._everywhere(Save(str(directory), extra))

    def restore(self, directory: Path) -> bytes:
        return self._everywhere(Restore(str(directory)))

    def stop(self) -> None:
        """Let the other ranks return from `follow`. Rank 0 calls it last."""
        with self._turn:
            self._announce(Stop())

    def follow(self) -> None:
        """On every rank but 0: do what rank 0 announces until it stops."""
        while not isinstance(command := self._hear(), Stop):
            perform(self.learner, command)

    def _everywhere(self, command: Command) -> Any:
        with self._turn:
            self._announce(command)
            return perform(self.learner, command)

    def _announce(self, command: Command) -> None:
        if self._alone:
            return
        body = torch.frombuffer(bytearray(encode(command)), dtype=torch.uint8)
        distributed.broadcast(torch.tensor([len(body)]), src=0, group=self._group)
        distributed.broadcast(body, src=0, group=self._group)

    def _hear(self) -> Command:
        length = torch.zeros(1, dtype=torch.int64)
        distributed.broadcast(length, src=0, group=self._group)
        body = torch.empty(int(length), dtype=torch.uint8)
        distributed.broadcast(body, src=0, group=self._group)
        return decode(body.numpy().tobytes())


def _array_to_wire(value: Any) -> tuple[str, bytes]:
    if isinstance(value, np.ndarray):
        array = cast(np.ndarray[Any, Any], value)
        return array.dtype.str, array.tobytes()
    raise NotImplementedError(f"cannot send a {type(value).__name__} to the other ranks")


def _array_from_wire(_type: Any, wire: Any) -> Any:
    dtype, content = wire
    return np.frombuffer(content, dtype)
