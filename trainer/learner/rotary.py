"""Rotary position embedding of packed positions, plain or stretched by YaRN as transformers does.

Megatron's own, for packed input, waits for the device twice per layer and sample, and keeps two arrays per layer for the
backward pass. Here the angles are computed once per micro-batch. Shape suffixes: L positions of this rank, H heads, D width of
a head.
"""

import math

import torch
from torch import Tensor

from trainer.learner.architecture import Architecture, Yarn


class Rotary:
    """The frequencies of one model."""

    def __init__(self, architecture: Architecture) -> None:
        width, theta = architecture.head_width, architecture.rope_theta
        exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
        self._frequencies = 1.0 / theta**exponents
        self._magnitude = 1.0
        if architecture.yarn is not None:
            self._frequencies = _stretched(self._frequencies, architecture.yarn, width=width, theta=theta)
            self._magnitude = architecture.yarn.magnitude

    def angles(self, positions_L: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each position, fp32 of L x 1 x D."""
        frequencies = self._frequencies.to(positions_L.device)
        half = positions_L.float()[:, None, None] * frequencies
        whole = torch.cat([half, half], dim=-1)
        return whole.cos() * self._magnitude, whole.sin() * self._magnitude


def rotated(vectors_LHD: Tensor, cosines_L1D: Tensor, sines_L1D: Tensor) -> Tensor:
    """Each vector turned by the angles of its position. Computed in fp32, as engines do, and rounded once."""
    wide = vectors_LHD.float()
    left, right = wide.chunk(2, dim=-1)
    turned = wide * cosines_L1D + torch.cat([-right, left], dim=-1) * sines_L1D
    return turned.to(vectors_LHD.dtype)


def _stretched(frequencies: Tensor, yarn: Yarn, *, width: int, theta: float) -> Tensor:
    """YaRN: slow dimensions turn slower by the factor, fast ones as before, those between by a mixture."""

    def dimension_of(num_turns: float) -> float:
        """The dimension that turns so often over the original length."""
        return width * math.log(yarn.original_positions / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    dimensions = torch.arange(width // 2, dtype=torch.float32)
    slow = ((dimensions - low) / (high - low if high > low else 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * slow + frequencies * (1 - slow)
