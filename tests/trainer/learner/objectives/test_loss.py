"""What a recipe adds to an objective, and what is reported."""

import math
from dataclasses import replace

import pytest
import torch

from tests.trainer.learner.objectives.tokens import gradient, loss_of, tokens
from trainer.learner.config import LossConfig
from trainer.learner.objectives.loss import policy_loss
from trainer.learner.objectives.registry import OBJECTIVES, resolve
from trainer.learner.objectives.tokens import OtherSamples, mean_log_ratios


def test_the_pull_to_the_reference_is_its_drift() -> None:
    policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    config = LossConfig(reference_kl=0.1, anchor=0.0)
    observed = gradient(policy, policy, torch.zeros(2), config, reference_logprobs_P=reference)
    torch.testing.assert_close(observed, 0.1 * (policy - reference))


def test_as_a_cost_the_divergence_is_weighted_and_masked_like_any_advantage() -> None:
    """k1: on-policy as k2, off-policy with the weight of the objective."""
    policy, behaviour = torch.tensor([-1.0, -2.0]), torch.tensor([-1.4, -2.0])
    reference = torch.tensor([-1.5, -1.0])
    config = LossConfig(kind="cispo", reference_kl=0.1, reference_kl_kind="k1")
    observed = gradient(policy, behaviour, torch.ones(2), config, reference_logprobs_P=reference)
    expected = -(policy - behaviour).exp() * (1 - 0.1 * (policy - reference))
    torch.testing.assert_close(observed, expected)


def test_the_third_estimate_pulls_by_one_minus_the_ratio_of_the_reference() -> None:
    policy, reference = torch.tensor([-1.0, -2.0, -30.0]), torch.tensor([-1.5, -1.0, -1.0])
    config = LossConfig(kind="reinforce", reference_kl=0.1, reference_kl_kind="k3")
    observed = gradient(policy, policy, torch.zeros(3), config, reference_logprobs_P=reference)
    expected = 0.1 * (1 - (reference - policy).exp())
    expected[2] = 0.0  # beyond all bounds, it would drown every other token
    torch.testing.assert_close(observed, expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("k1", (0.5 - 1) / 2),
        ("k2", (0.125 + 0.5) / 2),
        ("k3", (math.expm1(-0.5) + 0.5 + math.expm1(1) - 1) / 2),
    ],
)
def test_the_divergence_is_reported_as_it_is_estimated(kind: str, value: float) -> None:
    policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    config = LossConfig(reference_kl=0.1, reference_kl_kind=kind)
    _, sums = loss_of(tokens(policy, policy, torch.ones(2), reference_logprobs_P=reference), config)
    assert sums["reference_kl"].item() / 2 == pytest.approx(value, rel=1e-5)


def test_an_entropy_bonus_raises_the_entropy_of_trained_tokens() -> None:
    entropies = torch.tensor([0.5, 1.0, 2.0], requires_grad=True)
    given = tokens(
        torch.full((3,), -1.0),
        torch.full((3,), -1.0),
        torch.ones(3),
        entropies_P=entropies,
        trained_P=torch.tensor([True, True, False]),
    )
    loss, sums = loss_of(given, LossConfig(kind="reinforce", entropy=0.01))
    (observed,) = torch.autograd.grad(loss, entropies)
    torch.testing.assert_close(observed, torch.tensor([-0.01, -0.01, 0.0]))
    assert loss.item() == pytest.approx(2 - 0.01 * 1.5)
    assert (sums["entropy"].item(), sums["entropy"].requires_grad) == (1.5, False)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_trajectory_whose_mean_ratio_is_off_is_not_trained_by_any_objective(kind: str) -> None:
    behaviour = torch.full((4,), -1.0)
    policy = behaviour + torch.tensor([0.3, -0.3, 0.02, 0.02])
    segments = torch.tensor([0, 0, 1, 1])
    config = LossConfig(kind=kind, geometric_mask=(0.99, 1.01), entropy=0.1)
    entropies = torch.full((4,), 0.5, requires_grad=True)
    given = tokens(
        policy.requires_grad_(), behaviour, torch.ones(4), segments_P=segments, entropies_P=entropies
    )
    loss, sums = loss_of(given, config)
    observed, of_entropies = torch.autograd.grad(loss, (policy, entropies))
    assert observed[2:].tolist() == [0.0, 0.0]
    torch.testing.assert_close(of_entropies, torch.tensor([-0.1, -0.1, 0.0, 0.0]))
    assert sums["vetoed"].item() == 2


def test_a_vetoed_trajectory_gets_no_entropy_bonus_and_a_masked_token_keeps_its_own() -> None:
    """The veto is of the whole trajectory, the mask only of a token's policy gradient."""
    behaviour = torch.tensor([-1.0, -1.0, -3.0, -1.0])
    policy = behaviour + torch.tensor([-30.0, 0.0, 2.9, 0.0])  # the third has moved by more than delta
    entropies = torch.full((4,), 0.5, requires_grad=True)
    given = tokens(
        policy, behaviour, torch.ones(4), segments_P=torch.tensor([0, 0, 1, 1]), entropies_P=entropies
    )
    loss, sums = loss_of(given, LossConfig(kind="stream_grpo", entropy=0.1))
    assert (sums["vetoed"].item(), sums["masked"].item()) == (2, 1)
    (observed,) = torch.autograd.grad(loss, entropies)
    torch.testing.assert_close(observed, torch.tensor([0.0, 0.0, -0.1, -0.1]))


def test_the_mean_ratio_of_a_trajectory_is_over_all_its_samples() -> None:
    policy, behaviour = torch.tensor([-1.0, -1.0]), torch.tensor([-1.2, -1.2])
    config = LossConfig(kind="cispo", geometric_mask=(0.99, 1.01))
    assert not gradient(policy, behaviour, torch.ones(2), config).any()
    others = OtherSamples(torch.zeros(2).bool(), torch.full((2,), -0.4), torch.full((2,), 3.0))
    assert gradient(policy, behaviour, torch.ones(2), config, other_samples=others).all()


def test_the_mean_ratio_of_a_trajectory_does_not_depend_on_the_order_in_which_tokens_are_summed() -> None:
    """On a GPU, sums by index are in whatever order threads finish, so a run would not repeat itself."""
    behaviour = torch.full((20_000,), -1.0)
    policy = behaviour + torch.randn(20_000, generator=torch.Generator().manual_seed(7))
    segments = torch.arange(200).repeat_interleave(100)
    order = torch.randperm(20_000, generator=torch.Generator().manual_seed(8))
    there, back = order[segments[order].argsort(stable=True)], torch.empty(20_000, dtype=torch.long)
    back[there] = torch.arange(20_000)  # each token to another place of its own sample
    given, shuffled = (
        mean_log_ratios(tokens(policy[places], behaviour, torch.ones(20_000), segments_P=segments))
        for places in (torch.arange(20_000), there)
    )
    assert torch.equal(segments[there], segments)
    assert torch.equal(given, shuffled[back])
    expected = (policy - behaviour).double().view(200, 100).mean(1).repeat_interleave(100)
    torch.testing.assert_close(given.double(), expected, rtol=1e-6, atol=1e-7)


def test_a_factor_multiplies_the_whole_loss_of_a_token() -> None:
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    given = tokens(policy, torch.tensor([-1.1, -1.9]), torch.ones(2))
    plain, halved = (
        torch.autograd.grad(policy_loss(given, resolve(LossConfig()), factors)[0], policy)[0]
        for factors in (None, torch.tensor([0.5, 0.25]))
    )
    torch.testing.assert_close(halved, plain * torch.tensor([0.5, 0.25]))


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_a_log_ratio_beyond_all_bounds_stays_finite(kind: str) -> None:
    for policy in (-300.0, 0.0):
        behaviour = torch.tensor([-300.0 - policy])
        changes = {
            "proximal_logprobs_P": behaviour,
            "reference_logprobs_P": behaviour,
        }
        config = LossConfig(kind=kind, reference_kl=0.1, reference_kl_kind="k3")
        given = tokens(torch.tensor([policy]), behaviour, torch.ones(1), **changes)
        for one in (given, replace(given, proximal_logprobs_P=None)):
            loss, sums = loss_of(one, config)
            assert torch.isfinite(loss)
            assert all(torch.isfinite(value).all() for value in sums.values())


def test_sums_count_trained_tokens_only() -> None:
    policy, behaviour = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, -9.0])
    trained = torch.tensor([True, True, False])
    data = tokens(
        policy, behaviour, torch.ones(3), trained_P=trained, entropies_P=torch.tensor([0.5, 0.25, 8.0])
    )
    loss, sums = loss_of(data, LossConfig())
    ratio = math.e
    assert sums["tokens"] == 2
    assert sums["entropy"] == 0.75
    assert sums["loss"] == loss
    assert sums["ratio"].item() == pytest.approx(1 + ratio)
    assert sums["ratio_max"].item() == pytest.approx(ratio)
    assert sums["weight_squared"].item() == pytest.approx(1 + ratio**2)
    assert sums["behaviour_kl"].item() == pytest.approx(ratio - 2)
    assert sums["masked"] == 1  # raised from e^-2 to e^-1, more than 0.2
