import math

import pytest
import torch
from torch import Tensor

from trainer.learner.config import LossConfig
from trainer.learner.loss import Tokens, policy_loss


def tokens(policy: Tensor, behaviour: Tensor, advantages: Tensor, **changes: Tensor) -> Tokens:
    defaults = {
        "trained_P": torch.ones(len(policy), dtype=torch.bool),
        "segments_P": torch.zeros(len(policy), dtype=torch.int64),
        "vetoed_elsewhere_P": torch.zeros(len(policy), dtype=torch.bool),
        "entropies_P": torch.zeros(len(policy)),
    }
    return Tokens(
        policy_logprobs_P=policy,
        behaviour_logprobs_P=behaviour,
        advantages_P=advantages,
        **(defaults | changes),
    )


def gradient(
    policy: Tensor, behaviour: Tensor, advantages: Tensor, config: LossConfig, **changes: Tensor
) -> Tensor:
    leaf = policy.clone().requires_grad_()
    loss, _ = policy_loss(tokens(leaf, behaviour, advantages, **changes), config)
    return torch.autograd.grad(loss, leaf)[0]


def test_stream_grpo_has_its_closed_form_gradient() -> None:
    policy = torch.tensor([-1.0, -2.0, -0.5])
    behaviour = torch.tensor([-1.1, -1.9, -0.45])
    advantages = torch.tensor([1.5, -0.7, 0.3])
    ratios = (policy - behaviour).exp()
    expected = -ratios * advantages + 2 * 0.01 * (policy - behaviour)
    torch.testing.assert_close(gradient(policy, behaviour, advantages, LossConfig(anchor=0.01)), expected)


def test_on_policy_stream_grpo_is_grpo() -> None:
    policy, advantages = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([1.5, -0.7, 0.3])
    stream = gradient(policy, policy, advantages, LossConfig(kind="stream_grpo"))
    torch.testing.assert_close(stream, gradient(policy, policy, advantages, LossConfig(kind="grpo")))
    torch.testing.assert_close(stream, gradient(policy, policy, advantages, LossConfig(kind="ppo_clip")))
    torch.testing.assert_close(stream, -advantages)


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
    changes = {"segments_P": segments, "vetoed_elsewhere_P": elsewhere}
    observed = gradient(policy, policy, torch.ones(4), LossConfig(), **changes)
    torch.testing.assert_close(observed, torch.tensor([-1.0, -1.0, 0.0, 0.0]))


def test_an_impossible_ratio_on_an_untrained_token_vetoes_nothing() -> None:
    policy, behaviour = torch.tensor([-1.0, -12.0]), torch.tensor([-1.0, 0.0])
    trained = torch.tensor([True, False])
    observed = gradient(policy, behaviour, torch.ones(2), LossConfig(), trained_P=trained)
    torch.testing.assert_close(observed, torch.tensor([-1.0, 0.0]))


def test_a_log_ratio_beyond_all_bounds_stays_finite() -> None:
    policy, behaviour = torch.tensor([-300.0]), torch.tensor([0.0])
    for kind in ("stream_grpo", "ppo_clip", "grpo", "sft"):
        loss, sums = policy_loss(tokens(policy, behaviour, torch.ones(1)), LossConfig(kind=kind))
        assert torch.isfinite(loss)
        assert all(torch.isfinite(value) for value in sums.values())


def test_ppo_stops_outside_its_clip_only_where_the_advantage_pushes_outwards() -> None:
    policy, behaviour = torch.tensor([1.4, 1.4, 0.7, 0.7]).log(), torch.zeros(4)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    observed = gradient(policy, behaviour, advantages, LossConfig(kind="ppo_clip"))
    torch.testing.assert_close(observed, torch.tensor([0.0, 1.4, -0.7, 0.0]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [(1.25, 1.0, False), (1.35, 1.0, True), (0.75, -1.0, True), (0.85, -1.0, False)],
)
def test_the_upper_and_the_lower_bound_of_ppo_are_its_own(
    ratio: float, advantage: float, clipped: bool
) -> None:
    """Between 1 - clip_high and 1 - clip_low, and between 1 + clip_low and 1 + clip_high, swapped bounds would show."""
    policy, behaviour = torch.tensor([ratio]).log(), torch.zeros(1)
    config = LossConfig(kind="ppo_clip", clip_low=0.2, clip_high=0.3)
    observed = gradient(policy, behaviour, torch.tensor([advantage]), config)
    torch.testing.assert_close(observed, torch.tensor([0.0 if clipped else -advantage * ratio]))


def test_the_pull_to_the_reference_is_its_drift() -> None:
    policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    config = LossConfig(reference_kl=0.1, anchor=0.0)
    observed = gradient(policy, policy, torch.zeros(2), config, reference_logprobs_P=reference)
    torch.testing.assert_close(observed, 0.1 * (policy - reference))


def test_sums_count_trained_tokens_only() -> None:
    policy, behaviour = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, -9.0])
    trained = torch.tensor([True, True, False])
    data = tokens(
        policy, behaviour, torch.ones(3), trained_P=trained, entropies_P=torch.tensor([0.5, 0.25, 8.0])
    )
    loss, sums = policy_loss(data, LossConfig())
    ratio = math.e
    assert sums["tokens"] == 2
    assert sums["entropy"] == 0.75
    assert sums["loss"] == loss
    assert sums["ratio"].item() == pytest.approx(1 + ratio)
    assert sums["ratio_max"].item() == pytest.approx(ratio)
    assert sums["weight_squared"].item() == pytest.approx(1 + ratio**2)
    assert sums["behaviour_kl"].item() == pytest.approx(ratio - 2)
    assert sums["masked"] == 1  # raised from e^-2 to e^-1, more than 0.2


def test_bounds_that_enclose_nothing_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="veto_low and veto_high must enclose 1"):
        LossConfig(veto_low=2.0)
    with pytest.raises(ValueError, match="clip_low"):
        LossConfig(clip_low=1.5)
