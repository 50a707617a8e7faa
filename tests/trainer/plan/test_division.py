"""Which parameters a process of the learner holds, compared with the real model and with what is published of known ones."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.small_models import (
    DELTA_NET,
    EXPERTS,
    GLM4_MOE,
    GPT_OSS,
    MINIMAX_M2,
    QWEN3_NEXT,
    SEEING,
    write_model,
)
from tests.trainer.learner.tiny import config
from trainer.learner import backend, lora
from trainer.learner.config import LORA_TARGETS, LoraConfig, LoraTarget
from trainer.learner.families.registry import read_architecture
from trainer.learner.model import build_model
from trainer.plan.division import (
    Division,
    known_models,
    num_active_parameters,
    num_adapter_parameters,
    num_parameters,
    parameters,
    shape_of,
)

WHOLE = Division(tensor=1, pipeline=1, context=1, expert=1, data=1)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    backend.join()
    yield
    backend.leave()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("qwen3_moe", EXPERTS),
        ("glm4_moe", GLM4_MOE),
        ("gpt_oss", GPT_OSS),
        ("minimax_m2", MINIMAX_M2),
        ("qwen3_next", QWEN3_NEXT),
        ("qwen3_5_text", DELTA_NET),
        ("qwen3_5_moe", QWEN3_NEXT | SEEING),
        ("mistral", {"head_dim": 32, "sliding_window": None}),
        ("seed_oss", {"head_dim": 32, "pad_token_id": None}),
        ("smollm3", {"pad_token_id": None}),
    ],
)
def test_every_parameter_of_the_real_model_is_counted_once(
    family: str, changes: dict[str, object], tmp_path: Path
) -> None:
    architecture = read_architecture(write_model(tmp_path, family, **changes))
    backend.lay_out(tensor_parallel=1, pipeline_parallel=1)
    with backend.device_scope():
        model = build_model(architecture, config())
    real = Counter[str]()
    for name, parameter in model.named_parameters():
        real[_without_numbers(name)] += parameter.numel()
    counted = Counter[str]()
    for parameter in parameters(architecture, WHOLE, 0):
        counted[parameter.name] += parameter.num_values
    assert counted == real


@pytest.mark.parametrize("targets", [LORA_TARGETS, ("q_proj", "v_proj", "down_proj")])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"head_dim": 32}),
        ("qwen3_moe", EXPERTS),
        ("glm4_moe", GLM4_MOE),
        ("qwen3_5_text", DELTA_NET),
    ],
)
def test_every_parameter_of_the_real_adapters_is_counted(
    family: str, changes: dict[str, object], targets: tuple[LoraTarget, ...], tmp_path: Path
) -> None:
    architecture = read_architecture(write_model(tmp_path, family, **changes))
    chosen = LoraConfig(rank=3, targets=targets)
    backend.lay_out(tensor_parallel=1, pipeline_parallel=1)
    with backend.device_scope():
        model = build_model(architecture, config())
        lora.attach(model, chosen)
    real = Counter[str]()
    for name, parameter in model.named_parameters():
        real[_without_numbers(name)] += parameter.numel()
    counted = {
        parameter.name: parameter.num_values
        for parameter in parameters(architecture, WHOLE, 0, chosen)
        if "_adapter" in parameter.name
    }
    assert counted == {name: size for name, size in real.items() if "_adapter" in name}
    assert num_adapter_parameters(architecture, chosen) == sum(counted.values()) > 0


def _without_numbers(name: str) -> str:
    return ".".join(part for part in name.split(".") if not part.isdigit())


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen3-0.6B", 0.596, 0.596),
        ("Qwen3-8B", 8.19, 8.19),
        ("Qwen3-32B", 32.76, 32.76),
        ("Qwen3-30B-A3B", 30.53, 3.35),
        ("Qwen2.5-Coder-7B-Instruct", 7.62, 7.62),
        ("Llama-3.1-8B-Instruct", 8.03, 8.03),
        ("Devstral-Small-2507", 23.57, 23.57),
        ("Seed-OSS-36B-Instruct", 36.15, 36.15),
        ("SmolLM3-3B", 3.08, 3.08),
        ("GLM-4.5-Air", 106.85, 13.42),
        ("gpt-oss-20b", 20.91, 4.19),
        ("MiniMax-M2", 228.69, 11.03),
        ("Qwen3-Coder-Next", 79.67, 3.87),
        ("Qwen3.5-9B", 8.95, 8.95),
    ],
)
def test_known_models_have_the_sizes_that_are_published(name: str, billions: float, active: float) -> None:
    architecture, is_here = shape_of(f"/nowhere/{name}")
    assert not is_here
    assert num_parameters(architecture) / 1e9 == pytest.approx(billions, abs=0.006)
    assert num_active_parameters(architecture) / 1e9 == pytest.approx(active, abs=0.006)


def test_every_known_model_is_one_that_the_learner_supports() -> None:
    assert all(shape_of(name)[0].num_layers for name in known_models())


def test_a_model_of_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        ValueError, match=r"MyModel is not one of the models whose shape is known \(.*Qwen3-8B"
    ):
        shape_of("/nowhere/MyModel")


def test_the_processes_of_all_stages_hold_the_whole_model() -> None:
    architecture, _ = shape_of("Qwen3-8B")
    division = Division(tensor=4, pipeline=2, context=1, expert=1, data=1)
    held = [sum(p.num_values for p in parameters(architecture, division, stage)) for stage in range(2)]
    norms = 36 * (2 * 4096 + 2 * 128) + 4096  # which every tensor-parallel process holds
    assert 4 * sum(held) - 3 * norms == num_parameters(architecture)
    assert held[1] - held[0] == 4096  # the last norm


def test_experts_are_divided_among_tensor_and_data_parallel_processes() -> None:
    architecture, _ = shape_of("Qwen3-30B-A3B")
    learner = config(tensor_parallel=2, sequence_parallel=True, context_parallel=2, expert_parallel=8)
    division = Division.of(learner, architecture, 16)
    assert (division.data, division.num_copies, division.num_expert_copies) == (4, 8, 2)
    with pytest.raises(ValueError, match=r"expert_parallel = 8 does not divide the 12 GPUs"):
        Division.of(learner, architecture, 12)


def test_processes_that_the_layout_does_not_divide_are_refused() -> None:
    architecture, _ = shape_of("Qwen3-8B")
    with pytest.raises(ValueError, match=r"needs 4 GPUs or a multiple for the learner, not 6"):
        Division.of(config(tensor_parallel=4), architecture, 6)
