"""The objectives with PPO's clipped surrogate."""

import math

import pytest
import torch
from torch import Tensor

from tests.trainer.learner.objectives.tokens import gradient, loss_of, tokens
from trainer.learner.config import LossConfig
from trainer.learner.objectives.loss import policy_loss
from trainer.learner.objectives.registry import resolve
from trainer.learner.objectives.tokens import OtherSamples


def test_grpo_stops_outside_its_clip_only_where_the_advantage_pushes_outwards() -> None:
    policy, behaviour = torch.tensor([1.4, 1.4, 0.7, 0.7]).log(), torch.zeros(4)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    observed = gradient(policy, behaviour, advantages, LossConfig(kind="grpo"))
    torch.testing.assert_close(observed, torch.tensor([0.0, 1.4, -0.7, 0.0]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [(1.25, 1.0, False), (1.35, 1.0, True), (0.75, -1.0, True), (0.85, -1.0, False)],
)
def test_the_upper_and_the_lower_bound_of_the_clip_are_its_own(
    ratio: float, advantage: float, clipped: bool
) -> None:
    """Between 1 - clip_high and 1 - clip_low, and between 1 + clip_low and 1 + clip_high, swapped bounds would show."""
    policy, behaviour = torch.tensor([ratio]).log(), torch.zeros(1)
    config = LossConfig(kind="grpo", clip_low=0.2, clip_high=0.3)
    observed = gradient(policy, behaviour, torch.tensor([advantage]), config)
    torch.testing.assert_close(observed, torch.tensor([0.0 if clipped else -advantage * ratio]))


def test_a_dual_clip_bounds_what_a_bad_token_that_became_likely_counts() -> None:
    policy, behaviour, advantages = torch.tensor([2.0, 4.0]).log(), torch.zeros(2), torch.full((2,), -1.0)
    observed = gradient(policy, behaviour, advantages, LossConfig(kind="grpo", dual_clip=3.0))
    torch.testing.assert_close(observed, torch.tensor([2.0, 0.0]))
    loss, sums = loss_of(tokens(policy, behaviour, advantages), LossConfig(kind="grpo", dual_clip=3.0))
    assert (loss.item(), sums["masked"].item()) == (pytest.approx(2.0 + 3.0), 1)
    without = gradient(policy, behaviour, advantages, LossConfig(kind="grpo", dual_clip=0))
    torch.testing.assert_close(without, torch.tensor([2.0, 4.0]))


def mean_ratio(policy: Tensor, behaviour: Tensor) -> float:
    return (policy - behaviour).mean().exp().item()


def test_gspo_gives_every_token_of_a_trajectory_the_geometric_mean_of_its_ratios() -> None:
    behaviour = torch.tensor([-1.0, -2.0, -0.5, -1.0, -1.0])
    policy = behaviour + torch.tensor([2e-4, -5e-4, 6e-4, 0.2, 0.3])
    segments = torch.tensor([0, 0, 0, 1, 1])
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0])
    observed = gradient(policy, behaviour, advantages, LossConfig(kind="gspo"), segments_P=segments)
    near, far = mean_ratio(policy[:3], behaviour[:3]), mean_ratio(policy[3:], behaviour[3:])
    torch.testing.assert_close(observed, torch.tensor([-near] * 3 + [2 * far] * 2))
    clipped = gradient(policy, behaviour, -advantages, LossConfig(kind="gspo"), segments_P=segments)
    assert clipped[3:].tolist() == [0.0, 0.0], (
        "the whole trajectory left the clip the way its advantage pushes"
    )
    assert clipped[:3].all()


def test_the_gradient_of_gspo_is_that_of_the_clipped_ratio_of_whole_trajectories() -> None:
    """Against the formula of the paper, differentiated by autograd: the mean over trajectories of min(s A, clip(s) A)."""
    behaviour = torch.tensor([-1.0, -2.0, -0.5, -1.0, -1.0])
    policy = (behaviour + torch.tensor([2e-4, -5e-4, 6e-4, 1e-4, 3e-4])).requires_grad_()
    ratios = [(policy[part] - behaviour[part]).mean().exp() for part in (slice(0, 3), slice(3, 5))]
    surrogates = [
        torch.minimum(ratio * advantage, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantage)
        for ratio, advantage in zip(ratios, (1.0, -2.0), strict=True)
    ]
    (expected,) = torch.autograd.grad(-sum(surrogates), policy)
    given = tokens(
        leaf := policy.detach().clone().requires_grad_(),
        behaviour,
        torch.tensor([1.0] * 3 + [-2.0] * 2),
        segments_P=torch.tensor([0, 0, 0, 1, 1]),
    )
    factors = torch.tensor([1 / 3] * 3 + [1 / 2] * 2)
    loss, _ = policy_loss(given, resolve(LossConfig(kind="gspo")), factors)
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], expected)


def test_the_ratio_of_a_trajectory_counts_its_other_samples() -> None:
    policy, behaviour = torch.tensor([-1.0, -1.0]), torch.tensor([-1.2, -1.2])
    others = OtherSamples(torch.zeros(2).bool(), torch.full((2,), -0.4), torch.full((2,), 2.0))
    observed = gradient(policy, behaviour, -torch.ones(2), LossConfig(kind="gspo"), other_samples=others)
    torch.testing.assert_close(observed, torch.ones(2))  # (0.2 + 0.2 - 0.4) / 4 = 0


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("tis", [2.0, 1.5, 0.25, 1.0]),
        ("decoupled_ppo", [0.0, 1.5, 0.25, 1.0]),
        ("icepop", [0.0, 1.5, 0.0, 1.0]),
    ],
)
def test_the_weight_of_the_proximal_policy_is_truncated_or_masked(kind: str, weights: list[float]) -> None:
    """In a step of one update, the proximal policy is the policy: only the weight is left."""
    behaviour = torch.full((4,), -2.0)
    policy = behaviour + torch.tensor([2.5, 1.5, 0.25, 1.0]).log()
    advantages = torch.tensor([1.0, -1.0, 2.0, 1.0])
    config = LossConfig(kind=kind, ratio_cap=2.0)
    observed = gradient(policy, behaviour, advantages, config)
    torch.testing.assert_close(observed, -torch.tensor(weights) * advantages)
    _, sums = loss_of(tokens(policy, behaviour, advantages), config)
    assert sums["masked"].item() == weights.count(0.0)


@pytest.mark.parametrize("kind", ["tis", "decoupled_ppo", "icepop"])
def test_the_clip_is_around_the_proximal_policy(kind: str) -> None:
    """Far from the behaviour policy and near the proximal one: nothing is clipped; the other way round it is."""
    behaviour, proximal = torch.tensor([-2.0, -2.0]), torch.tensor([-1.6, -2.0])
    policy = torch.tensor([-1.59, -1.6])
    observed = gradient(policy, behaviour, torch.ones(2), LossConfig(kind=kind), proximal_logprobs_P=proximal)
    weight, ratio = math.exp(0.4), math.exp(0.01)
    torch.testing.assert_close(observed, torch.tensor([-weight * ratio, 0.0]))


def test_the_log_linear_proximal_policy_lies_between_by_lag() -> None:
    """A-3PO: as in the paper's example, versions 0 and 2 of 4 have (4 - 1 - v) / (4 - v) = 3/4 and 1/2 of the way."""
    behaviour, policy = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.5, -2.2, -1.1])
    lags = torch.tensor([3, 1, 0])
    config = LossConfig(kind="tis", proximal="log_linear")
    observed = gradient(policy, behaviour, torch.ones(3), config, lags_P=lags)
    proximal = torch.tensor([-1.375, -2.1, -1.0])
    expected = gradient(
        policy, behaviour, torch.ones(3), LossConfig(kind="tis"), proximal_logprobs_P=proximal
    )
    torch.testing.assert_close(observed, expected)


@pytest.mark.parametrize("kind", ["tis", "decoupled_ppo", "icepop"])
def test_the_clip_around_the_log_linear_proximal_policy_is_the_wider_the_older_the_token(kind: str) -> None:
    """All three tokens have moved by 0.5 nats, of which 1 / (lag + 1) has happened since the start of the step: a factor of 1.13,
    1.28 or 1.65 of the proximal policy's probability. The weight for the rest does not depend on the clip.
    """
    behaviour = torch.full((3,), -2.0)
    policy, lags = behaviour + 0.5, torch.tensor([3, 1, 0])
    config = LossConfig(kind=kind, proximal="log_linear", clip_high=0.3)
    observed = gradient(policy, behaviour, torch.ones(3), config, lags_P=lags)
    torch.testing.assert_close(observed, -math.exp(0.5) * torch.tensor([1.0, 1.0, 0.0]))
    narrow = LossConfig(kind=kind, proximal="log_linear", clip_high=0.2)
    observed = gradient(policy, behaviour, torch.ones(3), narrow, lags_P=lags)
    torch.testing.assert_close(observed, -math.exp(0.5) * torch.tensor([1.0, 0.0, 0.0]))
