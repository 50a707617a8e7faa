"""The correspondence between the weights of a Megatron model and those of a Hugging Face safetensors directory, and the reading of the
latter.

Megatron keeps query, key and value of one head group together, and the gate above the up projection; Hugging Face keeps each
in a tensor of its own. When reading, each rank takes its own part. `export.py` writes.
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import safe_open
from torch import Tensor

from trainer.learner.architecture import Architecture
from trainer.learner.families.registry import FAMILIES, has_packed_weights
from trainer.learner.parameters import CORRECTION, EMBEDDING, Parameter, layer_parameters, outer_parameters
from trainer.learner.precision import BLOCK, scale_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PACKED = ("_scale_inv", "_blocks")
"""The ends of the names of tensors that packed weights have and others do not."""
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The types that weights have, by their names in safetensors files."""


def parameters(model: GPTModel, architecture: Architecture) -> dict[str, Parameter]:
    """Every parameter that this rank may hold, by Megatron's name of it."""
    table = outer_parameters(architecture)
    prefix = FAMILIES[architecture.family].language_prefix
    for index, layer in enumerate(cast(Any, model.decoder.layers)):
        ours, theirs = f"decoder.layers.{index}.", f"{prefix}layers.{layer.layer_number - 1}."
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
        self._directory = directory
        index = directory / INDEX_FILE
        if index.exists():
            shards: dict[str, str] = msgspec.json.decode(index.read_bytes())["weight_map"]
            self._files = {name: directory / shard for name, shard in shards.items()}
        else:
            single = directory / SINGLE_FILE
            with safe_open(single, framework="pt") as tensors:
                self._files = dict.fromkeys(tensors.keys(), single)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def announced(self, name: str) -> Tensor:
        """A tensor of the same shape and type, without content. Raises ValueError for a type that exports do not have."""
        with safe_open(self._file(name), framework="pt") as tensors:
            header = tensors.get_slice(name)
            if header.get_dtype() not in DTYPES:
                raise ValueError(f"{name} has numbers of type {header.get_dtype()}: convert it to bf16")
            return torch.empty(header.get_shape(), dtype=DTYPES[header.get_dtype()], device="meta")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        """A tensor. A matrix in FP8 is returned as numbers. Raises ValueError if its scales are not those of its blocks."""
        tensor, scales = self._whole(name), scale_name(name)
        return from_fp8(tensor, self._whole(scales)) if scales in self else tensor

    def _whole(self, name: str) -> Tensor:
        with safe_open(self._file(name), framework="pt") as tensors:
            return tensors.get_tensor(name)

    def of_expert(self, name: str, expert: int | None) -> Tensor:
        """One expert's part of a tensor that holds those of all experts. A matrix in MXFP4 is returned as numbers, inputs first."""
        assert expert is not None
        if name in self or f"{name}_blocks" not in self:
            return self._row(name, expert)
        return from_mxfp4(self._row(f"{name}_blocks", expert), self._row(f"{name}_scales", expert)).T

    def _row(self, name: str, index: int) -> Tensor:
        with safe_open(self._file(name), framework="pt") as tensors:
            return tensors.get_slice(name)[index]

    def _file(self, name: str) -> Path:
        if name not in self:
            raise ValueError(
                f"{self._directory} has no tensor {name}: take the files that belong to config.json"
            )
        return self._files[name]


MXFP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of a number of four bits; the highest bit is the sign (OCP Microscaling Formats 1.0, E2M1)."""


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers of a matrix in MXFP4, bf16 of rows x columns, which has them without loss.

    `blocks`, uint8 of rows x blocks x 16, has two numbers in each byte, the first in its lower half; `scales`, uint8 of rows x blocks, has
    the exponent of two of each block, plus 127.
    """
    values = torch.cat([MXFP4, -MXFP4])
    numbers = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return torch.ldexp(numbers, scales[..., None].int() - 127).flatten(-2).to(torch.bfloat16)


def from_fp8(matrix: Tensor, scales: Tensor) -> Tensor:
    """The numbers of a matrix in FP8 (E4M3), fp32 of rows x columns, from `scales` of one number for each block. Raises ValueError if
    there are not as many as blocks, or if it is no such matrix.
    """
    if matrix.dtype != torch.float8_e4m3fn or matrix.dim() != 2:
        raise ValueError(
            f"a tensor of type {matrix.dtype} and shape {tuple(matrix.shape)} has scales, which are read for matrices in FP8 (E4M3) alone: "
            "take the files that belong together"
        )
    rows, columns = matrix.shape
    blocks = tuple(-(-size // BLOCK) for size in matrix.shape)
    if scales.shape != blocks:
        raise ValueError(
            f"a matrix of {rows} x {columns} in FP8 has scales of shape {tuple(scales.shape)} instead of {blocks}: take weights with "
            f"blocks of {BLOCK} x {BLOCK}"
        )
    spread = scales.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return matrix.float() * spread[:rows, :columns]


@torch.no_grad()
def read_weights(model: GPTModel, architecture: Architecture, directory: Path) -> None:
    """Fill this rank's parameters. Raises ValueError for a tensor that the directory lacks, for a type that is not read, for tensors that
    together have another number of values than the parameter, for packed weights of which `config.json` says nothing, and for an output
    layer that differs from the embedding though `config.json` says that they are one.
    """
    tensors, table = SafetensorsDirectory(directory), parameters(model, architecture)
    packed = next((name for name in tensors if name.endswith(PACKED)), None)
    if packed is not None and not has_packed_weights(directory):
        raise ValueError(
            f"{directory} has {packed}, so weights are packed, but config.json has no quantization_config, without which engines read "
            "other numbers: take the files that belong together"
        )
    for name, values in weights(model):
        parameter = table[name]
        whole = [tensors.of_expert(parameter.origins[0], parameter.expert)] if parameter.is_of_all else []
        whole = whole or [tensors[origin] for origin in parameter.origins]
        _check(parameter, whole)
        values.copy_(_part(parameter, whole, architecture, num_rows=values.shape[0]))
    if architecture.tied and "lm_head.weight" in tensors:
        (embedding,) = outer_parameters(architecture)[EMBEDDING].origins
        if not torch.equal(tensors["lm_head.weight"], tensors[embedding]):
            raise ValueError(
                f"{directory}: lm_head.weight differs from {embedding}, but config.json has tie_word_embeddings = true: set it to false"
            )


def _check(parameter: Parameter, whole: list[Tensor]) -> None:
    """Raises ValueError if the tensors are not those of the parameter."""
    for origin, tensor in zip(parameter.origins, whole, strict=True):
        if tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"{origin} has numbers of type {tensor.dtype}, and the learner reads fp32, bf16 and fp16: convert the weights"
            )
    num_values = sum(tensor.numel() for tensor in whole)
    if num_values != prod(parameter.shape):
        found = ", ".join(
            f"{origin} {tuple(tensor.shape)}" for origin, tensor in zip(parameter.origins, whole, strict=True)
        )
        raise ValueError(
            f"config.json makes {parameter.name} {parameter.shape}, and the weights have {found}: take the files that belong together"
        )


def _part(parameter: Parameter, whole: list[Tensor], architecture: Architecture, *, num_rows: int) -> Tensor:
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    match parameter.kind:
        case "whole" | "of_all_as_is":
            return whole[0]
        case "stacked":
            return torch.cat(whole)
        case "qkv":
            query, groups = whole[0], architecture.num_key_value_heads
            if architecture.gated:
                query = gates_last(query, groups, architecture.head_width)
            return interleave([query, *whole[1:]], groups).chunk(size)[rank]
        case "key_heads" | "key_heads_apart":
            return _of_key_heads(parameter, whole, architecture).chunk(size)[rank]
        case "gate_up":
            return torch.cat([half.chunk(size)[rank] for half in whole])
        case "columns":
            return whole[0].chunk(size, dim=1)[rank]
        case "entries":
            return whole[0].chunk(size)[rank]
        case "of_all":
            return whole[0].T if whole[0].dim() == 2 else whole[0]
        case "of_all_mixed":
            outputs_first = whole[0].T if whole[0].dim() == 2 else whole[0]
            return torch.cat([outputs_first[::2], outputs_first[1::2]])
        case "rows":
            padding = whole[0].new_zeros(num_rows * size - whole[0].shape[0], whole[0].shape[1])
            return torch.cat([whole[0], padding]).chunk(size)[rank]


def interleave(qkv: list[Tensor], num_groups: int, *, dim: int = 0) -> Tensor:
    """Regroup query, key and value along a dimension: those of the first head group, then those of the second, ..."""
    dim %= qkv[0].dim()
    grouped = [part.unflatten(dim, (num_groups, -1)) for part in qkv]
    return torch.cat(grouped, dim=dim + 1).flatten(dim, dim + 1)


def join(parameter: Parameter, parts: list[Tensor], architecture: Architecture) -> list[Tensor]:
    """The Hugging Face tensors of a parameter, from the parts of all tensor-parallel ranks in order; of a tensor that holds all experts,
    from those of all expert-parallel ranks in order, each of which has the parameters of its experts as rows.
    """
    match parameter.kind:
        case "whole":
            return parts
        case "stacked":
            return list(parts[0].chunk(2))
        case "qkv":
            return _separate(torch.cat(parts), architecture)
        case "key_heads" | "key_heads_apart":
            return _from_key_heads(parameter, torch.cat(parts), architecture)
        case "gate_up":
            return [torch.cat(halves) for halves in zip(*(part.chunk(2) for part in parts), strict=True)]
        case "columns":
            return [torch.cat(parts, dim=1)]
        case "entries" | "of_all_as_is":
            return [torch.cat(parts)]
        case "of_all":
            return [_inputs_first(torch.cat(parts))]
        case "of_all_mixed":
            gates, ups = torch.cat(parts).chunk(2, dim=1)
            return [_inputs_first(torch.stack([gates, ups], dim=2).flatten(1, 2))]
        case "rows":
            return [torch.cat(parts)[: parameter.shape[0]]]


def _inputs_first(of_experts: Tensor) -> Tensor:
    return of_experts.transpose(1, 2) if of_experts.dim() == 3 else of_experts


def _separate(joined: Tensor, architecture: Architecture) -> list[Tensor]:
    """Query, key and value; a head group, which Megatron keeps together, has one key-value head."""
    head_width = architecture.head_width
    grouped = joined.unflatten(0, (architecture.num_key_value_heads, -1))
    num_query_rows = grouped.shape[1] - 2 * head_width
    query, key, value = (
        part.flatten(0, 1) for part in grouped.split([num_query_rows, head_width, head_width], dim=1)
    )
    return [_gates_beside(query, architecture) if architecture.gated else query, key, value]


def gates_last(queries: Tensor, num_groups: int, head_width: int, *, dim: int = 0) -> Tensor:
    """Queries with gates as Megatron keeps them along a dimension: in a head group, the gates of all heads follow the queries of all.
    Hugging Face has the gate of each head after its query.
    """
    heads = queries.unflatten(dim, (num_groups, -1, 2, head_width))
    return heads.transpose(dim + 1, dim + 2).flatten(dim, dim + 3)


def _gates_beside(queries: Tensor, architecture: Architecture) -> Tensor:
    """The inverse of `gates_last`, for rows."""
    heads = (architecture.num_key_value_heads, 2, -1, architecture.head_width)
    return queries.unflatten(0, heads).transpose(1, 2).flatten(0, 3)


def _of_key_heads(parameter: Parameter, whole: list[Tensor], architecture: Architecture) -> Tensor:
    """All rows of the first key head of a delta net, then those of the second, ..."""
    net = architecture.delta_net
    assert net is not None
    if parameter.kind == "key_heads_apart":
        keys, values = net.num_key_heads * net.key_width, net.num_value_heads * net.value_width
        whole = [*whole[0].split([keys, keys, values]), *whole[1:]]
    return interleave(whole, net.num_key_heads)


def _from_key_heads(parameter: Parameter, joined: Tensor, architecture: Architecture) -> list[Tensor]:
    """The inverse of `_of_key_heads`."""
    net = architecture.delta_net
    assert net is not None
    values = net.values_per_key * net.value_width
    mixed = [net.key_width, net.key_width, values]
    if parameter.kind == "key_heads":
        widths = [sum(mixed) + values, 2 * net.values_per_key]
    else:
        widths = mixed + [values, net.values_per_key, net.values_per_key] * (len(parameter.origins) > 1)
    grouped = joined.unflatten(0, (net.num_key_heads, -1))
    found = [part.flatten(0, 1) for part in grouped.split(widths, dim=1)]
    return found if parameter.kind == "key_heads" else [torch.cat(found[:3]), *found[3:]]
