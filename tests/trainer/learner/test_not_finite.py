"""A batch whose loss or gradient is not finite changes nothing, and the learner says what was wrong with it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.learner.tiny import (
    assert_same_run,
    config,
    infinite,
    largest_difference,
    make_batch,
    make_samples,
    train,
)
from trainer.learner import backend
from trainer.learner.config import LossConfig, NotFinite
from trainer.learner.megatron import Learner
from trainer.learner.snapshots import copy_weights

LAYOUTS = [
    {},
    {"dtype": "bf16"},
    {"distributed_optimizer": True},
    {"num_minibatches": 3, "num_epochs": 2},
    {"num_minibatches": 3, "dtype": "bf16"},
    {"num_minibatches": 3, "distributed_optimizer": True},
]


@pytest.mark.slow_but_for("0-{}", "0-{'dtype': 'bf16'}")
@pytest.mark.parametrize("changes", LAYOUTS, ids=str)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_the_run_goes_on_as_if_a_batch_that_is_not_finite_had_not_been_there(
    qwen3: Path, changes: dict[str, object], steps_before: int
) -> None:
    """With several updates, those before the broken one are taken back."""
    learner, spared = (Learner(config(lr=1e-2, **changes), model_directory=qwen3) for _ in range(2))
    for one in (learner, spared):
        train(one, steps_before)
    before = copy_weights(learner._model)
    samples = make_samples(seed=9)
    broken = make_batch((*samples[:-1], infinite(samples[-1])), step=steps_before + 1)
    assert isinstance(learner.step(broken), NotFinite)
    assert largest_difference(before, copy_weights(learner._model)) == 0
    assert learner.steps == steps_before
    assert learner.adam_steps() == spared.adam_steps()
    assert_same_run(train(learner, 3), train(spared, 3))
    apart = largest_difference(copy_weights(learner._model), copy_weights(spared._model))
    assert apart <= (1e-2 if backend.has_cuda() else 0)


def test_an_infinite_loss_is_named(qwen3: Path) -> None:
    learner = Learner(config(), model_directory=qwen3)
    assert learner.step(make_batch((infinite(make_samples((9,))[0]),))) == NotFinite(what="loss")


def test_a_broken_gradient_of_one_expert_is_noticed(qwen3_moe: Path) -> None:
    learner = Learner(config(), model_directory=qwen3_moe)
    name = "decoder.layers.1.mlp.experts.local_experts.5.linear_fc2.weight"
    learner._model.get_parameter(name).register_hook(lambda gradient: gradient * np.inf)
    assert learner.step(make_batch(make_samples())) == NotFinite(what="gradient")


def test_a_gradient_that_overflows_under_a_finite_loss_is_named(qwen3: Path) -> None:
    """The loss is near the end of fp32, and the gradient of the early layers beyond it."""
    one = make_samples((2,))[0]
    learner = Learner(config(loss=LossConfig(kind="reinforce")), model_directory=qwen3)
    logprob = learner.logprobs([one], 1.0)[0][1]
    largest = replace(one, advantages_T=np.array([0, 3e38 / -logprob], np.float32))
    before = copy_weights(learner._model)
    assert learner.step(make_batch((largest,))) == NotFinite(what="gradient")
    assert largest_difference(before, copy_weights(learner._model)) == 0
