"""Weights between Hugging Face safetensors directories and a Megatron model, in both directions and any parallel layout.

When reading, each rank takes its own part. When writing, tensor-parallel parts are joined, and pipeline stages send theirs to
rank 0, which writes. Megatron keeps query, key and value of one head group together, and the gate above the up projection;
Hugging Face keeps each in a tensor of its own.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, distributed

from trainer.learner import backend
from trainer.learner.directories import atomic_directory

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30
COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model")
"""The files of tokenizer, chat template and generation defaults end in one of these."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Which Hugging Face tensors make up a Megatron parameter, and how."""

    names: tuple[str, ...]
    # rows, columns: what tensor-parallel ranks divide
    kind: Literal["whole", "qkv", "gate_up", "rows", "columns"]


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
            for name, origin in _layer_origins().items()
        }
    return table


def _layer_origins() -> dict[str, Origin]:
    attention = "self_attn."
    return {
        "input_layernorm.weight": Origin(("input_layernorm.weight",), "whole"),
        "self_attention.linear_qkv.weight": Origin(
            tuple(f"{attention}{c}_proj.weight" for c in "qkv"), "qkv"
        ),
        "self_attention.linear_qkv.bias": Origin(tuple(f"{attention}{c}_proj.bias" for c in "qkv"), "qkv"),
        "self_attention.q_layernorm.weight": Origin((f"{attention}q_norm.weight",), "whole"),
        "self_attention.k_layernorm.weight": Origin((f"{attention}k_norm.weight",), "whole"),
        "self_attention.linear_proj.weight": Origin((f"{attention}o_proj.weight",), "columns"),
        "pre_mlp_layernorm.weight": Origin(("post_attention_layernorm.weight",), "whole"),
        "mlp.linear_fc1.weight": Origin(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
        "mlp.linear_fc2.weight": Origin(("mlp.down_proj.weight",), "columns"),
    }


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
        case "qkv":
            return _interleave(whole, _num_groups(model)).chunk(size)[rank]
        case "gate_up":
            return torch.cat([half.chunk(size)[rank] for half in whole])
        case "columns":
            return whole[0].chunk(size, dim=1)[rank]
        case "rows":
            padding = whole[0].new_zeros(rows * size - whole[0].shape[0], whole[0].shape[1])
            return torch.cat([whole[0], padding]).chunk(size)[rank]


def _interleave(qkv: list[Tensor], num_groups: int) -> Tensor:
    """Regroup the rows of query, key and value: those of the first head group, then those of the second, ..."""
    grouped = [part.unflatten(0, (num_groups, -1)) for part in qkv]
    return torch.cat(grouped, dim=1).flatten(0, 1)


def _separate(joined: Tensor, model: GPTModel) -> list[Tensor]:
    head_width = model.config.kv_channels
    assert head_width is not None
    grouped = joined.unflatten(0, (_num_groups(model), -1))
    query_rows = grouped.shape[1] - 2 * head_width
    return [part.flatten(0, 1) for part in grouped.split([query_rows, head_width, head_width], dim=1)]


def _num_groups(model: GPTModel) -> int:
    """Head groups: as many as there are key-value heads."""
    assert model.config.num_query_groups is not None
    return model.config.num_query_groups


@torch.no_grad()
def gather_weights(model: GPTModel, *, vocab_size: int) -> dict[str, Tensor]:
    """The whole model by Hugging Face names, on rank 0's host; empty elsewhere. Collective."""
    if parallel_state.get_data_parallel_rank() != 0:
        return {}
    mine = {name: tensor.cpu() for name, tensor in _stage(model, vocab_size)}
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return {}
    stages = distributed.get_process_group_ranks(backend.pipeline_parallel_group())
    if distributed.get_rank() == stages[0]:
        for stage in stages[1:]:
            mine |= _receive(model, stage)
        return mine
    _send(model, mine, stages[0])
    return {}


def _stage(model: GPTModel, vocab_size: int) -> Iterator[tuple[str, Tensor]]:
    """Tensors of this pipeline stage, joined over its tensor-parallel ranks."""
    table = origins(model)
    for name, parameter in model.named_parameters():
        origin = table[name]
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            continue  # the first stage holds the same matrix
        parts = [parameter.detach()] if origin.kind == "whole" else _all_parts(parameter.detach())
        yield from zip(origin.names, _join(model, origin, parts, vocab_size), strict=True)


def _all_parts(part: Tensor) -> list[Tensor]:
    group = backend.tensor_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    distributed.all_gather(parts, part.contiguous(), group=group)
    return parts


def _join(model: GPTModel, origin: Origin, parts: list[Tensor], vocab_size: int) -> list[Tensor]:
    match origin.kind:
        case "whole":
            return parts
        case "qkv":
            return _separate(torch.cat(parts), model)
        case "gate_up":
            return [torch.cat(halves) for halves in zip(*(part.chunk(2) for part in parts), strict=True)]
        case "columns":
            return [torch.cat(parts, dim=1)]
        case "rows":
            return [torch.cat(parts)[:vocab_size]]


def _send(model: GPTModel, tensors: dict[str, Tensor], to: int) -> None:
    device = next(model.parameters()).device
    headers = [(name, tensor.shape) for name, tensor in tensors.items()]
    distributed.send_object_list([headers], dst=to)
    for tensor in tensors.values():
        distributed.send(tensor.to(device).contiguous(), dst=to)


def _receive(model: GPTModel, stage: int) -> dict[str, Tensor]:
    like = next(model.parameters())
    headers: list[Any] = [None]
    distributed.recv_object_list(headers, src=stage)
    tensors = {}
    for name, shape in headers[0]:
        tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
        distributed.recv(tensor, src=stage)
        tensors[name] = tensor.cpu()
    return tensors


def write_directory(tensors: dict[str, Tensor], directory: Path, *, source: Path) -> None:
    """Write the weights, with config and tokenizer of `source`. The directory appears only when it is complete."""
    with atomic_directory(directory) as partial:
        _write_shards(tensors, partial)
        for path in source.iterdir():
            if (
                path.is_file()
                and path.suffix in COPIED_SUFFIXES
                and path.name not in ("config.json", INDEX_FILE)
            ):
                shutil.copyfile(path, partial / path.name)
        config = msgspec.json.decode((source / "config.json").read_bytes())
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        config["dtype" if "dtype" in config else "torch_dtype"] = dtype
        (partial / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def _write_shards(tensors: dict[str, Tensor], directory: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    shard_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and shard_bytes + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor.contiguous()
        shard_bytes += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], directory / SINGLE_FILE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_bytes(msgspec.json.encode(index))
