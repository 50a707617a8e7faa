"""What the learner reports of each token that a step trained: its own log-prob, the weight, and why there is no gradient."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.rollout_store.record import REASONS
from tests.trainer.learner.tiny import branched, config, make_batch, make_samples, take_step
from trainer.batching.batch import Sample, SampleTokens
from trainer.learner.config import LearnerConfig, LossConfig
from trainer.learner.megatron import Learner


def keeping(directory: Path, options: LearnerConfig) -> Learner:
    return Learner(options, model_directory=directory, keep_tokens=True)


def reported(learner: Learner, samples: tuple[Sample, ...]) -> list[SampleTokens]:
    """What the learner kept of each sample, in the order of `samples`."""
    found = {(one.request_id, one.branch): one for one in learner.take_tokens()}
    assert len(found) == len(samples)
    return [found[sample.request_id, sample.branch] for sample in samples]


def share(tokens: list[SampleTokens], samples: tuple[Sample, ...], reason: str) -> float:
    """Of the trained tokens, how many have this reason."""
    code = REASONS.index(reason)
    chosen = zip(tokens, samples, strict=True)
    return float(np.concatenate([one.reasons_T[sample.trained_T] == code for one, sample in chosen]).mean())


def test_a_token_has_the_log_prob_of_the_weights_before_the_update_and_the_weight_of_the_objective(
    qwen3: Path,
) -> None:
    learner, samples = keeping(qwen3, config(loss=LossConfig(kind="cispo"))), make_samples()
    before = learner.logprobs(samples, 1.0)
    take_step(learner, samples)
    for one, sample, expected_T in zip(reported(learner, samples), samples, before, strict=True):
        np.testing.assert_allclose(one.logprobs_T, expected_T, atol=1e-5)
        ratios_T = np.exp(expected_T - sample.behaviour_logprobs_T).clip(max=5.0)
        np.testing.assert_allclose(one.weights_T, np.where(sample.trained_T, ratios_T, 0), rtol=1e-4)
        assert not one.reasons_T.any()
    assert learner.take_tokens() == (), "they are taken once"


def test_what_the_step_masked_and_vetoed_are_the_tokens_with_these_reasons(qwen3: Path) -> None:
    samples = branched(make_samples(), offender=1)
    learner = keeping(qwen3, config(loss=LossConfig(kind="stream_grpo", delta=0.001), micro_batch_tokens=40))
    metrics = take_step(learner, samples)
    tokens = reported(learner, samples)
    assert share(tokens, samples, "vetoed") == pytest.approx(metrics.vetoed_share)
    assert share(tokens, samples, "masked") == pytest.approx(metrics.masked_share)
    assert metrics.masked_share > 0
    for one, sample in list(zip(tokens, samples, strict=True))[:3]:
        assert (one.reasons_T[sample.trained_T] == REASONS.index("vetoed")).all()


def test_a_trajectory_outside_the_geometric_mask_says_so(qwen3: Path) -> None:
    samples = make_samples()
    learner = keeping(qwen3, config(loss=LossConfig(kind="grpo", geometric_mask=(0.999, 1.001))))
    metrics = take_step(learner, samples)
    tokens = reported(learner, samples)
    assert share(tokens, samples, "geometric_mask") == pytest.approx(metrics.vetoed_share)
    assert metrics.vetoed_share > 0


def test_a_streamed_step_reports_what_the_whole_batch_does(qwen3: Path) -> None:
    whole, streamed = keeping(qwen3, config()), keeping(qwen3, config())
    samples = make_samples()
    take_step(whole, samples)
    for part in (samples[:2], samples[2:]):
        streamed.accumulate(make_batch(part))
    assert streamed.take_tokens() == (), "nothing was trained yet"
    streamed.apply(1)
    for one, other in zip(reported(whole, samples), reported(streamed, samples), strict=True):
        np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=1e-5)


def test_of_several_passes_over_a_token_the_last_is_reported(qwen3: Path) -> None:
    samples = make_samples()
    learner = keeping(qwen3, config(num_epochs=3, lr=1e-2, clip_grad=0.0))
    before = learner.logprobs(samples, 1.0)
    take_step(learner, samples)
    tokens, after = reported(learner, samples), learner.logprobs(samples, 1.0)
    apart = [
        np.abs(one.logprobs_T - values_T).max()
        for one, first, last in zip(tokens, before, after, strict=True)
        for values_T in (first, last)
    ]
    assert min(apart) > 1e-3, "not under the weights before the first update, nor under those after the last"


def test_a_learner_that_is_not_told_to_keeps_nothing(qwen3: Path) -> None:
    learner = Learner(config(), model_directory=qwen3)
    take_step(learner, make_samples())
    assert learner.take_tokens() == ()


def test_a_skipped_batch_reports_nothing(qwen3: Path) -> None:
    learner, samples = keeping(qwen3, config()), make_samples()
    samples[0].advantages_T[samples[0].trained_T] = float("nan")
    learner.step(make_batch(samples))
    assert learner.take_tokens() == ()
