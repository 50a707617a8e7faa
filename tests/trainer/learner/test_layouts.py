"""Four processes against one, under every pair of layouts: the same loss and gradient, and a resume that continues bit for bit."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.small_models import (
    EXPERTS,
    GLM4_MOE,
    GPT_OSS,
    MINIMAX_M2,
    MINISTRAL3,
    QWEN3_NEXT,
    SEEING,
    write_model,
)
from tests.trainer.forking import run_ranks
from tests.trainer.learner.layout_ranks import NUM_STEPS_BEFORE, Layout, Outcome
from tests.trainer.learner.tiny import config, largest_difference, make_samples, read_export, take_step, train
from trainer.learner.config import LearnerConfig, LoraConfig
from trainer.learner.forward import Likelihoods
from trainer.learner.lora import ADAPTER_DIRECTORY
from trainer.learner.megatron import Learner

# Four processes on all cores
pytestmark = [pytest.mark.cpu_only, pytest.mark.slow, pytest.mark.timeout(1200)]

LIMIT = 1e-5
"""The largest relative difference in fp32."""

TENSOR, SEQUENCE = {"tensor_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}
CONTEXT, PIPELINE = {"context_parallel": 2}, {"pipeline_parallel": 2}
EXPERT = {"expert_parallel": 2}
REPLAY = {"routing_replay": True}
ADAPTERS = {"lora": LoraConfig(rank=4, alpha=8)}
UNEVEN = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
"""Layers of which the two halves are not alike, nor have as many parameters."""
PAIRS: dict[str, dict[str, Any]] = {
    "data": {},
    "data, tensor": TENSOR,
    "data, sequence": SEQUENCE,
    "data, context": CONTEXT,
    "data, pipeline": PIPELINE,
    "tensor, context": TENSOR | CONTEXT,
    "tensor, pipeline": TENSOR | PIPELINE,
    "sequence, context": SEQUENCE | CONTEXT,
    "sequence, pipeline": SEQUENCE | PIPELINE,
    "context, pipeline": CONTEXT | PIPELINE,
}
LAYOUTS: dict[str, dict[str, Any]] = (
    {
        f"{name}{suffix}": layout | changes
        for name, layout in PAIRS.items()
        for suffix, changes in (("", {}), (", distributed optimizer", {"distributed_optimizer": True}))
    }
    | {
        "context of four": {"context_parallel": 4},
        "pipeline of four": {"pipeline_parallel": 4},
        "context, pipeline, tied": CONTEXT | PIPELINE,
        "sequence, context, recomputed": SEQUENCE | CONTEXT | {"recompute": "selective"},
        "sequence, pipeline, recomputed": SEQUENCE | PIPELINE | {"recompute": "full"},
        "sequence, pipeline, tied": SEQUENCE | PIPELINE,
    }
    | {
        "smollm3, sequence, pipeline": SEQUENCE | PIPELINE,
        "smollm3, context, pipeline, distributed optimizer": CONTEXT
        | PIPELINE
        | {"distributed_optimizer": True},
        "ministral3, sequence, context": SEQUENCE | CONTEXT,
        "seed_oss, tensor, pipeline": TENSOR | PIPELINE,
        "gpt_oss, data, distributed optimizer": EXPERT | {"distributed_optimizer": True},
        "gpt_oss, sequence": EXPERT | SEQUENCE,
        "gpt_oss, context": EXPERT | CONTEXT,
        "gpt_oss, sequence, pipeline, recomputed": SEQUENCE | PIPELINE | {"recompute": "full"},
        "qwen3_next, data": EXPERT,
        "qwen3_next, sequence": EXPERT | SEQUENCE,
        "qwen3_next, context": EXPERT | CONTEXT,
        "qwen3_next, pipeline, distributed optimizer": EXPERT | PIPELINE | {"distributed_optimizer": True},
        "qwen3_next, sequence, pipeline, recomputed": SEQUENCE | PIPELINE | {"recompute": "full"},
        "qwen3_5_moe, sequence": EXPERT | SEQUENCE,
        "qwen3_5, data, tensor, distributed optimizer": TENSOR | {"distributed_optimizer": True},
        "qwen3_5, sequence, context": SEQUENCE | CONTEXT,
        "qwen3_5, tensor, pipeline": TENSOR | PIPELINE,
        "qwen3_5, context, pipeline, recomputed": CONTEXT | PIPELINE | {"recompute": "full"},
        "minimax_m2, data": EXPERT,
        "minimax_m2, sequence, distributed optimizer": EXPERT | SEQUENCE | {"distributed_optimizer": True},
        "minimax_m2, context": EXPERT | CONTEXT,
        "minimax_m2, sequence, pipeline, recomputed": SEQUENCE | PIPELINE | {"recompute": "full"},
        "glm4, data": EXPERT,
        "glm4, sequence": EXPERT | SEQUENCE,
        "glm4, context": EXPERT | CONTEXT,
        "glm4, pipeline": EXPERT | PIPELINE,
        "glm4, sequence, pipeline, recomputed": SEQUENCE | PIPELINE | {"recompute": "full"},
        "experts, data": EXPERT,
        "experts, data, distributed optimizer": EXPERT | {"distributed_optimizer": True},
        "experts of four": {"expert_parallel": 4},
        "experts, sequence": EXPERT | SEQUENCE,
        "experts of four, sequence, distributed optimizer, recomputed": SEQUENCE
        | {"expert_parallel": 4, "distributed_optimizer": True, "recompute": "full"},
        "experts, context": EXPERT | CONTEXT,
        "experts, pipeline": EXPERT | PIPELINE,
        "experts whole, sequence": SEQUENCE,
        "experts replayed, sequence, context, recomputed": REPLAY
        | SEQUENCE
        | CONTEXT
        | {"recompute": "full"},
        "experts replayed, pipeline, recomputed": REPLAY | EXPERT | PIPELINE | {"recompute": "selective"},
        # One data-parallel rank, so that the first stage has two micro-batches in flight.
        "experts replayed, sequence, pipeline, recomputed": REPLAY
        | SEQUENCE
        | PIPELINE
        | {"recompute": "full"},
        "adapters, tensor": ADAPTERS | TENSOR,
        "adapters, sequence, pipeline": ADAPTERS | SEQUENCE | PIPELINE,
        "adapters, sequence, distributed optimizer, recomputed": ADAPTERS
        | SEQUENCE
        | {"distributed_optimizer": True, "recompute": "full"},
        "adapters, context, pipeline": ADAPTERS | CONTEXT | PIPELINE,
        "adapted experts, data, distributed optimizer": ADAPTERS | EXPERT | {"distributed_optimizer": True},
        "adapted experts, sequence": ADAPTERS | EXPERT | SEQUENCE,
        "adapted experts whole, sequence": ADAPTERS | SEQUENCE,
        "adapted experts, pipeline, recomputed": ADAPTERS | EXPERT | PIPELINE | {"recompute": "full"},
    }
)

ALONE = {"adapters": ADAPTERS, "adapted experts": ADAPTERS, "replayed": REPLAY}
"""What one process needs to do the same, by kind."""

SIZES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
"""Layouts that agree in these share four processes. Others do not: threads of earlier process groups would poll beside them."""

RESHARDED = [name for name in LAYOUTS if "distributed optimizer" in name or "pipeline" in name]
"""Those whose checkpoints one process resumes from: ranges of parameters, stages, and both with parts of tensors."""


def options(**changes: Any) -> LearnerConfig:
    """An eps so large that Adam's first step is nearly proportional to the gradient."""
    return config(lr=0.1, eps=1.0, clip_grad=0.0, **changes)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of two or four layers, by kind. The heads of the dense, untied ones are together wider than the model."""
    wide = write_model(tmp_path_factory.mktemp("wide"), "qwen3", head_dim=32)
    deep = write_model(tmp_path_factory.mktemp("deep"), "qwen3", head_dim=32, num_hidden_layers=4)
    tied = write_model(tmp_path_factory.mktemp("tied"), "llama", tie_word_embeddings=True)
    experts = write_model(tmp_path_factory.mktemp("experts"), "qwen3_moe", num_hidden_layers=4, **EXPERTS)
    return {
        "pipeline of four": deep,
        "smollm3": write_model(
            tmp_path_factory.mktemp("smollm3"),
            "smollm3",
            num_hidden_layers=4,
            no_rope_layers=[1, 1, 0, 1],
            pad_token_id=None,
        ),
        "ministral3": write_model(tmp_path_factory.mktemp("ministral3"), "ministral3", **MINISTRAL3),
        "seed_oss": write_model(
            tmp_path_factory.mktemp("seed_oss"), "seed_oss", head_dim=32, pad_token_id=None
        ),
        "minimax_m2": write_model(tmp_path_factory.mktemp("minimax_m2"), "minimax_m2", **MINIMAX_M2),
        "gpt_oss": write_model(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss", **GPT_OSS),
        "glm4": write_model(tmp_path_factory.mktemp("glm4"), "glm4_moe", **GLM4_MOE),
        # With larger weights, the rounding of the first step shows in the third.
        "qwen3_next": write_model(
            tmp_path_factory.mktemp("qwen3_next"), "qwen3_next", **QWEN3_NEXT | {"initializer_range": 0.02}
        ),
        "qwen3_5_moe": write_model(
            tmp_path_factory.mktemp("qwen3_5_moe"),
            "qwen3_5_moe",
            **QWEN3_NEXT | SEEING | {"initializer_range": 0.02},
        ),
        "qwen3_5": write_model(
            tmp_path_factory.mktemp("qwen3_5"),
            "qwen3_5",
            **SEEING | {"initializer_range": 0.02, "layer_types": UNEVEN},
        ),
        "tied": tied,
        "replayed": experts,
        "adapted experts": experts,
        "experts": experts,
        "adapters": wide,
        "dense": wide,
    }


@pytest.fixture(scope="module")
def expected(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Likelihoods, list[tuple[float, float]], dict[str, torch.Tensor]]]:
    """Log-probs, which tokens are the likeliest, losses and what the first step adds to the weights, by one process."""
    outcomes = {}
    for kind, directory in models.items():
        alone = ALONE.get(kind, {})
        learner = Learner(options(**alone), model_directory=directory)
        _, likeliest = learner.likelihoods(make_samples())
        logprobs, losses = learner.logprobs(make_samples(), 0.8), train(learner, 1)
        learner.export(exported := tmp_path_factory.mktemp("one") / "weights")
        outcomes[kind] = (
            (logprobs, likeliest),
            losses + train(learner, 4),
            step_between(directory, exported),
        )
    return outcomes


@pytest.fixture(scope="module")
def results(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What four processes left behind."""
    results = tmp_path_factory.mktemp("four")
    plans = defaultdict[tuple[int, ...], list[Layout]](list)
    for name, layout in LAYOUTS.items():
        chosen = options(**layout)
        plans[tuple(getattr(chosen, size) for size in SIZES)].append(
            Layout(name=name, config=chosen, model_directory=str(models[kind_of(name)]))
        )
    for sizes, plan in plans.items():
        file = results / f"plan {sizes}.json"
        file.write_bytes(msgspec.json.encode(plan))
        run_ranks(4, "tests.trainer.learner.layout_ranks", str(file), str(results), logs=results)
    return results


@pytest.mark.parametrize("name", LAYOUTS)
def test_four_processes_compute_what_one_does(
    name: str, models: dict[str, Path], expected: dict[str, Any], results: Path
) -> None:
    (logprobs, likeliest), losses, step = expected[kind_of(name)]
    outcome = read(results, name)
    for one, four in zip(logprobs, outcome.logprobs, strict=True):
        np.testing.assert_allclose(four, one, atol=2e-5)
    assert outcome.likeliest == [values.tolist() for values in likeliest]
    np.testing.assert_allclose(outcome.losses[0], losses[0], rtol=LIMIT)
    np.testing.assert_allclose(outcome.losses, losses, rtol=1e-4, atol=1e-5)
    of_four = step_between(models[kind_of(name)], results / name)
    scale = max(float(change.abs().max()) for change in step.values())
    assert largest_difference(step, of_four) <= LIMIT * scale


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resume_of_four_processes_continues_bit_for_bit(name: str, results: Path) -> None:
    outcome = read(results, name)
    assert outcome.resumed_losses == outcome.losses[NUM_STEPS_BEFORE:]
    assert outcome.num_ranks_resumed_exactly == 4


@pytest.mark.parametrize("name", RESHARDED)
def test_one_process_goes_on_from_the_checkpoint_of_four(
    name: str, models: dict[str, Path], results: Path
) -> None:
    kind = kind_of(name)
    alone = options(**ALONE.get(kind, {}))
    learner = Learner(alone, model_directory=models[kind])
    assert learner.restore(results / f"{name}-checkpoint") == b"four processes"
    expected = read(results, name).losses[NUM_STEPS_BEFORE:]
    np.testing.assert_allclose(train(learner, len(expected)), expected, rtol=1e-4, atol=1e-5)
    assert set(learner.adam_steps()) == {float(NUM_STEPS_BEFORE + len(expected))}


def test_what_one_step_changes_would_show_a_gradient_of_other_samples(
    models: dict[str, Path], tmp_path: Path
) -> None:
    changes = []
    for name, samples in (("all", make_samples()), ("without one", make_samples()[:-1])):
        learner = Learner(options(), model_directory=models["dense"])
        take_step(learner, samples)
        learner.export(tmp_path / name)
        changes.append(step_between(models["dense"], tmp_path / name))
    assert largest_difference(*changes) > 1e3 * LIMIT * max(float(c.abs().max()) for c in changes[0].values())


def kind_of(name: str) -> str:
    kinds = (
        "pipeline of four",
        "smollm3",
        "ministral3",
        "seed_oss",
        "gpt_oss",
        "minimax_m2",
        "glm4",
        "qwen3_next",
        "qwen3_5_moe",
        "qwen3_5",
        "tied",
        "replayed",
        "adapted experts",
        "experts",
        "adapters",
    )
    return next((kind for kind in kinds if kind in name), "dense")


def read(results: Path, name: str) -> Outcome:
    return msgspec.json.decode((results / f"{name}.json").read_bytes(), type=Outcome)


def step_between(before: Path, after: Path) -> dict[str, torch.Tensor]:
    """What was added to each tensor; of adapters the half that begins at zero.

    Merged weights would say less: an adapter adds so little in one step that rounding the sum is a part of it.
    """
    if (after / ADAPTER_DIRECTORY).exists():
        tensors = load_file(after / ADAPTER_DIRECTORY / "adapter_model.safetensors")
        return {name: tensor for name, tensor in tensors.items() if "lora_B" in name}
    old, new = read_export(before), read_export(after)
    return {name: new[name] - old[name] for name in old}
