"""Low-rank adapters (LoRA, arXiv 2106.09685): the model's own weights are frozen, and small matrices beside them are trained.

Each adapted projection computes y = W x + alpha / rank * B A x, where A starts random and B at zero. Megatron computes query, key
and value in one layer, and gate and up projection in another; adapters are nevertheless separate for each projection, as in other tools.
They are written as a directory in PEFT's format, which transformers, PEFT and SGLang load beside the starting model.

Linear attention has none of these projections, so its layers get adapters for their MLP only. Of a mixture, each expert has adapters of its
own; `experts.py` multiplies by those of all experts together. An expert that every token passes and first layers without experts have none:
PEFT takes the names of their projections for those of experts, and would leave theirs out.

Under tensor parallelism, adapters are divided like the layer that they belong to: for a layer divided by output, B is divided and A is
whole; for one divided by input, A is divided and B is whole. The result of A, only `rank` wide, is what the ranks exchange.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
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

ByWeights = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Multiplies rows that are sorted by expert by a matrix of each expert: `experts.py`."""

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

    def __init__(
        self, layer: nn.Module, name: str, config: LoraConfig, transformer: Any, *, expert: int | None = None
    ) -> None:
        """`expert` is the number of the expert in the whole model that the layer belongs to, which no other rank has a part of."""
        super().__init__(config=transformer)
        self.layer_name = name
        self.expert = expert
        self.projections = tuple(one for one in PROJECTIONS[name] if one in config.targets)
        self.rank, self.scale = config.rank, config.alpha / config.rank
        weight = cast(nn.Parameter, layer.weight)
        self.widths = dict(zip(PROJECTIONS[name], _output_widths(name, weight, transformer), strict=True))
        self.is_divided_by_output = name in DIVIDED_BY_OUTPUT
        for one in self.projections:
            down = nn.Parameter(weight.new_empty(config.rank, weight.shape[1]))
            up = nn.Parameter(weight.new_zeros(self.widths[one], config.rank))
            divided, axis, whole = (up, 0, down) if self.is_divided_by_output else (down, 1, up)
            set_tensor_model_parallel_attributes(divided, is_parallel=True, dim=axis, stride=1)
            # Each rank sees only part of the positions of a whole matrix, so Megatron adds its gradients up.
            whole.sequence_parallel = transformer.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
            self.register_parameter(f"{one}_A", down)
            self.register_parameter(f"{one}_B", up)
        if expert is not None:
            mark_expert(self)

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
            for one, width in self.widths.items()
        ]
        return self._fused(wide, dim=1)[:, None]

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """The layer's weight with the adapters added, this rank's part. It is computed in fp32 and returned in the weight's type."""
        deltas = []
        for one, width in self.widths.items():
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
        axes = {f"{one}_{divided}": axis for one in self.projections} if self.expert is None else {}
        assert metadata is not None, "given by checkpoint.py"
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            axes,
            sharded_offsets,
            tp_group=self._group(),
            dp_cp_group=metadata["dp_cp_group"],
        )

    def whole(self, projection: str) -> tuple[Tensor, Tensor]:
        """A and B over all ranks that have parts of them. Collective."""
        group = self._group()
        down, up = self.pair(projection)
        divided = up if self.is_divided_by_output else down
        parts = [torch.empty_like(divided) for _ in range(group.size())]
        distributed.all_gather(parts, divided.detach().contiguous(), group=group)
        joined = torch.cat(parts, dim=0 if self.is_divided_by_output else 1)
        return (down, joined) if self.is_divided_by_output else (joined, up)

    def _group(self) -> distributed.ProcessGroup:
        """The ranks that have parts of the layer."""
        return (
            backend.tensor_parallel_group() if self.expert is None else backend.expert_tensor_parallel_group()
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
        num_groups = self.widths["k_proj"] // head_width
        if self.config.attention_output_gate:
            parts = [gates_last(parts[0], num_groups, head_width, dim=dim), *parts[1:]]
        return interleave(parts, num_groups, dim=dim)


def attach(model: GPTModel, config: LoraConfig) -> None:
    """Give the layers of `model` their adapters, the same in every parallel layout."""
    for layer in cast(Any, model.decoder.layers):
        number = layer.layer_number
        _attach(layer.self_attention, config, model.config, f"{number}")
        if isinstance(layer.mlp, MoELayer):
            experts = cast(Any, layer.mlp.experts).local_experts
            for index, expert in zip(layer.mlp.local_expert_indices, experts, strict=True):
                _attach(expert, config, model.config, f"{number} {index}", expert=index)
        elif model.config.num_moe_experts is None:
            _attach(layer.mlp, config, model.config, f"{number}")


def _attach(
    owner: Any, config: LoraConfig, transformer: Any, seed: str, *, expert: int | None = None
) -> None:
    for name in PROJECTIONS:
        linear = getattr(owner, name, None)
        if linear is None or not set(PROJECTIONS[name]) & set(config.targets):
            continue
        adapter = Adapter(linear, name, config, transformer, expert=expert)
        _initialise(adapter, seed)
        owner.add_module(name + SUFFIX, adapter)
        if expert is None:
            linear.register_forward_hook(_adding(adapter))


def of_experts(rows: Tensor, experts: Sequence[Adapter], by_weights: ByWeights) -> Tensor:
    """The term that the adapters of the same layer of all experts add to its output, for rows that are sorted by expert."""
    first, wide = experts[0], list[Tensor]()
    for one, width in first.widths.items():
        if one not in first.projections:
            wide.append(rows.new_zeros(len(rows), width))
            continue
        downs, ups = zip(*(adapter.pair(one) for adapter in experts), strict=True)
        wide.append(by_weights(by_weights(rows, downs) * first.scale, ups))
    return torch.cat(wide, dim=1)


def mark_expert(module: nn.Module) -> None:
    """Tell Megatron that the copies of an expert are on other ranks than the copies of other weights.

    Megatron flags the experts itself, but only if they are divided. An expert without the flag that is whole on every rank would have its
    gradient summed over the data-parallel ranks alone, and not over the tensor-parallel ones, whose tokens differ too. A bias without the
    flag of a divided parameter would count as a copy of rank 0's in the gradient norm, and one with the flag of sequence parallelism, which
    Megatron gives it, would have its gradient summed over tensor-parallel ranks that hold other experts.
    """
    for parameter in module.parameters():
        parameter.allreduce = parameter.sequence_parallel = False  # type: ignore[attr-defined] - Megatron's marks
        if not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)


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
def _initialise(adapter: Adapter, seed: str) -> None:
    """A uniform in +-1/sqrt(inputs), as PEFT does; each rank draws the whole matrix and takes its part."""
    group = backend.tensor_parallel_group()
    is_whole = adapter.is_divided_by_output or adapter.expert is not None
    for one in adapter.projections:
        down, _ = adapter.pair(one)
        num_parts = 1 if is_whole else group.size()
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {one}".encode()))
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
    is_first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    is_first = is_first and backend.tensor_parallel_group().rank() == 0
    is_first_of_expert = parallel_state.get_expert_data_parallel_rank() == 0
    for weight_name, adapter in adapters(model):
        theirs = dict(zip(PROJECTIONS[adapter.layer_name], table[weight_name].origins, strict=True))
        for one in adapter.projections:
            prefix = f"base_model.model.{theirs[one].removesuffix('.weight')}"
            for letter, whole in zip("AB", adapter.whole(one), strict=True):
                if is_first if adapter.expert is None else is_first_of_expert:
                    mine[f"{prefix}.lora_{letter}.weight"] = whole.detach().cpu()
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
        # Some families have other names for the projections of experts.
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_bytes(msgspec.json.format(msgspec.json.encode(description)))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "adapter_model.safetensors", metadata={"format": "pt"})
