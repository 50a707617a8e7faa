"""The objectives that weigh each token's policy gradient."""

import math

import pytest
import torch

from tests.trainer.learner.objectives.tokens import gradient, loss_of, tokens
from trainer.learner.config import LossConfig
from trainer.learner.objectives.tokens import OtherSamples


def test_stream_grpo_has_its_closed_form_gradient() -> None:
    policy = torch.tensor([-1.0, -2.0, -0.5])
    behaviour = torch.tensor([-1.1, -1.9, -0.45])
    advantages = torch.tensor([1.5, -0.7, 0.3])
    ratios = (policy - behaviour).exp()
    expected = -ratios * advantages + 2 * 0.01 * (policy - behaviour)
    torch.testing.assert_close(gradient(policy, behaviour, advantages, LossConfig(anchor=0.01)), expected)


def test_cispo_weighs_every_token_by_its_capped_ratio_and_switches_none_off() -> None:
    policy = torch.tensor([0.9, 0.1, 0.5, 1e-6]).log()
    behaviour = torch.tensor([0.1, 0.9, 0.4, 0.5]).log()
    advantages = torch.tensor([1.0, -1.0, 2.0, 1.0])
    observed = gradient(policy, behaviour, advantages, LossConfig(kind="cispo", ratio_cap=5.0))
    torch.testing.assert_close(observed, -torch.tensor([5.0, 1 / 9, 1.25, 2e-6]) * advantages)
    _, sums = loss_of(tokens(policy, behaviour, advantages), LossConfig(kind="cispo"))
    assert (sums["masked"], sums["vetoed"]) == (0, 0)


def test_the_weight_of_a_token_is_capped() -> None:
    policy, behaviour = torch.tensor([math.log(0.12)]), torch.tensor([math.log(0.01)])
    observed = gradient(policy, behaviour, torch.tensor([-1.0]), LossConfig(ratio_cap=5.0, anchor=0.0))
    torch.testing.assert_close(observed, torch.tensor([5.0]))


@pytest.mark.parametrize(
    ("policy", "behaviour", "advantage", "masked"),
    [
        (0.75, 0.5, 1.0, True),  # already raised by more than delta, and the advantage would raise it further
        (0.75, 0.5, -1.0, False),  # raised, but the advantage pulls it back
        (0.25, 0.5, -1.0, True),
        (0.25, 0.5, 1.0, False),
        (0.65, 0.5, 1.0, False),
    ],
)
def test_the_trust_region_stops_what_already_moved_that_way(
    policy: float, behaviour: float, advantage: float, masked: bool
) -> None:
    observed = gradient(
        torch.tensor([policy]).log(),
        torch.tensor([behaviour]).log(),
        torch.tensor([advantage]),
        LossConfig(anchor=0.0),
    )
    assert (observed == 0).item() is masked


def test_one_impossible_ratio_vetoes_its_sample_and_no_other() -> None:
    policy = torch.tensor([-1.0, -12.0, -1.0, -1.0])
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    segments = torch.tensor([0, 0, 1, 1])
    observed = gradient(policy, behaviour, torch.ones(4), LossConfig(), segments_P=segments)
    torch.testing.assert_close(observed, torch.tensor([0.0, 0.0, -1.0, -1.0]))


def test_a_sample_is_vetoed_for_another_of_its_trajectory() -> None:
    policy, segments = torch.full((4,), -1.0), torch.tensor([0, 0, 1, 1])
    elsewhere = torch.tensor([False, False, True, True])
    others = OtherSamples(elsewhere, torch.zeros(4), torch.zeros(4))
    changes = {"segments_P": segments, "other_samples": others}
    observed = gradient(policy, policy, torch.ones(4), LossConfig(), **changes)
    torch.testing.assert_close(observed, torch.tensor([-1.0, -1.0, 0.0, 0.0]))


def test_an_impossible_ratio_on_an_untrained_token_vetoes_nothing() -> None:
    policy, behaviour = torch.tensor([-1.0, -12.0]), torch.tensor([-1.0, 0.0])
    trained = torch.tensor([True, False])
    observed = gradient(policy, behaviour, torch.ones(2), LossConfig(), trained_P=trained)
    torch.testing.assert_close(observed, torch.tensor([-1.0, 0.0]))


def test_topr_imitates_the_good_whatever_its_ratio_and_truncates_the_bad() -> None:
    policy, behaviour = torch.tensor([0.4, 0.1, 0.4, 0.1]).log(), torch.full((4,), 0.2).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    observed = gradient(policy, behaviour, advantages, LossConfig(kind="topr"))
    torch.testing.assert_close(observed, torch.tensor([-1.0, -1.0, 1.0, 0.5]))


def test_sft_imitates_whatever_the_advantage() -> None:
    policy, behaviour = torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -1.0])
    observed = gradient(policy, behaviour, torch.tensor([1.0, -1.0]), LossConfig(kind="sft"))
    torch.testing.assert_close(observed, torch.tensor([-1.0, -1.0]))
