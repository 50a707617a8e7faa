"""Host copies of a model's weights, and computing under one of them for a while. Every rank copies its own part."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
"""Parameters of this rank by name, on the host."""


class Snapshots:
    """The weights of the last few versions, for log-probs under the weights that sampled a token."""

    def __init__(self, model: nn.Module, *, kept: int) -> None:
        self._model = model
        self._kept = kept
        self._weights: dict[int, Weights] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Oldest first."""
        return tuple(self._weights)

    def take(self, version: int) -> None:
        """Keep a copy of the present weights; the oldest copies beyond `kept` are dropped."""
        self._weights[version] = copy_weights(self._model)
        for stale in list(self._weights)[: -self._kept or None]:
            del self._weights[stale]

    @contextlib.contextmanager
    def restored(self, version: int) -> Iterator[None]:
        """The model has the weights of `version` inside the block. Raises KeyError for a version that is not kept."""
        with weights_replaced(self._model, self._weights[version]):
            yield


def copy_weights(model: nn.Module) -> Weights:
    return {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, weights: Weights) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


@contextlib.contextmanager
def weights_replaced(model: nn.Module, weights: Weights) -> Iterator[None]:
    """The model has `weights` inside the block; afterwards it has its own again, bit for bit."""
    present = copy_weights(model)
    load_weights(model, weights)
    try:
        yield
    finally:
        load_weights(model, present)
