from pathlib import Path

import pytest
import torch

from tests.trainer.learner.tiny import assert_same_run, config, largest_difference, train
from trainer.learner import backend
from trainer.learner.megatron import Learner
from trainer.learner.snapshots import copy_weights


@pytest.mark.slow_but_for("fp32-False", "bf16-False")
@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_is_the_run_that_never_stopped(
    qwen3: Path, tmp_path: Path, distributed_optimizer: bool, dtype: str
) -> None:
    """Steps two and three after the resume count most: a wrong optimizer state cannot show before."""
    options = config(distributed_optimizer=distributed_optimizer, dtype=dtype, warmup_steps=3, decay_steps=20)
    uninterrupted = Learner(options, model_directory=qwen3)
    train(uninterrupted, 3)
    uninterrupted.save(tmp_path / "step-3", b"\x00cursor\xff")
    expected = train(uninterrupted, 4)

    resumed = Learner(options, model_directory=qwen3)
    assert resumed.restore(tmp_path / "step-3") == b"\x00cursor\xff"
    assert resumed.steps == 3
    assert set(resumed.adam_steps()) == {3.0}
    assert_same_run(train(resumed, 4), expected)
    assert resumed.adam_steps() == uninterrupted.adam_steps()
    assert set(resumed.adam_steps()) == {7.0}
    apart = largest_difference(copy_weights(resumed._model), copy_weights(uninterrupted._model))
    assert apart <= (1e-3 if backend.has_cuda() else 0)


@pytest.mark.slow
def test_a_learner_in_use_can_go_back(qwen3: Path, tmp_path: Path) -> None:
    learner = Learner(config(distributed_optimizer=True), model_directory=qwen3)
    train(learner, 2)
    learner.save(tmp_path / "kept", b"")
    expected = train(learner, 3)
    assert learner.restore(tmp_path / "kept") == b""
    assert_same_run(train(learner, 3), expected)
    assert set(learner.adam_steps()) == {5.0}


def test_a_resume_without_the_optimizer_would_be_noticed(qwen3: Path, tmp_path: Path) -> None:
    learner = Learner(config(), model_directory=qwen3)
    train(learner, 3)
    learner.export(tmp_path / "weights-only")
    fresh = Learner(config(), model_directory=tmp_path / "weights-only")
    fresh.steps = 3
    expected, observed = train(learner, 3), train(fresh, 3)
    assert observed[0] == pytest.approx(expected[0], rel=1e-6)
    assert observed[2] != pytest.approx(expected[2], rel=1e-4)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_a_checkpoint_before_the_first_step_resumes_too(
    qwen3: Path, tmp_path: Path, distributed_optimizer: bool
) -> None:
    options = config(distributed_optimizer=distributed_optimizer)
    learner = Learner(options, model_directory=qwen3)
    learner.save(tmp_path / "start", b"")
    expected = train(learner, 3)
    assert_same_run(train(Learner(options, model_directory=qwen3), 3), expected)
    learner.restore(tmp_path / "start")
    assert_same_run(train(learner, 3), expected)
    assert set(learner.adam_steps()) == {3.0}


def test_partly_trained_models_resume_too(tied_llama: Path, tmp_path: Path) -> None:
    options = config(train_only=(".mlp.",))
    learner = Learner(options, model_directory=tied_llama)
    train(learner, 2)
    learner.save(tmp_path / "half", b"")
    expected = train(learner, 3)
    resumed = Learner(options, model_directory=tied_llama)
    resumed.restore(tmp_path / "half")
    assert_same_run(train(resumed, 3), expected)


def test_a_checkpoint_appears_whole_and_alone(qwen3: Path, tmp_path: Path) -> None:
    learner = Learner(config(), model_directory=qwen3)
    for _ in range(2):
        train(learner, 1)
        learner.save(tmp_path / "latest", b"")
        assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    resumed = Learner(config(), model_directory=qwen3)
    resumed.restore(tmp_path / "latest")
    assert resumed.steps == 2


def test_a_checkpoint_of_the_other_optimizer_is_refused_by_name(qwen3: Path, tmp_path: Path) -> None:
    Learner(config(), model_directory=qwen3).save(tmp_path / "plain", b"")
    other = Learner(config(distributed_optimizer=True), model_directory=qwen3)
    with pytest.raises(ValueError, match=r"learner\.distributed_optimizer = false"):
        other.restore(tmp_path / "plain")


def test_random_state_continues(qwen3: Path, tmp_path: Path) -> None:
    learner = Learner(config(), model_directory=qwen3)
    learner.save(tmp_path / "seeded", b"")
    expected = torch.rand(3)
    learner.restore(tmp_path / "seeded")
    assert torch.equal(torch.rand(3), expected)
