"""Carries each call of the learner from rank 0, which decides, to all ranks, whose collectives must be entered together.

Rank 0 calls a method by its name. The call is announced to the other ranks, which wait in `follow` and call the same method of their own
learner with the same arguments. With one process nothing is sent. Calls from several threads take turns. A method is declared once, in
`Learner`: its annotations determine how its arguments are encoded.
"""

import inspect
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec
import numpy as np
import torch
from torch import distributed

from trainer.batching.batch import Batch, Sample
from trainer.learner import backend
from trainer.learner.megatron import Learner

LONGEST_WAIT = timedelta(days=30)
"""The longest wait of the other ranks in a collective between two batches, which is as long as rollouts may take."""

STOP = "stop"
"""The only announcement that is not a method of the learner: `follow` returns on the rank that receives it."""


def encode(name: str, *arguments: object) -> bytes:
    """The message to the other ranks about a call. It contains no experts that engines reported, only the fact that there are some: they
    are the larger part of a batch, and each rank gets its own from rank 0 when it needs them (trainer/learner/routing.py).
    """
    return msgspec.msgpack.encode((name, [_without_routing(one) for one in arguments]), enc_hook=_to_wire)


def decode(body: bytes) -> tuple[str, list[Any]]:
    """Inverse of `encode`. Raises ValueError for an unknown method of the learner, or arguments that do not match its annotations."""
    name, arguments = msgspec.msgpack.decode(body, type=tuple[str, list[msgspec.Raw]])
    if name == STOP:
        return name, []
    method = None if name.startswith("_") else getattr(Learner, name, None)
    if not inspect.isfunction(method):
        raise ValueError(f"the learner has no method {name!r}")
    hints = get_type_hints(method)
    kinds = [hints[parameter] for parameter in list(inspect.signature(method).parameters)[1:]]
    return name, [
        msgspec.msgpack.decode(argument, type=kind, dec_hook=_from_wire)
        for argument, kind in zip(arguments, kinds, strict=True)
    ]


class Feed:
    """A learner on all ranks, called from rank 0. Every rank builds one."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.num_threads = backend.num_threads()
        self._turn = threading.Lock()
        self._alone = distributed.get_world_size() == 1
        self._group = None if self._alone else _gloo_group()

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls a method of the learner on every rank. Returns this rank's result."""
        with self._turn:
            self._announce(name, *arguments)
            with self.learner.gpu_use.during(name):
                return getattr(self.learner, name)(*arguments)

    def stop(self) -> None:
        """Make the other ranks return from `follow`. Rank 0 calls it last."""
        with self._turn:
            self._announce(STOP)

    def follow(self) -> None:
        """Executes rank 0's announcements until it stops. Every rank but 0 calls this."""
        while (call := self._hear())[0] != STOP:
            name, arguments = call
            with self.learner.gpu_use.during(name):
                getattr(self.learner, name)(*arguments)

    def _announce(self, name: str, *arguments: object) -> None:
        if self._alone:
            return
        body = torch.frombuffer(bytearray(encode(name, *arguments)), dtype=torch.uint8)
        distributed.broadcast(torch.tensor([len(body)]), src=0, group=self._group)
        distributed.broadcast(body, src=0, group=self._group)

    def _hear(self) -> tuple[str, list[Any]]:
        length = torch.zeros(1, dtype=torch.int64)
        distributed.broadcast(length, src=0, group=self._group)
        body = torch.empty(int(length), dtype=torch.uint8)
        distributed.broadcast(body, src=0, group=self._group)
        return decode(body.numpy().tobytes())


def _gloo_group() -> distributed.ProcessGroup:
    """The group of all ranks over the CPU's network, because announcements are not tensors on a GPU."""
    group = distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    assert isinstance(group, distributed.ProcessGroup)
    return group


def _without_routing(argument: object) -> object:
    match argument:
        case Batch():
            return replace(argument, samples=tuple(map(_unrouted, argument.samples)))
        case [*samples] if all(isinstance(one, Sample) for one in samples):
            return [_unrouted(one) for one in cast(Sequence[Sample], samples)]
        case _:
            return argument


def _unrouted(sample: Sample) -> Sample:
    return sample if sample.routing is None else replace(sample, routing=np.empty(0, np.uint8))


def _to_wire(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = cast(np.ndarray[Any, Any], value)
        return array.dtype.str, array.tobytes()
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"cannot send a {type(value).__name__} to the other ranks")


def _from_wire(kind: Any, wire: Any) -> Any:
    if kind is Path:
        return Path(wire)
    dtype, content = wire
    return np.frombuffer(content, dtype)
