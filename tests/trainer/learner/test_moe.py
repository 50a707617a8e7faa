"""Mixture of experts: what is read, computed and written, against Hugging Face's own model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.learner.tiny import (
    EXPERTS,
    config,
    gradients,
    make_samples,
    read_reference,
    reference_logprobs,
    take_step,
    trained_throughout,
    write_model,
)
from trainer.learner.architecture import layout_faults
from trainer.learner.config import LossConfig
from trainer.learner.families.registry import read_architecture
from trainer.learner.hf import SINGLE_FILE
from trainer.learner.megatron import Learner


@pytest.fixture(scope="module", params=[True, False], ids=["renormalised", "as the softmax gives them"])
def experts_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    return write_model(directory, "qwen3_moe", norm_topk_prob=request.param, **EXPERTS)


def test_logprobs_are_those_of_hugging_face(experts_directory: Path) -> None:
    samples, reference = trained_throughout(make_samples()), read_reference(experts_directory)
    learner = Learner(config(micro_batch_tokens=200), model_directory=experts_directory)
    for sample, observed in zip(samples, learner.logprobs(samples, 1.0), strict=True):
        expected = reference_logprobs(reference, sample).detach()
        torch.testing.assert_close(torch.from_numpy(observed[1:]), expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_router_and_experts_are_those_of_hugging_face(experts_directory: Path) -> None:
    samples, reference = make_samples(), read_reference(experts_directory)
    learner = Learner(
        config(clip_grad=0.0, loss=LossConfig(kind="reinforce")), model_directory=experts_directory
    )
    take_step(learner, samples)
    trained = [torch.from_numpy(sample.trained_T[1:]) for sample in samples]
    loss = sum(
        -(reference_logprobs(reference, sample) * torch.from_numpy(sample.advantages_T[1:]))[chosen].sum()
        for sample, chosen in zip(samples, trained, strict=True)
    ) / sum(int(chosen.sum()) for chosen in trained)
    loss.backward()
    observed = gradients(learner)
    experts = "model.layers.1.mlp.experts."
    stacked = reference.get_parameter(f"{experts}gate_up_proj").grad
    down = reference.get_parameter(f"{experts}down_proj").grad
    pairs = {"router.weight": reference.get_parameter("model.layers.1.mlp.gate.weight").grad}
    for index in range(EXPERTS["num_experts"]):
        pairs[f"experts.local_experts.{index}.linear_fc1.weight"] = stacked[index]
        pairs[f"experts.local_experts.{index}.linear_fc2.weight"] = down[index]
    for name, expected in pairs.items():
        ours = observed[f"decoder.layers.1.mlp.{name}"].cpu()
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-5 * float(stacked.abs().max()))


def test_what_is_exported_untrained_is_what_was_read(experts_directory: Path, tmp_path: Path) -> None:
    Learner(config(), model_directory=experts_directory).export(tmp_path / "exported")
    before, after = load_file(experts_directory / SINGLE_FILE), load_file(tmp_path / "exported" / SINGLE_FILE)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_layout_must_divide_the_experts(experts_directory: Path) -> None:
    architecture = read_architecture(experts_directory)
    assert layout_faults(architecture, config(expert_parallel=4)) == []
    (fault,) = layout_faults(architecture, config(expert_parallel=3))
    assert fault.startswith("learner.expert_parallel = 3 does not divide the model's 8 experts")


def test_experts_need_their_positions_divided_under_tensor_parallelism(experts_directory: Path) -> None:
    architecture = read_architecture(experts_directory)
    (fault,) = layout_faults(architecture, config(tensor_parallel=2))
    assert "set learner.sequence_parallel = true" in fault
    assert layout_faults(architecture, config(tensor_parallel=2, sequence_parallel=True)) == []


def test_a_dense_model_has_no_experts_to_divide(qwen3: Path) -> None:
    (fault,) = layout_faults(read_architecture(qwen3), config(expert_parallel=2))
    assert fault.startswith("learner.expert_parallel = 2: the model has no experts")
