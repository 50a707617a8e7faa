"""The correspondence between the weights of a Megatron model and those of a Hugging Face safetensors directory, and the reading of the
latter.

Megatron keeps query, key and value of one head group together, and the gate above the up projection; Hugging Face keeps each
in a tensor of its own. When reading, each rank takes its own part. `export.py` writes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import safe_open
from torch import Tensor

from trainer.learner.architecture import Architecture
from trainer.learner.parameters import CORRECTION, Parameter, layer_parameters, outer_parameters

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def parameters(model: GPTModel, architecture: Architecture) -> dict[str, Parameter]:
    """Every parameter that this rank may hold, by Megatron's name of it."""
    table = outer_parameters(architecture)
    for index, layer in enumerate(cast(Any, model.decoder.layers)):
        ours, theirs = f"decoder.layers.{index}.", f"model.layers.{layer.layer_number - 1}."
        for one in _layer_parameters(architecture, layer):
            origins = tuple(theirs + origin for origin in one.origins)
            table[ours + one.name] = msgspec.structs.replace(one, name=ours + one.name, origins=origins)
    return table


def _layer_parameters(architecture: Architecture, layer: Any) -> Iterator[Parameter]:
    for parameter in layer_parameters(architecture, layer.layer_number - 1):
        if parameter.is_expert:
            for place, index in enumerate(layer.mlp.local_expert_indices):
                yield parameter.of_expert(place, index)
        else:
            yield parameter


def weights(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of the model, by Megatron's names: its parameters, and the constants of its routers."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(CORRECTION))


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
def read_weights(model: GPTModel, architecture: Architecture, directory: Path) -> None:
    """Fill this rank's parameters. Raises KeyError for a tensor that the directory lacks."""
    tensors, table = SafetensorsDirectory(directory), parameters(model, architecture)
    for name, values in weights(model):
        parameter = table[name]
        whole = [tensors[origin] for origin in parameter.origins]
        values.copy_(_part(parameter, whole, architecture, num_rows=values.shape[0]))


def _part(parameter: Parameter, whole: list[Tensor], architecture: Architecture, *, num_rows: int) -> Tensor:
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    match parameter.kind:
        case "whole":
            return whole[0]
        case "stacked":
            return torch.cat(whole)
        case "qkv":
            return interleave(whole, architecture.num_key_value_heads).chunk(size)[rank]
        case "gate_up":
            return torch.cat([half.chunk(size)[rank] for half in whole])
        case "columns":
            return whole[0].chunk(size, dim=1)[rank]
        case "rows":
            padding = whole[0].new_zeros(num_rows * size - whole[0].shape[0], whole[0].shape[1])
            return torch.cat([whole[0], padding]).chunk(size)[rank]


def interleave(qkv: list[Tensor], num_groups: int, *, dim: int = 0) -> Tensor:
    """Regroup query, key and value along a dimension: those of the first head group, then those of the second, ..."""
    dim %= qkv[0].dim()
    grouped = [part.unflatten(dim, (num_groups, -1)) for part in qkv]
    return torch.cat(grouped, dim=dim + 1).flatten(dim, dim + 1)


def join(parameter: Parameter, parts: list[Tensor], architecture: Architecture) -> list[Tensor]:
    """The Hugging Face tensors of a parameter, from the parts of all tensor-parallel ranks in order."""
    match parameter.kind:
        case "whole":
            return parts
        case "stacked":
            return list(parts[0].chunk(2))
        case "qkv":
            return _separate(torch.cat(parts), architecture)
        case "gate_up":
            return [torch.cat(halves) for halves in zip(*(part.chunk(2) for part in parts), strict=True)]
        case "columns":
            return [torch.cat(parts, dim=1)]
        case "rows":
            return [torch.cat(parts)[: parameter.shape[0]]]


def _separate(joined: Tensor, architecture: Architecture) -> list[Tensor]:
    """Query, key and value; a head group, which Megatron keeps together, has one key-value head."""
    head_width = architecture.head_width
    grouped = joined.unflatten(0, (architecture.num_key_value_heads, -1))
    num_query_rows = grouped.shape[1] - 2 * head_width
    return [part.flatten(0, 1) for part in grouped.split([num_query_rows, head_width, head_width], dim=1)]
