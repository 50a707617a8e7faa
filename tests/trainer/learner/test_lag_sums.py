"""What a step reports of its tokens apart by their lag."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.rollout_store.record import REASONS
from tests.trainer.learner.objectives.tokens import loss_of, tokens
from tests.trainer.learner.tiny import config, of_two_versions
from trainer.learner.config import NUM_LAGS, LossConfig, StepMetrics
from trainer.learner.megatron import Learner
from trainer.learner.objectives.loss import SHAPE, lag_metrics, lags_of, policy_loss, signal_metrics
from trainer.learner.objectives.registry import resolve
from trainer.learner.objectives.tokens import Tokens


def test_a_step_reports_the_tokens_of_each_lag_and_together_they_are_the_step(qwen3: Path) -> None:
    learner = Learner(config(num_epochs=2, num_minibatches=2), model_directory=qwen3)
    batch = of_two_versions()
    metrics = learner.step(batch)
    assert isinstance(metrics, StepMetrics)
    newest, behind = metrics.by_lag
    assert (newest.lag, behind.lag) == (0, 2)
    trained = [sample.num_trained_tokens for sample in batch.samples]
    assert (newest.num_tokens, behind.num_tokens) == (2 * sum(trained[1::2]), 2 * sum(trained[::2]))
    for name in ("masked_share", "vetoed_share", "behaviour_kl"):
        parts = sum(getattr(one, name) * one.num_tokens for one in metrics.by_lag)
        assert parts / (2 * sum(trained)) == pytest.approx(getattr(metrics, name), rel=1e-5)


def test_parts_of_a_step_report_the_lags_of_the_whole(qwen3: Path) -> None:
    batch = of_two_versions()
    whole, parts = (Learner(config(), model_directory=qwen3) for _ in range(2))
    expected = whole.step(batch)
    for samples in (batch.samples[:2], batch.samples[2:]):
        parts.accumulate(replace(batch, samples=samples))
    observed = parts.apply(1)
    assert isinstance(expected, StepMetrics)
    assert isinstance(observed, StepMetrics)
    assert [one.num_tokens for one in observed.by_lag] == [one.num_tokens for one in expected.by_lag]
    assert [one.ess_share for one in observed.by_lag] == pytest.approx(
        [one.ess_share for one in expected.by_lag], rel=1e-5
    )


def test_effective_sample_size_and_divergence_of_a_lag_are_those_of_its_tokens_alone() -> None:
    behaviour = torch.full((5,), -1.0)
    ratios = torch.tensor([1.0, 1.0, 3.0, 1.0, 9.0])
    given = tokens(
        behaviour + ratios.log(),
        behaviour,
        torch.ones(5),
        trained_P=torch.tensor([True, True, True, True, False]),
        lags_P=torch.tensor([0, 0, 4, 4, 4]),
    )
    _, sums = loss_of(given, LossConfig(kind="cispo"))
    near, far = lag_metrics(sums["by_lag"].numpy())
    assert (near.lag, near.num_tokens, near.ess_share) == (0, 2, pytest.approx(1.0))
    assert near.behaviour_kl == pytest.approx(0.0, abs=1e-6)
    assert (far.lag, far.num_tokens) == (4, 2), "a token that is not trained is not counted"
    assert far.ess_share == pytest.approx((3 + 1) ** 2 / (2 * (9 + 1)))
    assert far.behaviour_kl == pytest.approx((3 - 1 - np.log(3)) / 2)


def test_the_last_row_takes_what_is_even_later_and_an_unknown_version_counts_as_newest() -> None:
    assert lags_of(np.array([0, 7, 9, -1], np.int32), {0: 1000, 7: 2}).tolist() == [NUM_LAGS - 1, 2, 0, 0]


def test_a_lag_whose_tokens_all_have_weight_zero_has_no_effective_sample() -> None:
    sums = np.zeros(SHAPE)
    sums[1] = [[8, 0, 0, 8, 0, 1.0, 2], [2, 0, 0, 2, 0, 0.5, 1]]
    (only,) = lag_metrics(sums)
    assert (only.ess_share, only.masked_share, only.behaviour_kl) == (0.0, 1.0, 0.125)
    assert only.signal is not None
    assert (only.signal.ess_share, only.signal.masked_share, only.signal.behaviour_kl) == (0.0, 1.0, 0.25)


def reference(given: Tokens, sums: dict[str, torch.Tensor], lag: int | None) -> dict[str, float]:
    """By the definition, one token after another: |A| (1 - pi) is what a token counts."""
    policy, behaviour = given.policy_logprobs_P.tolist(), given.behaviour_logprobs_P.tolist()
    _, weights, reasons = sums["by_token"].tolist()
    total = squared = weighted = weighted_squared = masked = vetoed = divergence = 0.0
    assert given.lags_P is not None
    for place in np.flatnonzero(given.trained_P.numpy()).tolist():
        if lag is not None and given.lags_P[place] != lag:
            continue
        signal = abs(given.advantages_P[place].item()) * (1 - math.exp(policy[place]))
        log_ratio = policy[place] - behaviour[place]
        total, squared = total + signal, squared + signal**2
        weighted += signal * weights[place]
        weighted_squared += signal * weights[place] ** 2
        masked += signal * (reasons[place] == REASONS.index("masked"))
        vetoed += signal * (reasons[place] == REASONS.index("vetoed"))
        divergence += signal * (math.exp(log_ratio) - 1 - log_ratio)
    return {
        "total": total,
        "num_tokens": total**2 / squared,
        "ess_share": weighted**2 / (total * weighted_squared),
        "masked_share": masked / total,
        "vetoed_share": vetoed / total,
        "behaviour_kl": divergence / total,
    }


def random_tokens(**changes: Any) -> Tokens:
    """Of three samples, the last with a ratio that nothing explains; a third of the tokens is not trained."""
    drawn = torch.Generator().manual_seed(3)
    policy = -(torch.empty(600).exponential_(generator=drawn) ** 2)
    behaviour = (policy + 0.7 * torch.randn(600, generator=drawn)).clamp(max=0.0)
    behaviour[-1] = -8.0
    policy[-1] = -0.5
    defaults = {
        "trained_P": torch.rand(600, generator=drawn) > 1 / 3,
        "lags_P": torch.randint(0, 3, (600,), generator=drawn),
        "segments_P": torch.arange(600) // 200,
    }
    defaults["trained_P"][-1] = True
    return tokens(policy, behaviour, torch.randn(600, generator=drawn), **(defaults | changes))


def test_shares_by_signal_are_those_of_the_definition_for_each_lag_and_together() -> None:
    given = random_tokens()
    _, sums = policy_loss(given, resolve(LossConfig()), keep_tokens=True)
    table = sums["by_lag"].numpy()
    together, by_lag = signal_metrics(table), lag_metrics(table)
    assert [one.lag for one in by_lag] == [0, 1, 2]
    for lag, observed in [(None, together), *((one.lag, one.signal) for one in by_lag)]:
        assert observed is not None
        expected = reference(given, sums, lag)
        assert min(expected.values()) > 0
        assert msgspec.structs.asdict(observed) == pytest.approx(expected, rel=1e-5)


def test_equal_weights_have_the_full_effective_sample_whatever_the_signals() -> None:
    for weight in (1.0, 0.3):
        given = random_tokens()
        given = replace(given, behaviour_logprobs_P=given.policy_logprobs_P - math.log(weight))
        _, sums = loss_of(given, LossConfig(kind="cispo"))
        found = signal_metrics(sums["by_lag"].numpy())
        assert found is not None
        assert found.ess_share == pytest.approx(1.0, abs=1e-6)


def test_a_mask_on_the_tokens_that_decide_is_seen_by_signal_alone() -> None:
    """Ninety-nine certain tokens and one that the policy would write every other time, which it has moved too far."""
    policy = torch.full((100,), math.log1p(-1e-6))
    behaviour = policy.clone()
    policy[7], behaviour[7] = math.log(0.5), math.log(0.2)
    _, sums = loss_of(tokens(policy, behaviour, torch.ones(100)), LossConfig())
    (seen,) = lag_metrics(sums["by_lag"].numpy())
    assert seen.signal is not None
    assert seen.masked_share == pytest.approx(0.01)
    assert seen.signal.masked_share > 0.999
    assert seen.signal.num_tokens == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("what", ["advantage", "doubt"])
def test_tokens_without_advantage_or_doubt_have_no_shares_by_signal(what: str) -> None:
    policy = torch.full((3,), -1.0 if what == "advantage" else 1e-7)
    advantages = torch.zeros(3) if what == "advantage" else torch.ones(3)
    _, sums = loss_of(tokens(policy, policy - 0.1, advantages), LossConfig())
    (seen,) = lag_metrics(sums["by_lag"].numpy())
    assert (seen.num_tokens, seen.signal, signal_metrics(sums["by_lag"].numpy())) == (3, None, None)
