"""The optimizer's tensors on the host between updates: Adam's moments, and the fp32 originals of half-precision weights.

They are needed on the device in the update alone, when no activations exist, so activations and optimizer use the same memory in
turn. Every update brings all of them over and takes them back, over pinned memory. The update itself is Megatron's, on the
device, so results are the same bit for bit.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

from trainer.learner import backend


def keep_on_host(optimizer: MegatronOptimizer, parts: list[Any], model: nn.Module) -> None:
    """From now on `optimizer.step` has its tensors on the device while it runs, and only then.

    `parts` are Megatron's wrappers within `optimizer`, each around one torch optimizer.
    """
    tensors = _OptimizerTensors([part.optimizer for part in parts], model)
    update = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        tensors.to_device()
        try:
            return update(*args, **kwargs)
        finally:
            tensors.to_host()

    optimizer.step = step
    tensors.to_host()


class _OptimizerTensors:
    """Moves the tensors of some torch optimizers. Their storages change, the tensors' identities do not."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], model: nn.Module) -> None:
        self._optimizers = optimizers
        self._model = model
        self._buffers: dict[tuple[int, str | None], Tensor] = {}

    @torch.no_grad()
    def to_host(self) -> None:
        for parameter, name, tensor in self._tensors():
            if name is None:
                parameter.grad = None  # it lies on the device, and the next update makes its own
            key = (id(parameter), name)
            if key not in self._buffers:
                self._buffers[key] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=backend.has_cuda()
                )
            self._buffers[key].copy_(tensor, non_blocking=True)
            tensor.data = self._buffers[key]
        torch.cuda.synchronize()

    @torch.no_grad()
    def to_device(self) -> None:
        for _, _, tensor in self._tensors():
            tensor.data = tensor.data.to(backend.device(), copy=True, non_blocking=True)

    def _tensors(self) -> Iterator[tuple[Tensor, str | None, Tensor]]:
        """Parameter, name of its state or None, and the tensor; without those that are the model's own weights."""
        in_model = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.untyped_storage().data_ptr() not in in_model:
                        yield parameter, None, parameter
                    for name, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, Tensor) and value.dim():  # the step count is none
                            yield parameter, name, value
