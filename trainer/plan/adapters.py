"""Which parameters the low-rank adapters of one process add. Pure arithmetic, no torch; `trainer/learner/lora.py` makes them."""

from collections.abc import Iterator

from trainer.learner.architecture import Architecture
from trainer.learner.config import LoraConfig

SUFFIX = "_adapter"
"""Of the layer that an adapter belongs to."""


def adapter_sizes(architecture: Architecture, lora: LoraConfig, tensor: int) -> Iterator[tuple[str, int]]:
    """Name and number of values of each matrix of one layer. What a layer has in experts gets no adapter.

    Of a layer that is divided by output, A is whole and B divided; of one that is divided by input, the other way round.
    """
    if not lora.rank:
        return
    for one, (layer, inputs, outputs) in _projections(architecture).items():
        if one not in lora.targets:
            continue
        is_divided_by_input = layer.endswith(("linear_proj", "linear_fc2"))
        inputs, outputs = (inputs // tensor, outputs) if is_divided_by_input else (inputs, outputs // tensor)
        yield f"{layer}{SUFFIX}.{one}_A", lora.rank * inputs
        yield f"{layer}{SUFFIX}.{one}_B", lora.rank * outputs


def num_adapter_parameters(architecture: Architecture, lora: LoraConfig) -> int:
    """Of the whole model; 0 without adapters."""
    return architecture.num_layers * sum(size for _, size in adapter_sizes(architecture, lora, tensor=1))


def _projections(architecture: Architecture) -> dict[str, tuple[str, int, int]]:
    """The layer in which Megatron computes each projection, its inputs and its outputs."""
    width, head_width = architecture.width, architecture.head_width
    queries, keys = architecture.num_heads * head_width, architecture.num_key_value_heads * head_width
    found = {
        "q_proj": ("self_attention.linear_qkv", width, queries),
        "k_proj": ("self_attention.linear_qkv", width, keys),
        "v_proj": ("self_attention.linear_qkv", width, keys),
        "o_proj": ("self_attention.linear_proj", queries, width),
    }
    if architecture.experts is None:
        mlp_width = architecture.mlp_width
        found |= {
            "gate_proj": ("mlp.linear_fc1", width, mlp_width),
            "up_proj": ("mlp.linear_fc1", width, mlp_width),
            "down_proj": ("mlp.linear_fc2", mlp_width, width),
        }
    return found
