"""A trajectory with one impossible ratio is not trained at all, wherever its samples lie."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.learner.tiny import (
    branched,
    config,
    gradients,
    largest_difference,
    make_samples,
    relative_difference,
    take_step,
)
from trainer.learner.megatron import Learner


@pytest.mark.parametrize("offender", [0, 2])
def test_a_veto_is_of_the_whole_trajectory_however_its_branches_fall_into_micro_batches(
    qwen3: Path, offender: int
) -> None:
    samples = branched(make_samples(), offender=offender)
    apart, together, without = (
        Learner(config(micro_batch_tokens=tokens, clip_grad=0.0), model_directory=qwen3)
        for tokens in (33, 300, 300)
    )
    reports = [take_step(apart, samples), take_step(together, samples[::-1])]
    assert reports[0].num_microbatches > reports[1].num_microbatches == 1
    cut = sum(sample.num_trained_tokens for sample in samples[:3])
    for report in reports:
        assert report.vetoed_share == pytest.approx(cut / report.num_trained_tokens)
    assert relative_difference(apart, together) <= 1e-5
    silenced = [replace(one, trained_T=np.zeros_like(one.trained_T)) for one in samples[:3]]
    left = take_step(without, (*silenced, *samples[3:]))
    ours, theirs = gradients(together), gradients(without)
    share = left.num_trained_tokens / reports[1].num_trained_tokens  # the normaliser counts vetoed tokens too
    scaled = {name: gradient * share for name, gradient in theirs.items()}
    scale = max(float(gradient.abs().max()) for gradient in ours.values())
    assert largest_difference(ours, scaled) <= 1e-5 * scale
