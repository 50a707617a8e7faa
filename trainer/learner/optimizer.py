"""Megatron's AdamW over the trained parameters: its construction, the recipe's settings, undoing its updates, its memory, and its tensors
in a checkpoint.

Weight decay applies to matrices; norms and biases are excluded.

The optimizer's tensors (Adam's moments, and the fp32 originals of half-precision weights) may be on the host between updates. They are
needed on the device only during the update, when no activations exist, so activations and optimizer use the same memory in turn. Every
update copies all of them to the device and back, through pinned memory. The update itself is Megatron's, on the device, so results are the
same bit for bit.

A checkpoint holds these tensors as rectangles of whole tensors, which every other layout can read. With `learner.distributed_optimizer` a
rank has them for a range of the values of a flattened parameter. Such a range is a few rectangles of the parameter: a part of a row, whole
rows, a part of a row. So each rank writes its values from, and reads them into, the optimizer's own tensors. Megatron's own format gathers
the ranges of all data-parallel ranks on the first one, which costs the host 27 to 36 bytes for each of its parameters. Adam's count of
updates is stored once for all parameters; torch's AdamW gets a copy for each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, distributed, nn

from trainer.learner import backend
from trainer.learner.config import LearnerConfig
from trainer.learner.model import weights_dtype
from trainer.learner.snapshots import HostTensors, copy_weights, load_weights


def keep_on_host(optimizer: MegatronOptimizer, parts: list[Any], model: nn.Module) -> None:
    """Keep the optimizer's tensors on the device only while `optimizer.step` runs.

    `parts` are Megatron's wrappers within `optimizer`, each around one torch optimizer.
    """
    tensors = _OptimizerTensors([part.optimizer for part in parts], model)
    update = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        tensors.to_device()
        try:
            return update(*args, **kwargs)
        finally:
            tensors.to_host()

    optimizer.step = step
    tensors.to_host()


class _OptimizerTensors:
    """Moves the tensors of some torch optimizers. The tensors remain the same objects, only their storages change."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], model: nn.Module) -> None:
        self._optimizers = optimizers
        self._model = model
        self._blocks: list[HostTensors] = []
        self._buffers: dict[tuple[int, str | None], Tensor] = {}  # views of the blocks

    @torch.no_grad()
    def to_host(self) -> None:
        found = {(id(parameter), name): (parameter, tensor) for parameter, name, tensor in self._tensors()}
        self._add_buffers({key: tensor for key, (_, tensor) in found.items() if key not in self._buffers})
        for key, (parameter, tensor) in found.items():
            if tensor is parameter:
                parameter.grad = None  # it is on the device, and the next update makes its own
            tensor.data = self._buffers[key].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def _add_buffers(self, missing: dict[tuple[int, str | None], Tensor]) -> None:
        """Adds host buffers for tensors that are new: the moments exist from the first update on."""
        if missing:
            self._blocks.append(HostTensors(list(missing.values())))
            self._buffers.update(zip(missing, self._blocks[-1].tensors, strict=True))

    @torch.no_grad()
    def to_device(self) -> None:
        for _, _, tensor in self._tensors():
            tensor.data = tensor.data.to(backend.device(), copy=True, non_blocking=True)

    def _tensors(self) -> Iterator[tuple[Tensor, str | None, Tensor]]:
        """Yields the parameter, the name of its state or None, and the tensor, without tensors that are the model's own weights."""
        in_model = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.untyped_storage().data_ptr() not in in_model:
                        yield parameter, None, parameter
                    for name, value in optimizer.state.get(parameter, {}).items():
                        # The step count has no dimensions and stays
                        if isinstance(value, Tensor) and value.dim():
                            yield parameter, name, value


def check_adam() -> None:
    """Raises ValueError if Megatron would use another Adam than torch's."""
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        raise ValueError(
            "TransformerEngine or Apex is installed, and Megatron takes its Adam from there. That one keeps the count of updates where "
            "neither a checkpoint nor a step that is taken back finds it: `python -m pip uninstall transformer-engine apex`"
        )


def build_optimizer(wrapped: DistributedDataParallel, config: LearnerConfig) -> MegatronOptimizer:
    """The optimizer of the parameters that require a gradient. Call inside `backend.device_scope`."""
    options = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        weight_decay=config.weight_decay,
        clip_grad=config.clip_grad,
        bf16=config.dtype == "bf16",
        params_dtype=weights_dtype(config),
        use_distributed_optimizer=config.distributed_optimizer,
    )
    overrides = get_standard_config_overrides(options)
    optimizer = get_megatron_optimizer(options, [wrapped], config_overrides=overrides)
    if config.offload_optimizer:
        keep_on_host(optimizer, inner_optimizers(optimizer), wrapped)
    return optimizer


def set_hyperparameters(optimizer: MegatronOptimizer, config: LearnerConfig, *, lr: float) -> None:
    """Make the next update use these values.

    Megatron puts parameters of one dimension into a group with `wd_mult` 0, but leaves it to its own scheduler, which we do
    not use, to apply that factor.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["betas"] = config.betas
        group["eps"] = config.eps
        group["weight_decay"] = config.weight_decay * group["wd_mult"]


def inner_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's wrappers, each around one torch optimizer."""
    return cast(list[Any], getattr(optimizer, "chained_optimizers", [optimizer]))


def adam_steps(optimizer: MegatronOptimizer) -> list[float]:
    """The number of updates of each parameter of this rank."""
    states = (part.optimizer.state for part in inner_optimizers(optimizer))
    return [float(state["step"]) for by_parameter in states for state in by_parameter.values()]


class Undo:
    """Host copies of weights and optimizer state, to undo later updates."""

    def __init__(self, model: torch.nn.Module, optimizer: MegatronOptimizer) -> None:
        self._model = model
        self._optimizers = [part.optimizer for part in inner_optimizers(optimizer)]
        self._weights = copy_weights(model)
        self._parameters = [[_copy(p) for p in _parameters(one)] for one in self._optimizers]
        self._states = [
            [{name: _copy(value) for name, value in one.state.get(p, {}).items()} for p in _parameters(one)]
            for one in self._optimizers
        ]

    @torch.no_grad()
    def __call__(self) -> None:
        """Restores everything, bit for bit."""
        load_weights(self._model, self._weights)
        for one, parameters, states in zip(self._optimizers, self._parameters, self._states, strict=True):
            for parameter, value, state in zip(_parameters(one), parameters, states, strict=True):
                parameter.copy_(value)
                if not state:
                    one.state.pop(parameter, None)
                for name, kept in state.items():
                    one.state[parameter][name].copy_(kept)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that the optimizer updates: with half-precision weights, their fp32 copies."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


PREFIX = "optimizer."
"""The names of the optimizer's tensors in a checkpoint begin with it."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_ORIGINAL = "param"


@dataclass(frozen=True, slots=True)
class _Held:
    """The optimizer's values on this rank for one parameter of the model."""

    parameter: Tensor
    # index of its first value in the flattened parameter; the tensors below hold the values from there on
    start: int
    tensors: dict[str, Tensor]
    is_alone: bool  # whether no other data-parallel rank has the same values


def num_updates(optimizer: MegatronOptimizer) -> int:
    """The number of updates of the optimizer on all ranks; one of them may have no trained parameter. Collective."""
    count = torch.tensor(max(adam_steps(optimizer), default=0.0), device=backend.device())
    distributed.all_reduce(count, distributed.ReduceOp.MAX)
    return int(count)


def prepare(optimizer: MegatronOptimizer, *, num_updates: int) -> None:
    """Creates all tensors that the optimizer has after this number of updates. The moments have no content yet."""
    for part in inner_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                state = part.optimizer.state[main]
                for name in _MOMENTS:
                    if name not in state:
                        state[name] = torch.empty_like(main)
                state["step"] = torch.tensor(float(num_updates))


def shards(model: GPTModel, weights: dict[str, Any], optimizer: MegatronOptimizer) -> list[ShardedTensor]:
    """This rank's part of the optimizer, to be written or read. `weights` is the sharded state of the model."""
    entries = {id(entry.data): entry for entry in nested_values(weights)}
    found = []
    for held in _held(model, optimizer):
        for whole, first in _wholes(entries[id(held.parameter)]):
            for name, tensor in held.tensors.items():
                found += _rectangles(whole, first, held, f"{PREFIX}state.{name}.{whole.key}", tensor)
    return found


def _held(model: GPTModel, optimizer: MegatronOptimizer) -> Iterator[_Held]:
    for part in inner_optimizers(optimizer):
        is_alone = isinstance(part, DistributedOptimizer)
        for parameter, start, main in _ranges(part) if is_alone else _originals(part, model):
            tensors = {name: part.optimizer.state[main][name] for name in _MOMENTS}
            if main.dtype != parameter.dtype:  # otherwise it is the model's own weight
                tensors[_ORIGINAL] = main
            yield _Held(parameter, start, tensors, is_alone)


def _ranges(part: DistributedOptimizer) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Yields each parameter of which this rank has values, the index of the first value, and the tensor that is updated.

    Megatron's own index of a parameter within its group is wrong where a group has parameters of two types.
    """
    pairs = (
        *zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True),
        *zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True),
    )
    for parameters, updated in pairs:
        for parameter, main in zip(parameters, updated, strict=True):
            yield parameter, part._get_model_param_range_map(parameter)["param"].start, main


def _originals(part: Any, model: GPTModel) -> Iterator[tuple[Tensor, int, Tensor]]:
    """Parameter, first value and updated tensor for an optimizer that is not divided: this rank has all values of each parameter."""
    parameters = {
        id(getattr(parameter, "main_param", parameter)): parameter for parameter in model.parameters()
    }
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            yield parameters[id(main)], 0, main


def _wholes(entry: ShardedTensor | ShardedTensorFactory) -> list[tuple[ShardedTensor, int]]:
    """The tensors as which a parameter is written, and the index in the flattened parameter at which each begins."""
    if isinstance(entry, ShardedTensor):
        return [(entry, 0)]
    # Views of a tensor without content show where the parts are.
    built: Any = replace(entry, data=torch.empty_like(entry.data, device="meta")).build()
    return [(whole, whole.data.storage_offset()) for whole in built]


def _rectangles(
    whole: ShardedTensor, first: int, held: _Held, key: str, tensor: Tensor
) -> Iterator[ShardedTensor]:
    """The part of `tensor` that belongs to `whole`, which begins at index `first` of the parameter."""
    values, shape = tensor.detach().view(-1), whole.local_shape
    assert isinstance(whole.replica_id, tuple), "one number for each kind of parallelism that copies"
    *pipeline_and_tensor, data = whole.replica_id
    begin = max(held.start, first)
    end = min(held.start + len(values), first + math.prod(shape))
    for offsets, sizes in rectangles(shape, begin - first, end - first):
        num_values = math.prod(sizes)
        yield replace(
            whole,
            key=key,
            data=values[begin - held.start :][:num_values].view(sizes),
            dtype=tensor.dtype,
            local_shape=sizes,
            global_offset=tuple(map(sum, zip(whole.global_offset, offsets, strict=True))),
            axis_fragmentations=None,  # the other pieces of the tensor have other sizes
            replica_id=(*pipeline_and_tensor, 0 if held.is_alone else data),
        )
        begin += num_values


def rectangles(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the rectangles that make up a range of the values of a flattened tensor, in its order."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    while begin < end:
        index, within = divmod(begin, row)
        if within or end - begin < row:
            stop = min(end, (index + 1) * row)
            for offsets, sizes in rectangles(shape[1:], within, within + stop - begin):
                yield (index, *offsets), (1, *sizes)
        else:
            num_rows = (end - begin) // row
            stop = begin + num_rows * row
            yield (index, *(0 for _ in shape[1:])), (num_rows, *shape[1:])
        begin = stop
