"""RMS norm for Megatron's layers, where TransformerEngine, which brings one, is absent.

Megatron's wrapper of torch's norm rejects sequence parallelism, and on a CPU torch keeps fp32 copies of half-precision inputs
for the backward pass. Here the backward pass gets the input and one number per position.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


def norm_class() -> Any:
    """TransformerEngine's norm where it is installed, else ours. Both are built by the same arguments."""
    return TENorm if HAVE_TE else RmsNorm


class RmsNorm(nn.Module):
    """Scales each vector to a root mean square of 1, then by the weight. Computed in fp32, rounded once."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        # Megatron then adds up the gradients of the tensor-parallel ranks, each of which normalises other positions.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> Tensor:
        """Of vectors in the last dimension."""
        if inputs.is_cuda:  # torch's kernel there saves what ours does
            return F.rms_norm(inputs, self.weight.shape, self.weight, self.eps)
        return _RmsNorm.apply(inputs, self.weight, self.eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = inputs.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(inputs, weight, scale)
        return (wide * scale).mul_(weight).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = inputs * scale: d inputs = scale * (g - n * mean(g * n)) for g = gradient * weight."""
        inputs, weight, scale = ctx.saved_tensors
        normed, gradient = inputs.float() * scale, gradient.float()
        of_weight = (gradient * normed).flatten(0, -2).sum(0)
        weighted = gradient * weight
        of_inputs = (weighted - normed * (weighted * normed).mean(-1, keepdim=True)).mul_(scale)
        return of_inputs.to(inputs.dtype), of_weight.to(weight.dtype), None
