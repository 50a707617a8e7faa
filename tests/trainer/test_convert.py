"""`python -m trainer.convert`: weights between Hugging Face directories and Megatron checkpoints."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.small_models import MINIMAX_M2, write_model
from tests.trainer.learner.tiny import config, largest_difference, read_export, train
from trainer import convert
from trainer.learner import backend
from trainer.learner.config import LoraConfig
from trainer.learner.megatron import Learner

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a vocabulary that two processes cannot share equally."""
    directory = write_model(tmp_path_factory.mktemp("model"), "qwen3", head_dim=16, vocab_size=63)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by two processes that share each layer."""
    target = tmp_path_factory.mktemp("checkpoint") / "step-0"
    convert_by_two(model, target)
    return target


def convert_by_two(model: Path, target: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = [str(model), str(target), "--tensor-parallel", "2", "--dtype", "fp32"]
    done = subprocess.run(
        [*launcher, "-m", "trainer.convert", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [str(target)]


@pytest.mark.slow
def test_two_processes_share_the_layers_of_a_mixture_of_experts(tmp_path: Path) -> None:
    directory, target = write_model(tmp_path / "model", "minimax_m2", **MINIMAX_M2), tmp_path / "step-0"
    convert_by_two(directory, target)
    assert convert.main([str(target), str(tmp_path / "again"), "--model", str(directory)]) == 0
    assert largest_difference(read_export(directory), read_export(tmp_path / "again")) == 0


# Quick: a checkpoint gives back the weights that it was written from.
def test_weights_come_back_from_a_checkpoint_as_they_were(
    model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    assert convert.main([str(checkpoint), str(tmp_path / "back"), "--model", str(model)]) == 0
    assert largest_difference(read_export(tmp_path / "back"), read_export(model)) == 0
    assert (tmp_path / "back" / "tokenizer.json").exists()


@pytest.mark.slow_but_for("False", "True")
@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_a_learner_starts_from_such_a_checkpoint_with_either_optimizer(
    model: Path, checkpoint: Path, tmp_path: Path, distributed_optimizer: bool
) -> None:
    other = write_model(tmp_path / "other", "qwen3", head_dim=16, vocab_size=63, initializer_range=0.1)
    backend.join()
    try:
        learner = Learner(config(distributed_optimizer=distributed_optimizer), model_directory=other)
        assert learner.restore(checkpoint) == b""
        assert learner.steps == 0
        learner.export(tmp_path / "exported")
    finally:
        backend.leave()
    assert largest_difference(read_export(tmp_path / "exported"), read_export(model)) == 0


def test_published_adapters_become_the_weights_that_a_merged_version_has(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.join()
    try:
        learner = Learner(config(lora=LoraConfig(rank=4, alpha=8), lr=1e-2), model_directory=model)
        train(learner, 2, vocab_size=63)
        learner.export(tmp_path / "merged")
        learner.export_base(tmp_path / "base")
        learner.export_adapters(tmp_path / "alone")
    finally:
        backend.leave()
    assert convert.main([str(tmp_path / "alone"), str(tmp_path / "back"), "--model", str(model)]) == 0
    back, merged = read_export(tmp_path / "back"), read_export(tmp_path / "merged")
    assert largest_difference(back, merged) == 0
    assert largest_difference(merged, read_export(model)) > 0.01
    assert largest_difference(read_export(tmp_path / "base"), read_export(model)) == 0
    assert (tmp_path / "back" / "tokenizer.json").exists()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        beside = tmp_path / "merged" / "adapter" / name
        assert (tmp_path / "alone" / name).read_bytes() == beside.read_bytes()
    other = write_model(tmp_path / "other", "qwen3", head_dim=16, vocab_size=63, num_hidden_layers=1)
    capsys.readouterr()
    assert convert.main([str(tmp_path / "alone"), str(tmp_path / "x"), "--model", str(other)]) == 2
    assert "has no such weight: give --model the directory that was trained" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_checkpoint_in_half_precision_stays_one(model: Path, tmp_path: Path) -> None:
    assert convert.main([str(model), str(tmp_path / "half")]) == 0
    assert convert.main([str(tmp_path / "half"), str(tmp_path / "back"), "--model", str(model)]) == 0
    back, before = read_export(tmp_path / "back"), read_export(model)
    assert all(torch.equal(back[name], before[name].bfloat16()) for name in before)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"num_hidden_layers": 1}, "holds decoder.layers.1."),
        ({"num_hidden_layers": 3}, "does not hold the weights of this model"),
        ({"intermediate_size": 64}, "does not hold the weights of this model"),
        ({"tie_word_embeddings": True}, "holds output_layer.weight, which the model lacks"),
    ],
)
def test_weights_of_another_model_are_refused(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    shape: dict[str, Any],
    reason: str,
) -> None:
    other = write_model(tmp_path / "other", "qwen3", head_dim=16, vocab_size=63, **shape)
    assert convert.main([str(checkpoint), str(tmp_path / "back"), "--model", str(other)]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_what_cannot_be_converted_is_refused_in_one_line(
    model: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, reason in (
        ([str(tmp_path), str(tmp_path / "x")], "holds none of config.json, metadata.json and"),
        ([str(checkpoint), str(tmp_path / "x")], "give --model"),
        ([str(model), str(checkpoint)], "exists: remove it"),
        ([str(model), str(tmp_path / "x"), "--tensor-parallel", "2"], "multiple of 2 processes"),
    ):
        assert convert.main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line


def test_whole_weights_become_such_in_eight_bits_and_nothing_else_does(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_model(tmp_path / "plain", "qwen3", hidden_size=128, intermediate_size=128, head_dim=128)
    (plain / "tokenizer.json").write_text("{}")
    assert convert.main(["--fp8", str(plain), str(tmp_path / "fp8")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "fp8")
    assert read_export(tmp_path / "fp8")["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert (tmp_path / "fp8" / "tokenizer.json").exists()
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    adapted = ["--model", str(model)]
    for source, fault in {
        tmp_path / "adapters": "holds no whole weights",
        model: "which is no multiple of 128",
        tmp_path / "fp8": "has packed weights already",
    }.items():
        assert convert.main(["--fp8", str(source), str(tmp_path / "x"), *adapted]) == 2
        assert fault in capsys.readouterr().err
        assert not (tmp_path / "x").exists()
