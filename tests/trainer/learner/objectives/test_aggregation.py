"""How the losses of tokens become one loss: the same however an update's samples are spread."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.trainer.learner.tiny import (
    branched,
    config,
    gradients,
    largest_difference,
    make_batch,
    make_samples,
    relative_difference,
    take_step,
)
from trainer.batching.batch import Sample
from trainer.learner.config import Aggregation, LossConfig, StepMetrics
from trainer.learner.megatron import Learner
from trainer.learner.objectives.loss import divisor, factors

AGGREGATIONS = get_args(Aggregation)


def cut(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
    """The first three are samples of one trajectory."""
    return tuple(replace(one, request_id="cut", branch=n) if n < 3 else one for n, one in enumerate(samples))


def learner(directory: Path, aggregation: Aggregation, **changes: Any) -> Learner:
    loss = LossConfig(kind="cispo", aggregation=aggregation, constant_tokens=10)
    return Learner(config(loss=loss, clip_grad=0.0, **changes), model_directory=directory)


def test_a_trajectory_of_several_samples_counts_once() -> None:
    samples = cut(make_samples())
    counts = [one.num_trained_tokens for one in samples]
    together = sum(counts[:3])
    assert factors(samples, "trajectory") == [1 / together] * 3 + [1 / count for count in counts[3:]]
    assert factors(samples, "token") is factors(samples, "constant") is None
    assert divisor(samples, "token", constant_tokens=10) == sum(counts)
    assert divisor(samples, "trajectory", constant_tokens=10) == 4
    assert divisor(samples, "constant", constant_tokens=10) == 40


def test_a_trajectory_that_trains_nothing_does_not_count() -> None:
    first, *rest = make_samples()
    silent = replace(first, trained_T=first.trained_T & False)
    for aggregation in AGGREGATIONS:
        with_it = divisor((silent, *rest), aggregation, constant_tokens=10)
        assert with_it == divisor(rest, aggregation, constant_tokens=10)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_that_of_its_formula(qwen3: Path, aggregation: Aggregation) -> None:
    """Against `token`, with the advantages of each sample multiplied by what the formula says its tokens weigh."""
    samples = cut(make_samples())
    counts = [one.num_trained_tokens for one in samples]
    per_trajectory = [sum(counts[:3])] * 3 + counts[3:]
    weights = {
        "token": [1.0] * 6,
        "trajectory": [sum(counts) / (4 * count) for count in per_trajectory],
        "constant": [sum(counts) / (4 * 10)] * 6,
    }[aggregation]
    weighted = tuple(
        replace(one, advantages_T=one.advantages_T * weight)
        for one, weight in zip(samples, weights, strict=True)
    )
    observed, expected = learner(qwen3, aggregation), learner(qwen3, "token")
    assert take_step(observed, samples).loss == pytest.approx(take_step(expected, weighted).loss, rel=1e-4)
    assert relative_difference(observed, expected) <= 1e-5


@pytest.mark.parametrize("aggregation", ["trajectory", "constant"])
def test_the_gradient_depends_neither_on_micro_batches_nor_on_streaming(
    qwen3: Path, aggregation: Aggregation
) -> None:
    samples = cut(make_samples())
    apart, together, streamed = (
        learner(qwen3, aggregation, micro_batch_tokens=tokens) for tokens in (33, 300, 300)
    )
    reports = [take_step(apart, samples), take_step(together, samples[::-1])]
    assert reports[0].num_microbatches > reports[1].num_microbatches == 1
    for begin, end in ((0, 3), (3, 4), (4, 6)):
        streamed.accumulate(make_batch(samples[begin:end]))
    report = streamed.apply(1)
    assert isinstance(report, StepMetrics)
    for other, metrics in ((apart, reports[0]), (streamed, report)):
        assert relative_difference(together, other) <= 1e-5
        assert metrics.loss == pytest.approx(reports[1].loss, rel=1e-5)


def test_the_ratio_of_a_cut_trajectory_is_one_however_its_samples_are_spread(qwen3: Path) -> None:
    loss = LossConfig(kind="gspo", clip_low=0.9, clip_high=9.0)
    apart, together = (
        Learner(config(loss=loss, micro_batch_tokens=tokens, clip_grad=0.0), model_directory=qwen3)
        for tokens in (33, 300)
    )
    samples = cut(make_samples())
    take_step(apart, samples)
    take_step(together, samples)
    assert relative_difference(apart, together) <= 1e-5
    alone = Learner(config(loss=loss, clip_grad=0.0), model_directory=qwen3)
    take_step(alone, make_samples())
    assert relative_difference(alone, together) > 1e-3, "each sample by itself has another ratio"


def test_a_cut_trajectory_outside_the_geometric_mask_is_left_out_whole(qwen3: Path) -> None:
    """The offending token drives the mean of all three samples, not only that of its own."""
    samples = branched(make_samples(), offender=1)
    loss = LossConfig(kind="cispo", geometric_mask=(0.2, 1.5))
    masked = Learner(config(loss=loss, clip_grad=0.0), model_directory=qwen3)
    report = take_step(masked, samples)
    cut_tokens = sum(one.num_trained_tokens for one in samples[:3])
    assert report.vetoed_share == pytest.approx(cut_tokens / report.num_trained_tokens)
    left = Learner(config(loss=LossConfig(kind="cispo"), clip_grad=0.0), model_directory=qwen3)
    share = take_step(left, samples[3:]).num_trained_tokens / report.num_trained_tokens
    scaled = {name: gradient * share for name, gradient in gradients(left).items()}
    scale = max(float(gradient.abs().max()) for gradient in gradients(masked).values())
    assert largest_difference(gradients(masked), scaled) <= 1e-5 * scale
