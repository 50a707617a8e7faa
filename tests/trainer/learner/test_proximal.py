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
