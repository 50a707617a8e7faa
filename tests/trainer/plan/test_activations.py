"""The formulas of activations against the bytes that the real modules keep, at the shapes of one process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.trainer.plan.saved_tensors import Case, Counted
from trainer.learner.architecture import Architecture, DeltaNet, Experts
from trainer.learner.config import LearnerConfig
from trainer.learner.delta_rule import CHUNK
from trainer.plan.memory import DELTA_CHUNK, VALUE_BYTES, outer_bytes, rule_bytes, saved_bytes

REPOSITORY = Path(__file__).parents[3]
BEFORE_BYTES = {"8B": 131 * 1024, "32B": 150 * 1024}
"""Counted per position and layer at tensor-parallel 4 and 8 before anything was recomputed or divided."""


def shape(family: str, **sizes: Any) -> Architecture:
    constants = {"num_layers": 1, "vocab_size": 64, "max_positions": 512, "norm_eps": 1e-6, "rope_theta": 1e6}
    return Architecture(**({"family": family, "tied": False, "head_width": 128} | constants | sizes))


SHAPES = {
    "8B": shape("qwen3", normed_qk=True, width=4096, mlp_width=12288, num_heads=32, num_key_value_heads=8),
    "32B": shape("qwen3", normed_qk=True, width=5120, mlp_width=25600, num_heads=64, num_key_value_heads=8),
    "llama": shape("llama", width=1024, mlp_width=4096, num_heads=16, num_key_value_heads=8, head_width=64),
    "biased": shape(
        "qwen2", biased_qkv=True, width=1536, mlp_width=8960, num_heads=12, num_key_value_heads=2
    ),
    "experts": shape(
        "qwen3_moe",
        normed_qk=True,
        width=1024,
        mlp_width=3072,
        num_heads=16,
        num_key_value_heads=4,
        experts=Experts(count=16, per_token=8, width=768, renormalised=True),
    ),
    "minimax": shape(
        "minimax_m2",
        **{"normed_qk": True, "normed_together": True, "rotary_width": 64},
        **{"width": 1024, "mlp_width": 0, "num_heads": 16, "num_key_value_heads": 4},
        experts=Experts(count=16, per_token=8, width=512, renormalised=True, scores="sigmoid", corrected=True),
    ),
    "glm": shape(
        "glm4_moe",
        **{"biased_qkv": True, "rotary_width": 64},
        **{"width": 1024, "mlp_width": 4096, "num_heads": 16, "num_key_value_heads": 4},
        experts=Experts(
            **{"count": 16, "per_token": 8, "width": 512, "renormalised": True, "scores": "sigmoid"},
            **{"corrected": True, "weight_factor": 2.5, "shared_width": 512},
        ),
    ),
    "gpt-oss": shape(
        "gpt_oss",
        **{"biased": True, "sinks": True, "head_width": 64},
        **{"width": 1024, "mlp_width": 0, "num_heads": 16, "num_key_value_heads": 4},
        experts=Experts(
            **{"count": 16, "per_token": 4, "width": 1024, "renormalised": True, "in_one_tensor": True},
            gate_limit=7.0,
        ),
    ),
}
HYBRID: dict[str, Any] = {
    **{"normed_qk": True, "gated": True, "zero_centred_norms": True, "rotary_width": 64, "head_width": 256},
    **{"width": 2048, "mlp_width": 6144, "num_heads": 16, "num_key_value_heads": 4},
}
NET = DeltaNet(
    num_key_heads=4,
    num_value_heads=8,
    key_width=128,
    value_width=128,
    kernel=4,
    layers=frozenset({0, 1}),  # all layers that are counted
    grouped=False,
)
SHAPES |= {
    "gated": shape("qwen3_5_text", **HYBRID),
    "linear": shape("qwen3_5_text", **HYBRID, delta_net=NET),
}
SEQUENCE = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "8B": ("8B", {"tensor_parallel": 4}),
    "8B, sequence": ("8B", {"tensor_parallel": 4, **SEQUENCE}),
    "8B, sequence, selective": ("8B", {"tensor_parallel": 4, "recompute": "selective", **SEQUENCE}),
    "8B, sequence, full": ("8B", {"tensor_parallel": 4, "recompute": "full", **SEQUENCE}),
    "8B, context": ("8B", {"tensor_parallel": 2, "context_parallel": 2}),
    "8B, more context than groups": ("8B", {"tensor_parallel": 4, "context_parallel": 2, **SEQUENCE}),
    "32B": ("32B", {"tensor_parallel": 8}),
    "32B, sequence": ("32B", {"tensor_parallel": 8, **SEQUENCE}),
    "32B, sequence, full": ("32B", {"tensor_parallel": 8, "recompute": "full", **SEQUENCE}),
    "llama": ("llama", {"tensor_parallel": 2}),
    "llama, full precision": ("llama", {"tensor_parallel": 2, "dtype": "fp32"}),
    "llama, context": ("llama", {"context_parallel": 4}),
    "biased, selective": ("biased", {"tensor_parallel": 2, "recompute": "selective"}),
    "experts": ("experts", {}),
    "experts, sequence": ("experts", {"tensor_parallel": 2, **SEQUENCE}),
    "minimax": ("minimax", {}),
    "minimax, sequence": ("minimax", {"tensor_parallel": 2, **SEQUENCE}),
    "minimax, context": ("minimax", {"context_parallel": 2}),
    "glm": ("glm", {}),
    "glm, sequence": ("glm", {"tensor_parallel": 2, **SEQUENCE}),
    "gpt-oss": ("gpt-oss", {}),
    "gpt-oss, sequence": ("gpt-oss", {"tensor_parallel": 2, **SEQUENCE}),
    "gated": ("gated", {}),
    "gated, sequence": ("gated", {"tensor_parallel": 2, **SEQUENCE}),
    "gated, context": ("gated", {"context_parallel": 2}),
    "linear": ("linear", {}),
    "linear, sequence": ("linear", {"tensor_parallel": 2, **SEQUENCE}),
    "linear, context": ("linear", {"context_parallel": 2}),
    "linear, sequence, selective": ("linear", {"tensor_parallel": 2, "recompute": "selective", **SEQUENCE}),
    "linear, sequence, full": ("linear", {"tensor_parallel": 2, "recompute": "full", **SEQUENCE}),
}


KEEPING_ALL = ("linear", "linear, sequence", "linear, context")


def config(name: str) -> LearnerConfig:
    return LearnerConfig(**({"lr": 1e-6} | LAYOUTS[name][1]))


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counted]:
    """All cases in one process of their own: importing Megatron costs more than counting."""
    plan = tmp_path_factory.mktemp("activations") / "cases.json"
    cases = [Case(architecture=SHAPES[LAYOUTS[name][0]], config=config(name)) for name in LAYOUTS]
    # Samples of many chunks, the first of which has no state
    cases += [
        msgspec.structs.replace(cases[[*LAYOUTS].index(name)], keeps_all=True, num_positions=32 * CHUNK)
        for name in KEEPING_ALL
    ]
    plan.write_bytes(msgspec.json.encode(cases))
    command = [sys.executable, "-m", "tests.trainer.plan.saved_tensors", str(plan)]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr.decode()[-8000:]
    counts = msgspec.json.decode(finished.stdout, type=list[Counted])
    return dict(zip((*LAYOUTS, *(f"{name}, all" for name in KEEPING_ALL)), counts, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_layer_keeps_is_what_the_formula_says(name: str, counted: dict[str, Counted]) -> None:
    architecture = SHAPES[LAYOUTS[name][0]]
    saved = saved_bytes(architecture, config(name), is_linear=architecture.delta_net is not None)
    assert saved == pytest.approx(counted[name].layer, rel=0.05)
    # The angles are those of the layers with attention, of which some are not recomputed.
    if config(name).recompute != "full" and architecture.delta_net is None:
        assert outer_bytes(architecture, config(name)) == pytest.approx(counted[name].outside, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEEPING_ALL)
def test_what_linear_attention_computes_again_is_what_the_formula_says(
    name: str, counted: dict[str, Counted]
) -> None:
    assert CHUNK == DELTA_CHUNK
    # What the projection returns is kept for computing again alone.
    chosen, width = config(name), NET.num_key_heads * NET.group_width
    projected = width * VALUE_BYTES["bf16"] / chosen.tensor_parallel / chosen.context_parallel
    again = counted[f"{name}, all"].layer - (counted[name].layer - projected)
    assert rule_bytes(SHAPES["linear"], chosen) == pytest.approx(again, rel=0.02)


@pytest.mark.parametrize("size", ["8B", "32B"])
def test_recomputation_and_sequence_parallelism_keep_an_eighth_of_what_was_kept(
    size: str, counted: dict[str, Counted]
) -> None:
    assert counted[f"{size}, sequence, full"].layer <= BEFORE_BYTES[size] / 8
