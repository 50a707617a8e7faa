"""Host copies of a model's weights, and computing under one of them for a while.

Data-parallel ranks hold the same parameters, so each of them keeps a part of a copy; when the copy is used, each parameter is
broadcast from the rank that keeps it. Parameters that are not trained never change and are not copied.
"""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, distributed, nn

from trainer.learner import backend

Weights = dict[str, Tensor]
"""Parameters of this rank by name, on the host."""


class DividedCopy:
    """The trained weights of the moment when it is made. Every rank makes one."""

    def __init__(self, model: nn.Module) -> None:
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._keepers = _keepers(self._trained)
        own = [name for name, keeper in self._keepers.items() if keeper == distributed.get_rank()]
        copies = backend.host_copies([self._trained[name] for name in own])
        self._kept: Weights = dict(zip(own, copies, strict=True))

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

    @property
    def versions(self) -> tuple[int, ...]:
        """Oldest first."""
        return tuple(self._copies)

    def take(self, version: int) -> None:
        """Keep a copy of the present weights; the oldest copies beyond `kept` are dropped."""
        if self._kept:
            self._copies[version] = DividedCopy(self._model)
        for stale in list(self._copies)[: -self._kept]:
            del self._copies[stale]

    @contextlib.contextmanager
    def restored(self, version: int) -> Iterator[None]:
        """The model has the weights of `version` inside the block. Raises KeyError for a version that is not kept."""
        with weights_replaced(self._model, self._copies[version]):
            yield


def copy_weights(model: nn.Module) -> Weights:
    """All parameters of this rank."""
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: Weights) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


@contextlib.contextmanager
def weights_replaced(model: nn.Module, weights: DividedCopy) -> Iterator[None]:
    """The model has `weights` inside the block; afterwards it has its own again, bit for bit. Collective."""
    present = DividedCopy(model)
    weights.load()
    try:
        yield
    finally:
        present.load()


def _keepers(trained: dict[str, nn.Parameter]) -> dict[str, int]:
    """Which rank keeps each parameter: large ones first, each with the replica that has least of them so far."""
    kept_bytes: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    keepers: dict[str, int] = {}
    for name in sorted(trained, key=lambda name: -trained[name].nbytes):
        ranks = tuple(distributed.get_process_group_ranks(backend.replica_group(trained[name])))
        taken = kept_bytes[ranks]
        keepers[name] = min(ranks, key=lambda rank: taken[rank])
        taken[keepers[name]] += trained[name].nbytes
    return keepers
