"""What a step reports of its tokens apart by their lag."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.learner.objectives.tokens import loss_of, tokens
from tests.trainer.learner.tiny import config, make_batch, make_samples
from trainer.batching.batch import Batch
from trainer.learner.config import NUM_LAGS, LossConfig, StepMetrics
from trainer.learner.lag_sums import LAG_SUMS, lag_metrics, lags_of
from trainer.learner.megatron import Learner


def of_two_versions() -> Batch:
    """Every other sample is sampled by version 3, the others by version 5, of which 3 is two behind."""
    samples = tuple(
        replace(one, versions_T=np.where(one.trained_T, 3 + 2 * (index % 2), -1).astype(np.int32))
        for index, one in enumerate(make_samples())
    )
    return replace(make_batch(samples), lags={3: 2, 5: 0})


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
    sums = np.zeros((NUM_LAGS, len(LAG_SUMS)))
    sums[1] = [8, 0, 0, 8, 0, 1.0]
    (only,) = lag_metrics(sums)
    assert (only.ess_share, only.masked_share, only.behaviour_kl) == (0.0, 1.0, 0.125)
