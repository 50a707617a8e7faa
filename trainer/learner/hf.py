"""The correspondence between the weights of a Megatron model and those of a Hugging Face safetensors directory, and the reading of the
latter.

Megatron keeps query, key and value of one head group together, and the gate above the up projection; Hugging Face keeps each
in a tensor of its own. When reading, each rank takes its own part. `export.py` writes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer
from safetensors import safe_open
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Origin:
    """The Hugging Face tensors that make up a Megatron parameter, and their arrangement."""

    names: tuple[str, ...]
    # rows, columns: the dimension that tensor-parallel ranks divide; stacked: gate and up projection of an expert, which they do not divide
    kind: Literal["whole", "stacked", "qkv", "gate_up", "rows", "columns"]

    @property
    def is_divided(self) -> bool:
        """Whether the tensor-parallel ranks divide it; otherwise each rank that has the parameter holds all of it."""
        return self.kind not in ("whole", "stacked")


ATTENTION_ORIGINS = {
    "input_layernorm.weight": Origin(("input_layernorm.weight",), "whole"),
    "self_attention.linear_qkv.weight": Origin(tuple(f"self_attn.{c}_proj.weight" for c in "qkv"), "qkv"),
    "self_attention.linear_qkv.bias": Origin(tuple(f"self_attn.{c}_proj.bias" for c in "qkv"), "qkv"),
    "self_attention.q_layernorm.weight": Origin(("self_attn.q_norm.weight",), "whole"),
    "self_attention.k_layernorm.weight": Origin(("self_attn.k_norm.weight",), "whole"),
    "self_attention.linear_proj.weight": Origin(("self_attn.o_proj.weight",), "columns"),
    "pre_mlp_layernorm.weight": Origin(("post_attention_layernorm.weight",), "whole"),
}
MLP_ORIGINS = {
    "mlp.linear_fc1.weight": Origin(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    "mlp.linear_fc2.weight": Origin(("mlp.down_proj.weight",), "columns"),
}


def origins(model: GPTModel) -> dict[str, Origin]:
    """The origin of every parameter this rank may hold, by Megatron name."""
    table = {
        "embedding.word_embeddings.weight": Origin(("model.embed_tokens.weight",), "rows"),
        "decoder.final_layernorm.weight": Origin(("model.norm.weight",), "whole"),
        "output_layer.weight": Origin(("lm_head.weight",), "rows"),
    }
    if model.share_embeddings_and_output_weights:
        table["output_layer.weight"] = table["embedding.word_embeddings.weight"]
    for index, layer in enumerate(cast(Any, model.decoder.layers)):
        prefix = f"model.layers.{layer.layer_number - 1}."
        table |= {
            f"decoder.layers.{index}.{name}": Origin(
                tuple(prefix + part for part in origin.names), origin.kind
            )
            for name, origin in _layer_origins(layer).items()
        }
    return table


def _layer_origins(layer: Any) -> dict[str, Origin]:
    return ATTENTION_ORIGINS | (
        _expert_origins(layer.mlp) if isinstance(layer.mlp, MoELayer) else MLP_ORIGINS
    )


def _expert_origins(layer: MoELayer) -> dict[str, Origin]:
    """The origins of the router's weights, and of the experts that this rank holds."""
    table = {"mlp.router.weight": Origin(("mlp.gate.weight",), "whole")}
    for place, index in enumerate(layer.local_expert_indices):
        ours, theirs = f"mlp.experts.local_experts.{place}.", f"mlp.experts.{index}."
        halves = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
        table[f"{ours}linear_fc1.weight"] = Origin(halves, "stacked")
        table[f"{ours}linear_fc2.weight"] = Origin((f"{theirs}down_proj.weight",), "whole")
    return table


class SafetensorsDirectory:
    """Tensors by name, from one file or from shards listed in an index."""

    def __init__(self, directory: Path) -> None:
        index = directory / INDEX_FILE
        if index.exists():
            shards: dict[str, str] = msgspec.json.decode(index.read_bytes())["weight_map"]
            self._files = {name: directory / shard for name, shard in shards.items()}
        else:
            single = directory / SINGLE_FILE
            with safe_open(single, framework="pt") as tensors:
                self._files = dict.fromkeys(tensors.keys(), single)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as tensors:
            return tensors.get_tensor(name)


@torch.no_grad()
def read_weights(model: GPTModel, directory: Path) -> None:
    """Fill this rank's parameters. Raises KeyError for a tensor that the directory lacks."""
    tensors, table = SafetensorsDirectory(directory), origins(model)
    for name, parameter in model.named_parameters():
        origin = table[name]
        mine = _part(model, origin, [tensors[part] for part in origin.names], rows=parameter.shape[0])
        parameter.copy_(mine)


def _part(model: GPTModel, origin: Origin, whole: list[Tensor], *, rows: int) -> Tensor:
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    match origin.kind:
        case "whole":
            return whole[0]
        case "stacked":
            return torch.cat(whole)
        case "qkv":
            return interleave(whole, _num_groups(model)).chunk(size)[rank]
        case "gate_up":
            return torch.cat([half.chunk(size)[rank] for half in whole])
        case "columns":
            return whole[0].chunk(size, dim=1)[rank]
        case "rows":
            padding = whole[0].new_zeros(rows * size - whole[0].shape[0], whole[0].shape[1])
            return torch.cat([whole[0], padding]).chunk(size)[rank]


def interleave(qkv: list[Tensor], num_groups: int, *, dim: int = 0) -> Tensor:
    """Regroup query, key and value along a dimension: those of the first head group, then those of the second, ..."""
    dim %= qkv[0].dim()
    grouped = [part.unflatten(dim, (num_groups, -1)) for part in qkv]
    return torch.cat(grouped, dim=dim + 1).flatten(dim, dim + 1)


def _separate(joined: Tensor, model: GPTModel) -> list[Tensor]:
    head_width = model.config.kv_channels
    assert head_width is not None
    grouped = joined.unflatten(0, (_num_groups(model), -1))
    query_rows = grouped.shape[1] - 2 * head_width
    return [part.flatten(0, 1) for part in grouped.split([query_rows, head_width, head_width], dim=1)]


def _num_groups(model: GPTModel) -> int:
    """The number of head groups, which is the number of key-value heads."""
    assert model.config.num_query_groups is not None
    return model.config.num_query_groups


def join(model: GPTModel, origin: Origin, parts: list[Tensor], *, vocab_size: int) -> list[Tensor]:
    """The Hugging Face tensors of a parameter, from the parts of all tensor-parallel ranks in order."""
    match origin.kind:
        case "whole":
            return parts
        case "stacked":
            return list(parts[0].chunk(2))
        case "qkv":
            return _separate(torch.cat(parts), model)
        case "gate_up":
            return [torch.cat(halves) for halves in zip(*(part.chunk(2) for part in parts), strict=True)]
        case "columns":
            return [torch.cat(parts, dim=1)]
        case "rows":
            return [torch.cat(parts)[:vocab_size]]
