"""Adapters: only they are trained, and merged weights, PEFT and our own forward pass agree about them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from benchmarks.small_models import DELTA_NET, EXPERTS, GLM4_MOE, GPT_OSS, MINIMAX_M2, QWEN3_NEXT, write_model
from tests.trainer.learner.tiny import (
    assert_same_run,
    config,
    gradients,
    largest_difference,
    make_samples,
    read_reference,
    reference_logprobs,
    train,
)
from trainer.learner.architecture import layout_faults
from trainer.learner.config import LoraConfig
from trainer.learner.families.registry import read_architecture
from trainer.learner.hf import SINGLE_FILE
from trainer.learner.megatron import Learner
from trainer.learner.snapshots import copy_weights

SOME = LoraConfig(rank=4, alpha=8, targets=("q_proj", "v_proj", "o_proj", "up_proj"))
TARGETS = {"all": LoraConfig(rank=4, alpha=8), "some": SOME}


@pytest.fixture(scope="module", params=TARGETS)
def trained(
    request: pytest.FixtureRequest, qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Learner, Path]:
    """A learner after three steps, and its export."""
    learner = Learner(config(lora=TARGETS[request.param], lr=1e-2), model_directory=qwen3)
    train(learner, 3)
    directory = tmp_path_factory.mktemp("adapted") / "exported"
    learner.export(directory)
    return learner, directory


def test_adapters_begin_without_effect(qwen3: Path) -> None:
    samples = make_samples()
    plain = Learner(config(), model_directory=qwen3).logprobs(samples, 1.0)
    adapted = Learner(config(lora=SOME), model_directory=qwen3).logprobs(samples, 1.0)
    assert all(np.array_equal(left, right) for left, right in zip(plain, adapted, strict=True))


def test_an_adapter_begins_with_the_distribution_that_peft_draws_from(qwen3: Path) -> None:
    """PEFT's is torch's `kaiming_uniform_(a=sqrt(5))` of a matrix of so many inputs: a uniform around zero."""
    model = Learner(config(lora=LoraConfig(rank=32, alpha=8)), model_directory=qwen3)._model
    drawn = {name: p.detach().cpu() for name, p in model.named_parameters() if name.endswith("_A")}
    assert len(drawn) == 2 * 7, "one for each projection of two layers"
    for name, down in drawn.items():
        theirs = torch.empty_like(down)
        torch.nn.init.kaiming_uniform_(theirs, a=math.sqrt(5), generator=torch.Generator().manual_seed(1))
        bound = down.shape[1] ** -0.5
        assert float(down.abs().max()) <= bound, name
        shares = torch.linspace(0, 1, 21)
        ours, expected = (values.flatten().quantile(shares) for values in (down, theirs))
        torch.testing.assert_close(ours, expected, rtol=0, atol=0.1 * bound, msg=name)
    whole = {tuple(down.flatten().tolist()[:8]) for down in drawn.values()}
    assert len(whole) == len(drawn), "no two are alike"


def test_only_adapters_are_trained(trained: tuple[Learner, Path], qwen3: Path) -> None:
    after = copy_weights(trained[0]._model)
    before = copy_weights(Learner(config(lora=trained[0].config.lora), model_directory=qwen3)._model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "_adapter." in name}
    assert len(changed) == 2 * 2 * len(trained[0].config.lora.targets)


def test_merged_weights_are_the_model_with_its_adapters(trained: tuple[Learner, Path], qwen3: Path) -> None:
    learner, directory = trained
    samples = make_samples()
    merged = Learner(config(), model_directory=directory).logprobs(samples, 1.0)
    start = Learner(config(), model_directory=qwen3).logprobs(samples, 1.0)
    apart = [
        np.abs(left - right).max() for left, right in zip(learner.logprobs(samples, 1.0), merged, strict=True)
    ]
    moved = [np.abs(left - right).max() for left, right in zip(start, merged, strict=True)]
    assert max(apart) <= 1e-5 * max(np.abs(values).max() for values in merged)
    assert max(moved) > 0.1


def test_peft_computes_the_same_from_the_adapters_alone(trained: tuple[Learner, Path], qwen3: Path) -> None:
    learner, directory = trained
    model = PeftModel.from_pretrained(read_reference(qwen3), directory / "adapter").eval()
    samples = make_samples()
    for sample, observed in zip(samples, learner.logprobs(samples, 1.0), strict=True):
        expected = reference_logprobs(model, sample).detach().numpy()
        kept = sample.trained_T[1:]
        np.testing.assert_allclose(observed[1:][kept], expected[kept], atol=5e-5)


def test_the_adapters_are_those_that_peft_would_make(trained: tuple[Learner, Path]) -> None:
    tensors = load_file(trained[1] / "adapter" / "adapter_model.safetensors")
    targets = trained[0].config.lora.targets
    assert len(tensors) == 2 * 2 * len(targets)
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    assert tensors[f"{first}.lora_A.weight"].shape == (4, 64)
    assert tensors[f"{first}.lora_B.weight"].shape == (64, 4)


def test_adapters_of_gated_attention_and_beside_linear_attention_are_those_of_peft(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "qwen3_5_text", **DELTA_NET)
    learner, samples = (
        Learner(config(lora=TARGETS["all"], lr=1e-2), model_directory=directory),
        make_samples(),
    )
    train(learner, 3)
    observed = learner.logprobs(samples, 1.0)
    learner.export(tmp_path / "exported")
    tensors = load_file(tmp_path / "exported" / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * (2 * 4 + 4 * 3), "two layers have attention, all four an MLP"
    adapted = PeftModel.from_pretrained(read_reference(directory), tmp_path / "exported" / "adapter").eval()
    for model in (adapted, read_reference(tmp_path / "exported")):
        for sample, ours in zip(samples, observed, strict=True):
            expected, kept = reference_logprobs(model, sample).detach().numpy(), sample.trained_T[1:]
            np.testing.assert_allclose(
                ours[1:][kept], expected[kept], atol=5e-5, err_msg=type(model).__name__
            )


# Quick: a resume goes on bit for bit.
def test_a_resumed_run_is_the_run_that_never_stopped(qwen3: Path, tmp_path: Path) -> None:
    options = config(lora=SOME, lr=1e-2, distributed_optimizer=True)
    learner = Learner(options, model_directory=qwen3)
    train(learner, 2)
    learner.save(tmp_path / "kept", b"")
    expected = train(learner, 3)
    resumed = Learner(options, model_directory=qwen3)
    resumed.restore(tmp_path / "kept")
    assert_same_run(train(resumed, 3), expected)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_give_the_same_gradients(qwen3: Path, recompute: str) -> None:
    """Nothing before the first adapter requires a gradient, so recomputation could cut the graph there."""
    learners = [
        Learner(config(lora=SOME, lr=1e-2, recompute=one), model_directory=qwen3)
        for one in ("none", recompute)
    ]
    assert_same_run(*(train(learner, 3) for learner in learners))
    assert largest_difference(*(gradients(learner) for learner in learners)) == 0
    assert all(float(gradient.abs().max()) > 0 for gradient in gradients(learners[1]).values())


def test_an_export_of_adapters_beside_experts_keeps_the_experts(qwen3_moe: Path, tmp_path: Path) -> None:
    attention = LoraConfig(rank=2, targets=("q_proj", "o_proj"))
    learner = Learner(config(lora=attention, lr=1e-2), model_directory=qwen3_moe)
    train(learner, 2)
    learner.export(tmp_path / "exported")
    before, after = (load_file(directory / SINGLE_FILE) for directory in (qwen3_moe, tmp_path / "exported"))
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "o_proj"}


def test_experts_that_are_one_tensor_get_no_adapters(tmp_path: Path) -> None:
    architecture = read_architecture(write_model(tmp_path, "gpt_oss", **GPT_OSS))
    (fault,) = layout_faults(architecture, config(lora=LoraConfig(rank=4)))
    assert fault.startswith("learner.lora.targets: experts of gpt_oss, which are one tensor, get no adapters")


def test_adapters_and_a_choice_of_weights_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"learner\.train_only"):
        config(lora=SOME, train_only=(".mlp.",))


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "glm4_moe": GLM4_MOE,  # a dense layer, and an expert that every token passes
    "minimax_m2": MINIMAX_M2,
    "qwen3_next": QWEN3_NEXT,
}


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # which PEFT itself makes
@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_of_experts_are_merged_into_the_weights_and_are_those_of_peft(
    family: str, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "model", family, **MIXTURES[family])
    learner = Learner(config(lora=TARGETS["all"], lr=1e-2), model_directory=directory)
    start = learner.logprobs(make_samples(), 1.0)
    train(learner, 3)
    observed = learner.logprobs(make_samples(), 1.0)
    assert max(np.abs(left - right).max() for left, right in zip(start, observed, strict=True)) > 0.1
    learner.export(tmp_path / "exported")
    before, after = (load_file(one / SINGLE_FILE) for one in (directory, tmp_path / "exported"))
    experts = [name for name in before if ".experts." in name]
    assert experts
    assert not any(torch.equal(before[name], after[name]) for name in experts)
    adapted = PeftModel.from_pretrained(read_reference(directory), tmp_path / "exported" / "adapter").eval()
    for model in (read_reference(tmp_path / "exported"), adapted):
        for sample, ours in zip(make_samples(), observed, strict=True):
            expected, kept = reference_logprobs(model, sample).detach().numpy(), sample.trained_T[1:]
            np.testing.assert_allclose(
                ours[1:][kept], expected[kept], atol=5e-5, err_msg=type(model).__name__
            )
