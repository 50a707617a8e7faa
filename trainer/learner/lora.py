"""Low-rank adapters (LoRA, arXiv 2106.09685): the model's own weights are frozen, and small matrices beside them are trained.

Each adapted projection computes y = W x + alpha / rank * B A x, where A starts random and B at zero. Megatron computes query, key
and value in one layer, and gate and up projection in another; adapters are nevertheless separate for each projection, as in other tools.
They are written as a directory in PEFT's format, which transformers, PEFT and SGLang load beside the starting model.

Linear attention has none of these projections, so its layers get adapters for their MLP only.

Under tensor parallelism, adapters are divided like the layer that they belong to: for a layer divided by output, B is divided and A is
whole; for one divided by input, A is divided and B is whole. The result of A, only `rank` wide, is what the ranks exchange.
"""

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from safetensors.torch import save_file
from torch import Tensor, distributed, nn

from trainer.learner import backend
from trainer.learner.architecture import Architecture
from trainer.learner.config import LoraConfig
from trainer.learner.hf import gates_last, interleave, parameters

SUFFIX = "_adapter"
"""The suffix that the layer's name gets to name its adapter, which is registered beside the layer."""

PROJECTIONS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""The projections that each layer of Megatron computes, by Hugging Face's names."""

DIVIDED_BY_OUTPUT = ("linear_qkv", "linear_fc1")


class Adapter(MegatronModule):
    """The adapters of one layer. Parameters: `q_proj_A`, rank x inputs; `q_proj_B`, outputs x rank; and so on."""

    def __init__(self, layer: nn.Module, name: str, config: LoraConfig, transformer: Any) -> None:
        super().__init__(config=transformer)
        self.layer_name = name
        self.projections = tuple(one for one in PROJECTIONS[name] if one in config.targets)
        self.scale = config.alpha / config.rank
        weight = cast(nn.Parameter, layer.weight)
        self._widths = dict(zip(PROJECTIONS[name], _output_widths(name, weight, transformer), strict=True))
        self.is_divided_by_output = name in DIVIDED_BY_OUTPUT
        for one in self.projections:
            down = nn.Parameter(weight.new_empty(config.rank, weight.shape[1]))
            up = nn.Parameter(weight.new_zeros(self._widths[one], config.rank))
            divided, axis, whole = (up, 0, down) if self.is_divided_by_output else (down, 1, up)
            set_tensor_model_parallel_attributes(divided, is_parallel=True, dim=axis, stride=1)
            # Each rank sees only part of the positions of a whole matrix, so Megatron adds its gradients up.
            whole.sequence_parallel = transformer.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
            self.register_parameter(f"{one}_A", down)
            self.register_parameter(f"{one}_B", up)

    def pair(self, projection: str) -> tuple[nn.Parameter, nn.Parameter]:
        """A and B, as this rank's parts."""
        return self.get_parameter(f"{projection}_A"), self.get_parameter(f"{projection}_B")

    def forward(self, input_P1E: Tensor) -> Tensor:
        """Returns the term that is added to the layer's output, in the output's shape.

        The middle dimension is left out: how torch multiplies arrays of three dimensions, to the last bit, depends on whether a
        gradient is required, and so would differ where activations are computed again.
        """
        pairs = {one: self.pair(one) for one in self.projections}
        narrow_PR = F.linear(input_P1E[:, 0], torch.cat([down for down, _ in pairs.values()]))
        narrow_PR = self._exchange(narrow_PR * self.scale)
        narrow_of = dict(zip(pairs, narrow_PR.chunk(len(pairs), dim=1), strict=True))
        wide = [
            F.linear(narrow_of[one], pairs[one][1])
            if one in pairs
            else narrow_PR.new_zeros(narrow_PR.shape[0], width)
            for one, width in self._widths.items()
        ]
        return self._fused(wide, dim=1)[:, None]

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """The layer's weight with the adapters added, this rank's part. It is computed in fp32 and returned in the weight's type."""
        deltas = []
        for one, width in self._widths.items():
            if one in self.projections:
                down, up = self.pair(one)
                deltas.append(self.scale * up.float() @ down.float())
            else:
                deltas.append(weight.new_zeros(width, weight.shape[1], dtype=torch.float32))
        return (weight.float() + self._fused(deltas, dim=0)).to(weight.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The adapter in checkpoints that other layouts can read."""
        divided, axis = ("B", 0) if self.is_divided_by_output else ("A", 1)
        axes = {f"{one}_{divided}": axis for one in self.projections}
        assert metadata is not None, "given by checkpoint.py"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=backend.tensor_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )

    def _exchange(self, narrow_PR: Tensor) -> Tensor:
        """Completes the result of A as B needs it, and its gradient in the backward pass."""
        in_parts = self.config.sequence_parallel
        if self.is_divided_by_output:
            exchange = (
                gather_from_sequence_parallel_region if in_parts else copy_to_tensor_model_parallel_region
            )
        else:
            exchange = (
                reduce_scatter_to_sequence_parallel_region
                if in_parts
                else reduce_from_tensor_model_parallel_region
            )
        return exchange(narrow_PR)

    def _fused(self, parts: list[Tensor], *, dim: int) -> Tensor:
        """The outputs of all projections in the layer's order."""
        if self.layer_name != "linear_qkv":
            return torch.cat(parts, dim=dim)
        head_width = self.config.kv_channels
        assert head_width is not None
        num_groups = self._widths["k_proj"] // head_width
        if self.config.attention_output_gate:
            parts = [gates_last(parts[0], num_groups, head_width, dim=dim), *parts[1:]]
        return interleave(parts, num_groups, dim=dim)


def attach(model: GPTModel, config: LoraConfig) -> None:
    """Give the layers of `model` their adapters, the same in every parallel layout."""
    for layer in cast(Any, model.decoder.layers):
        owners = [layer.self_attention, *([] if isinstance(layer.mlp, MoELayer) else [layer.mlp])]
        for owner in owners:
            for name in PROJECTIONS:
                linear = getattr(owner, name, None)
                if linear is None or not set(PROJECTIONS[name]) & set(config.targets):
                    continue
                adapter = Adapter(linear, name, config, model.config)
                _initialise(adapter, layer.layer_number)
                owner.add_module(name + SUFFIX, adapter)
                linear.register_forward_hook(_adding(adapter))


def adapters(model: nn.Module) -> Iterator[tuple[str, Adapter]]:
    """All adapters of this rank, each with the name of the weight that it changes."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            yield name.removesuffix(SUFFIX) + ".weight", module


def _adding(adapter: Adapter) -> Any:
    def add(_layer: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        return output[0] + adapter(inputs[0]), output[1]

    return add


def _output_widths(name: str, weight: Tensor, transformer: Any) -> list[int]:
    """The number of the layer's outputs on this rank that belong to each of its projections."""
    rows = weight.shape[0]
    match name:
        case "linear_qkv":
            groups = transformer.num_query_groups // transformer.tensor_model_parallel_size
            key_rows = groups * transformer.kv_channels
            return [rows - 2 * key_rows, key_rows, key_rows]
        case "linear_fc1":
            return [rows // 2, rows // 2]
        case _:
            return [rows]


@torch.no_grad()
def _initialise(adapter: Adapter, layer_number: int) -> None:
    """A uniform in +-1/sqrt(inputs), as PEFT does; each rank draws the whole matrix and takes its part."""
    group = backend.tensor_parallel_group()
    for one in adapter.projections:
        down, _ = adapter.pair(one)
        num_parts = 1 if adapter.layer_name in DIVIDED_BY_OUTPUT else group.size()
        generator = torch.Generator().manual_seed(zlib.crc32(f"{layer_number} {one}".encode()))
        whole = torch.rand(down.shape[0], down.shape[1] * num_parts, generator=generator) * 2 - 1
        mine = whole.chunk(num_parts, dim=1)[group.rank() if num_parts > 1 else 0]
        down.copy_(mine / math.sqrt(whole.shape[1]))


ADAPTER_DIRECTORY = "adapter"
"""The directory of an export that contains the adapters, beside the merged weights."""


@torch.no_grad()
def gather_adapters(model: GPTModel, architecture: Architecture) -> dict[str, Tensor]:
    """All adapters by PEFT's names, on rank 0's host; empty elsewhere. Collective.

    Each matrix is sent once, separately and between hosts. As one object per rank, they would occupy memory on rank 0's GPU: the largest
    object's size times the number of ranks.
    """
    table, mine = parameters(model, architecture), dict[str, Tensor]()
    for weight_name, adapter in adapters(model):
        theirs = dict(zip(PROJECTIONS[adapter.layer_name], table[weight_name].origins, strict=True))
        for one in adapter.projections:
            prefix = f"base_model.model.{theirs[one].removesuffix('.weight')}"
            for letter, whole in zip("AB", _whole(adapter, one), strict=True):
                mine[f"{prefix}.lora_{letter}.weight"] = whole.detach().cpu()
    is_first_copy = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    if not is_first_copy or backend.tensor_parallel_group().rank() != 0:
        mine = {}
    return _on_first_rank(mine)


def _on_first_rank(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks, on rank 0; empty elsewhere. Collective."""
    rank, group = distributed.get_rank(), backend.host_group()
    announced: list[Any] = [None] * distributed.get_world_size()
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}
    distributed.all_gather_object(announced, shapes, group=group)
    if rank != 0:
        for tensor in mine.values():
            distributed.send(tensor.contiguous(), dst=0, group=group)
        return {}
    found = dict(mine)
    for source, theirs in enumerate(announced[1:], 1):
        for name, (shape, dtype) in theirs.items():
            found[name] = torch.empty(shape, dtype=dtype)
            distributed.recv(found[name], src=source, group=group)
    return found


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
    """Writes the adapters. `source` is the model that they belong to."""
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
