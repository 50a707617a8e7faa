"""Adapters as a directory in PEFT's form, which transformers, PEFT and SGLang load beside the starting model."""

from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors.torch import save_file
from torch import Tensor, distributed

from trainer.learner import backend
from trainer.learner.config import LoraConfig
from trainer.learner.hf import origins
from trainer.learner.lora import PROJECTIONS, Adapter, adapters

ADAPTER_DIRECTORY = "adapter"
"""Where an export keeps the adapters, beside the merged weights."""


@torch.no_grad()
def gather_adapters(model: GPTModel) -> dict[str, Tensor]:
    """All adapters by PEFT's names, on rank 0's host; empty elsewhere. Collective. They are small."""
    table, mine = origins(model), {}
    for weight_name, adapter in adapters(model):
        theirs = dict(zip(PROJECTIONS[adapter.layer_name], table[weight_name].names, strict=True))
        for one in adapter.projections:
            prefix = f"base_model.model.{theirs[one].removesuffix('.weight')}"
            for letter, whole in zip("AB", _whole(adapter, one), strict=True):
                mine[f"{prefix}.lora_{letter}.weight"] = whole.cpu()
    is_first_copy = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    if not is_first_copy or backend.tensor_parallel_group().rank() != 0:
        mine = {}
    rank, gathered = distributed.get_rank(), [None] * distributed.get_world_size()
    distributed.gather_object(mine, gathered if rank == 0 else None, dst=0)
    parts: list[Any] = gathered if rank == 0 else []
    return {name: tensor for part in parts for name, tensor in part.items()}


def _whole(adapter: Adapter, projection: str) -> tuple[Tensor, Tensor]:
    """A and B over all tensor-parallel ranks. Collective."""
    group = backend.tensor_parallel_group()
    down, up = adapter.pair(projection)
    divided = up if adapter.is_divided_by_output else down
    parts = [torch.empty_like(divided) for _ in range(group.size())]
    distributed.all_gather(parts, divided.detach().contiguous(), group=group)
    joined = torch.cat(parts, dim=0 if adapter.is_divided_by_output else 1)
    return (down, joined) if adapter.is_divided_by_output else (joined, up)


def write_adapters(tensors: dict[str, Tensor], directory: Path, config: LoraConfig, *, source: Path) -> None:
    """`source` is the model that the adapters belong to."""
    directory.mkdir()
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(config.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(description)))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "adapter_model.safetensors", metadata={"format": "pt"})
