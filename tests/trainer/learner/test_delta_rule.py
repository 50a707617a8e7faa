"""The gated delta rule by chunks against the same rule position by position in fp64, and against samples by themselves."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trainer.learner.delta_rule import CHUNK, LENGTH_EPS, causal_convolution, gated_delta_rule

LENGTHS = (7, CHUNK, 1, CHUNK + 1, 2 * CHUNK + 5, 3)
BOUNDARIES = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
HEADS, PER_HEAD, KEY_WIDTH, VALUE_WIDTH = 3, 2, 8, 12


def inputs(num_positions: int, *, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Queries, keys, values, logarithms of decays and strengths; the heads remember from hundreds of positions to none."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(num_positions, HEADS, *shape, generator=generator, dtype=torch.float64)

    rates = torch.linspace(-6, 1, HEADS * PER_HEAD).view(HEADS, PER_HEAD).exp()
    found = (
        normal(KEY_WIDTH),
        normal(KEY_WIDTH) + 0.5,  # keys that overlap, as after the SiLU
        normal(PER_HEAD, VALUE_WIDTH),
        -rates * torch.nn.functional.softplus(normal(PER_HEAD)),
        normal(PER_HEAD).sigmoid(),
    )
    return tuple(one.to(dtype).requires_grad_() for one in found)


def by_position(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
    """One sample, as the paper writes the rule."""
    query, key = (one / (one.square().sum(-1, keepdim=True) + LENGTH_EPS).sqrt() for one in (query, key))
    state, found = query.new_zeros(HEADS, PER_HEAD, KEY_WIDTH, VALUE_WIDTH), []
    for q, k, v, g, b in zip(query, key, value, log_decay, strength, strict=True):
        state = state * g.exp()[..., None, None]
        remembered = torch.einsum("grkv,gk->grv", state, k)
        state = state + torch.einsum("gk,grv->grkv", k, b[..., None] * (v - remembered))
        found.append(torch.einsum("grkv,gk->grv", state, q * KEY_WIDTH**-0.5))
    return torch.stack(found)


@pytest.mark.parametrize("boundaries", [BOUNDARIES, [0, 3], [0, 5 * CHUNK]], ids=str)
def test_chunks_compute_what_the_rule_says_for_each_position_of_each_sample(boundaries: list[int]) -> None:
    given = inputs(boundaries[-1])
    exact = [one.detach().double().requires_grad_() for one in given]
    expected = torch.cat([by_position(*(x[a:b] for x in exact)) for a, b in pairwise(boundaries)])
    found = gated_delta_rule(*given, boundaries)
    assert found.dtype == torch.float32
    assert float((found - expected).detach().abs().max()) < 1e-6
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    of_expected = torch.autograd.grad((expected * direction).sum(), exact)
    of_found = torch.autograd.grad((found * direction.float()).sum(), given)
    for one, other in zip(of_found, of_expected, strict=True):
        assert float((one - other).abs().max()) < 1e-5 * max(float(other.abs().max()), 1.0)


def test_a_sample_gets_nothing_from_those_packed_before_and_behind_it() -> None:
    given = inputs(BOUNDARIES[-1])
    together = gated_delta_rule(*given, BOUNDARIES)
    for start, stop in pairwise(BOUNDARIES):
        alone = gated_delta_rule(*(one[start:stop] for one in given), [0, stop - start])
        torch.testing.assert_close(together[start:stop], alone, rtol=0, atol=1e-6)
    # A boundary that is left out is noticed.
    joined = gated_delta_rule(*given, [BOUNDARIES[0], *BOUNDARIES[2:]])
    assert float((joined - together).detach().abs().max()) > 0.01


def test_a_decay_to_nothing_leaves_numbers() -> None:
    query, key, value, log_decay, strength = inputs(2 * CHUNK)
    log_decay = (log_decay.detach() - 1e4).requires_grad_()
    given = (query, key, value, log_decay, strength)
    found = gated_delta_rule(*given, [0, 2 * CHUNK])
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert all(one.grad is not None and torch.isfinite(one.grad).all() for one in given)


def test_inputs_in_half_precision_are_widened_before_anything_is_added() -> None:
    half = inputs(BOUNDARIES[-1], dtype=torch.bfloat16)
    wide = tuple(one.detach().float() for one in half)
    assert torch.equal(gated_delta_rule(*half, BOUNDARIES), gated_delta_rule(*wide, BOUNDARIES))


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_the_convolution_covers_a_position_and_those_before_it_in_its_sample(kernel: int) -> None:
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(BOUNDARIES[-1], 6, generator=generator)
    weight = torch.randn(6, 1, kernel, generator=generator)
    expected = torch.zeros_like(values)
    for start, stop in pairwise(BOUNDARIES):
        for position in range(start, stop):
            for back in range(min(kernel, position - start + 1)):
                expected[position] += weight[:, 0, kernel - 1 - back] * values[position - back]
    torch.testing.assert_close(causal_convolution(values, weight, BOUNDARIES), expected, rtol=0, atol=1e-5)
