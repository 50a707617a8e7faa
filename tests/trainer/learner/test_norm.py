"""The RMS norm: torch's values and gradients, from fewer saved bytes."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.trainer.learner.tiny import config
from trainer.learner.families.registry import read_architecture
from trainer.learner.model import RmsNorm, transformer_config

NUM_VECTORS, WIDTH = 12, 64


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors (three dimensions, as Megatron's), a weight, and the gradient that arrives."""
    generator = torch.Generator().manual_seed(5)
    vectors, weight, gradient = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((NUM_VECTORS, 1, WIDTH), (WIDTH,), (NUM_VECTORS, 1, WIDTH))
    )
    return vectors.mul_(3), weight, gradient


def norm_with(directory: Path, weight: Tensor) -> RmsNorm:
    norm = RmsNorm(transformer_config(read_architecture(directory), config()), WIDTH, eps=1e-6)
    norm.weight.data = weight.clone()
    return norm


def test_values_and_gradients_are_those_of_torch(qwen3: Path) -> None:
    vectors, weight, gradient = inputs(torch.float32)
    norm = norm_with(qwen3, weight)
    ours, theirs = vectors.clone().requires_grad_(), vectors.clone().requires_grad_()
    reference_weight = weight.clone().requires_grad_()
    observed = norm(ours)
    expected = F.rms_norm(theirs, (WIDTH,), reference_weight, 1e-6)
    assert torch.equal(observed, expected)
    observed.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.weight.grad, reference_weight.grad, rtol=1e-5, atol=1e-6)


def test_a_half_precision_gradient_is_that_of_single_precision_rounded(qwen3: Path) -> None:
    vectors, weight, gradient = inputs(torch.bfloat16)
    observed = vectors.clone().requires_grad_()
    norm_with(qwen3, weight)(observed).backward(gradient)
    wide = vectors.float().requires_grad_()
    F.rms_norm(wide, (WIDTH,), weight.float(), 1e-6).backward(gradient.float())
    assert observed.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(observed.grad, wide.grad.to(torch.bfloat16), rtol=0, atol=0)


def test_a_weight_that_is_centred_at_zero_is_the_factor_less_1(qwen3: Path) -> None:
    vectors, weight, gradient = inputs(torch.float32)
    architecture = msgspec.structs.replace(read_architecture(qwen3), zero_centred_norms=True)
    norm = RmsNorm(transformer_config(architecture, config()), WIDTH, eps=1e-6)
    norm.weight.data = weight.clone()
    ours, theirs = vectors.clone().requires_grad_(), vectors.clone().requires_grad_()
    factor = (weight + 1).requires_grad_()
    observed, expected = norm(ours), F.rms_norm(theirs, (WIDTH,), factor, 1e-6)
    assert torch.equal(observed, expected)
    observed.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.weight.grad, factor.grad, rtol=1e-5, atol=1e-6)
    in_half = norm(vectors.bfloat16())
    assert torch.equal(in_half, F.rms_norm(vectors.bfloat16().float(), (WIDTH,), factor, 1e-6).bfloat16())


@pytest.mark.cpu_only
def test_half_precision_inputs_are_saved_once_and_never_in_single_precision(qwen3: Path) -> None:
    vectors, weight, _ = inputs(torch.bfloat16)
    norm = norm_with(qwen3, weight)
    vectors.requires_grad_()
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        norm(vectors)
    others = [t for t in saved if t.data_ptr() not in (vectors.data_ptr(), norm.weight.data_ptr())]
    assert sum(t.nbytes for t in others) == 4 * NUM_VECTORS
