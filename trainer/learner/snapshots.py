"""Host copies of a model's weights, and the temporary use of one of them.

Data-parallel ranks hold the same parameters, so each of them keeps a part of a copy; when the copy is used, each parameter is
broadcast from the rank that keeps it. Parameters that are not trained never change and are not copied.

`HostTensors` copies a set of tensors to one block of host memory that is no larger than they are. With CUDA a block is page-locked, so that
a GPU copies to and from it at full speed. torch's own allocator of page-locked memory rounds every tensor up to a power of two, and keeps
freed memory for tensors of that size. Here a block is locked at its exact size. When its set is dropped, it is kept and reused by the next
set of the same size, because locking takes as long as copying.
"""

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from trainer.learner import backend

_ALIGNMENT_BYTES = 64
"""Every tensor in a block begins at a multiple of this."""

_unused: defaultdict[int, list[Tensor]] = defaultdict(list)
"""Blocks whose sets were dropped, by their size in bytes."""


class HostTensors:
    """Tensors on the host with the shapes and types of others. Their memory is reused once this object is dropped."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        """The tensors have no content yet."""
        starts, num_bytes = [], 0
        for tensor in like:
            starts.append(num_bytes)
            num_bytes += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        block = _unused[num_bytes].pop() if _unused[num_bytes] else _locked_block(num_bytes)
        weakref.finalize(self, _unused[num_bytes].append, block).atexit = False
        memory: Any = block.numpy()
        # Not views of the block: torch.save writes the whole storage of a view.
        self.tensors = [
            torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(
                tensor.shape
            )
            for tensor, start in zip(like, starts, strict=True)
        ]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "HostTensors":
        """Copies of the tensors, complete on return."""
        made = cls(tensors)
        for copy, tensor in zip(made.tensors, tensors, strict=True):
            copy.copy_(tensor.detach(), non_blocking=True)
        backend.wait_for_copies()
        return made


def _locked_block(num_bytes: int) -> Tensor:
    block = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    backend.page_lock(block)
    return block


Weights = dict[str, Tensor]
"""Parameters of this rank by name, on the host."""


class DividedCopy:
    """A copy of the trained weights at the moment of its construction. Every rank makes one."""

    def __init__(self, model: nn.Module) -> None:
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._keepers = keepers(self._trained)
        own = [name for name, keeper in self._keepers.items() if keeper == distributed.get_rank()]
        self._copies = HostTensors.of([self._trained[name] for name in own])
        self._kept: Weights = dict(zip(own, self._copies.tensors, strict=True))

    @torch.no_grad()
    def load(self) -> None:
        """Give the model these weights. Collective."""
        for name, parameter in self._trained.items():
            if name in self._kept:
                parameter.copy_(self._kept[name], non_blocking=True)
            replicas = backend.replica_group(parameter)
            if replicas.size() > 1:
                distributed.broadcast(parameter.detach(), src=self._keepers[name], group=replicas)


class Snapshots:
    """The weights of the last few versions, for log-probs under the weights that sampled a token."""

    def __init__(self, model: nn.Module, *, kept: int) -> None:
        self._model = model
        self._kept = kept
        self._copies: dict[int, DividedCopy] = {}
        self._newest: DividedCopy | None = None  # the newest copy, if the model still has its weights

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that are kept, oldest first."""
        return tuple(self._copies)

    def take(self, version: int) -> None:
        """Keep a copy of the present weights; the oldest copies beyond `kept` are dropped."""
        if self._kept:
            self._copies[version] = self._newest = DividedCopy(self._model)
        for stale in list(self._copies)[: -self._kept]:
            del self._copies[stale]

    def weights_change(self) -> None:
        """Call this before the model's weights change permanently."""
        self._newest = None

    @contextlib.contextmanager
    def restored(self, version: int) -> Iterator[None]:
        """Gives the model the weights of `version` inside the block. Raises KeyError for a version that is not kept."""
        with self.replaced_by(self._copies[version]):
            yield

    @contextlib.contextmanager
    def replaced_by(self, weights: DividedCopy) -> Iterator[None]:
        """Give the model `weights` inside the block, and its own weights again afterwards, bit for bit. Collective.

        Its own weights are copied to the host for that, unless the newest snapshot holds them, as it does when a version is audited.
        """
        present = DividedCopy(self._model) if self._newest is None else self._newest
        try:
            weights.load()
            yield
        finally:
            present.load()


def copy_weights(model: nn.Module) -> Weights:
    """Host copies of all parameters of this rank."""
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: Weights) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def keepers(held: dict[str, nn.Parameter]) -> dict[str, int]:
    """The rank that keeps each parameter. Large ones are assigned first, each to the replica that has the fewest values so far."""
    kept_bytes: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    chosen: dict[str, int] = {}
    for name in sorted(held, key=lambda name: -held[name].nbytes):
        ranks = tuple(distributed.get_process_group_ranks(backend.replica_group(held[name])))
        taken = kept_bytes[ranks]
        chosen[name] = min(ranks, key=lambda rank: taken[rank])
        taken[chosen[name]] += held[name].nbytes
    return chosen
