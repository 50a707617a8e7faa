"""A step whose samples come in part by part is the step of the whole batch."""

from pathlib import Path

import pytest

from tests.trainer.learner.tiny import (
    config,
    gradients,
    make_batch,
    make_samples,
    relative_difference,
    take_step,
)
from trainer.learner.config import LossConfig, NotFinite, StepMetrics
from trainer.learner.megatron import Learner

PARTS = ((0, 2), (2, 3), (3, 6))


def test_the_gradient_of_parts_is_that_of_the_whole_batch(qwen3: Path) -> None:
    options = config(loss=LossConfig(reference_kl=0.1))
    whole, streamed = Learner(options, model_directory=qwen3), Learner(options, model_directory=qwen3)
    for step in (1, 2):
        samples = make_samples(seed=step)
        expected = take_step(whole, samples, step=step)
        for begin, end in PARTS:
            streamed.accumulate(make_batch(samples[begin:end], step=step))
            streamed.logprobs(samples, 1.0)  # an audit in between changes nothing
        observed = streamed.apply(step)
        assert isinstance(observed, StepMetrics)
        assert relative_difference(streamed, whole) < 1e-5
        assert observed.num_trained_tokens == expected.num_trained_tokens
        assert observed.step == step == streamed.steps
        assert (observed.loss, observed.grad_norm, observed.lr) == pytest.approx(
            (expected.loss, expected.grad_norm, expected.lr), rel=1e-5
        )


def test_parts_that_are_not_finite_are_skipped_and_leave_nothing_behind(qwen3: Path) -> None:
    learner, other = (Learner(config(), model_directory=qwen3) for _ in range(2))
    samples = make_samples()
    broken = make_batch(samples[:2])
    broken.samples[0].advantages_T[broken.samples[0].trained_T] = float("nan")
    learner.accumulate(broken)
    learner.accumulate(make_batch(samples[2:]))
    assert isinstance(learner.apply(1), NotFinite)
    assert learner.steps == 0
    again = make_samples()
    for one in (learner, other):
        one.accumulate(make_batch(again))
        assert isinstance(one.apply(1), StepMetrics)
    assert all((gradients(learner)[name] == value).all() for name, value in gradients(other).items())


def test_a_step_says_where_its_time_went(qwen3: Path) -> None:
    learner = Learner(config(), model_directory=qwen3)
    for metrics in (take_step(learner, make_samples()), take_step(learner, make_samples(), step=2)):
        phases = (metrics.forward_s, metrics.backward_s, metrics.optimizer_s)
        assert min(phases) > 0
        assert sum(phases) <= metrics.train_s
