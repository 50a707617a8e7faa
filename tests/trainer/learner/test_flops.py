"""The counts of operations against torch's own counter, on Hugging Face's model of the same shape."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.small_models import DELTA_NET, QWEN3_NEXT, write_model
from tests.trainer.learner.tiny import read_reference
from trainer.learner.architecture import (
    Architecture,
    attention_flops,
    forward_flops,
    recomputed_flops,
    training_flops,
)
from trainer.learner.families.registry import read_architecture


@pytest.fixture
def shape(qwen3: Path) -> Architecture:
    return read_architecture(qwen3)


@pytest.mark.parametrize("directory", ["qwen3", "tied_llama", "biased_qwen2", "qwen3_moe"])
def test_a_forward_pass_costs_what_torch_counts(directory: str, request: pytest.FixtureRequest) -> None:
    """Eager attention computes all pairs of positions and masks half of them, so that part is replaced by all pairs."""
    path: Path = request.getfixturevalue(directory)
    architecture, model = read_architecture(path), read_reference(path)
    # torch does not count the operations of fused kernels on a CPU
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    length = 24
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64))
    causal = attention_flops(architecture, length)
    full = causal * 2 * length // (length + 1)
    # Hugging Face computes the angles of the rotary embedding by a matrix product too.
    angles = 2 * length * architecture.head_width // 2
    assert counter.get_total_flops() - angles == forward_flops(architecture, [length]) - causal + full


@pytest.mark.parametrize("directory", ["qwen3", "qwen3_moe"])
def test_selective_recomputation_costs_what_torch_counts_in_the_mlps(
    directory: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(directory)
    architecture, model = read_architecture(path), read_reference(path)
    model.set_experts_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for layer in model.model.layers:
            layer.mlp(torch.ones(1, 24, architecture.width))
    assert recomputed_flops(architecture, [20, 4], "selective") == counter.get_total_flops()


def test_full_recomputation_repeats_all_but_the_output_layer(shape: Architecture) -> None:
    assert recomputed_flops(shape, [7, 9], "full") == forward_flops(shape, [7, 9], num_head_positions=0)
    assert recomputed_flops(shape, [7, 9], "none") == 0


def test_attention_grows_with_the_square_of_each_sample_alone(shape: Architecture) -> None:
    assert attention_flops(shape, 2000) > 3.99 * attention_flops(shape, 1000)
    together, apart = forward_flops(shape, [2000]), forward_flops(shape, [1000, 1000])
    wanted = attention_flops(shape, 2000) - 2 * attention_flops(shape, 1000)
    assert together - apart == wanted > 0


def test_linear_attention_grows_with_the_length_of_a_sample(tmp_path: Path) -> None:
    linear = read_architecture(
        write_model(tmp_path, "qwen3_5_text", **DELTA_NET | {"layer_types": ["linear_attention"] * 4})
    )
    state = 8 * 16 * 24
    assert attention_flops(linear, 1000) == 1000 * 4 * 3 * 2 * state
    assert forward_flops(linear, [2000]) == forward_flops(linear, [1000, 700, 300])


@pytest.mark.parametrize(("family", "changes"), [("qwen3_5_text", DELTA_NET), ("qwen3_next", QWEN3_NEXT)])
def test_each_matrix_that_a_token_passes_is_counted(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    directory = write_model(tmp_path, family, **changes)
    architecture = read_architecture(directory)
    matrices = 0.0
    for name, parameter in read_reference(directory).named_parameters():
        if "embed_tokens" in name or "conv1d" in name or parameter.dim() == 1:
            continue
        matrices += parameter.numel() * (3 / 8 if ".experts." in name else 1)
    assert forward_flops(architecture, [1]) - attention_flops(architecture, 1) == 2 * matrices


def test_the_output_layer_counts_at_the_positions_it_runs_at(shape: Architecture) -> None:
    per_row = 2 * shape.width * shape.vocab_size
    assert (
        forward_flops(shape, [40, 10]) - forward_flops(shape, [40, 10], num_head_positions=5) == 45 * per_row
    )


def test_training_costs_three_forward_passes(shape: Architecture) -> None:
    assert training_flops(shape, [7, 9]) == 3 * forward_flops(shape, [7, 9])
