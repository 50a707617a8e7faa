"""Objectives around the weights at the start of a step, in steps of several updates."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.learner.tiny import config, make_batch, make_samples, relative_difference
from trainer.batching.batch import Batch, Sample
from trainer.learner.config import LossConfig, StepMetrics
from trainer.learner.megatron import Learner


def behaving_like(learner: Learner, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """As if the learner's present weights had sampled them."""
    drawn = learner.logprobs(samples, 1.0)
    return tuple(
        replace(one, behaviour_logprobs_T=np.where(one.trained_T, logprobs, 0).astype(np.float32))
        for one, logprobs in zip(samples, drawn, strict=True)
    )


def stepped(directory: Path, batch: Batch, loss: LossConfig) -> Learner:
    learner = Learner(config(loss=loss, num_epochs=3, clip_grad=0.0, lr=2e-3), model_directory=directory)
    assert isinstance(learner.step(batch), StepMetrics)
    return learner


def test_samples_of_the_starting_weights_make_it_the_clipped_surrogate(qwen3: Path) -> None:
    """Then behaviour and proximal policy are one, in every update of the step."""
    samples = behaving_like(Learner(config(), model_directory=qwen3), make_samples())
    decoupled, clipped = (
        stepped(qwen3, make_batch(samples), LossConfig(kind=kind, aggregation="token"))
        for kind in ("decoupled_ppo", "dr_grpo")
    )
    assert relative_difference(decoupled, clipped) <= 1e-4


@pytest.mark.parametrize("kind", ["decoupled_ppo", "tis", "icepop"])
def test_the_proximal_policy_is_that_of_the_steps_start_in_every_update(qwen3: Path, kind: str) -> None:
    """If it were the present one, no ratio would ever be clipped, and the third update would be like the first."""
    batch = make_batch(make_samples())
    wide, narrow = (
        stepped(qwen3, batch, LossConfig(kind=kind, clip_low=clip, clip_high=clip)) for clip in (0.99, 1e-4)
    )
    assert relative_difference(wide, narrow) > 1e-2


def test_between_the_policies_the_proximal_one_costs_no_forward_pass_and_is_about_the_same(
    qwen3: Path,
) -> None:
    batch = make_batch(make_samples())
    recomputed, between = (
        stepped(qwen3, batch, LossConfig(kind="tis", proximal=proximal))
        for proximal in ("recompute", "log_linear")
    )
    assert relative_difference(recomputed, between) > 1e-4


def test_in_a_step_of_two_updates_the_log_linear_proximal_policy_clips_the_less_the_older_the_tokens(
    qwen3: Path,
) -> None:
    """Of what a token has moved since it was sampled, lag / (lag + 1) lies before the step, and only the rest is clipped."""
    samples = make_samples()
    loss = LossConfig(kind="tis", proximal="log_linear")
    for lag in (0, 1, 7):
        learner = Learner(
            config(loss=loss, num_epochs=2, micro_batch_tokens=200), model_directory=qwen3, keep_tokens=True
        )
        before = learner.logprobs(samples, 1.0)
        metrics = learner.step(replace(make_batch(samples), lags={0: lag}))
        assert isinstance(metrics, StepMetrics)
        assert metrics.num_updates == 2
        after = {one.request_id: one.logprobs_T for one in learner.take_tokens()}  # of the second update
        clipped = [
            _is_clipped(one, logprobs_T, since_the_start=1 / (lag + 1))
            for index, one in enumerate(samples)
            for logprobs_T in (before[index], after[one.request_id])
        ]
        assert metrics.masked_share == pytest.approx(np.concatenate(clipped).mean())


def _is_clipped(sample: Sample, logprobs_T: np.ndarray, *, since_the_start: float) -> np.ndarray:
    """By the numbers of `tis`, 0.8 and 1.28, for each trained token."""
    moved_T = np.clip(logprobs_T - sample.behaviour_logprobs_T, -20, 20)
    ratios_T, advantages_T = np.exp(since_the_start * moved_T), sample.advantages_T
    outside_T = ((advantages_T > 0) & (ratios_T > 1.28)) | ((advantages_T < 0) & (ratios_T < 0.8))
    return outside_T[sample.trained_T]
