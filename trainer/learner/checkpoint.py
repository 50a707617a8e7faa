"""Megatron distributed checkpoints of everything a run needs to go on as if it had never stopped.

A checkpoint holds model, optimizer, random state, the number of steps taken and an opaque blob of the
caller's; it may be read under another parallel layout than it was written under. Two things differ from
Megatron's defaults:

Writing happens in this process. Megatron starts a manager process, then one process per file, to write in the
background; for a synchronous save that only costs seconds of start-up.

megatron-core 0.16.1 loses Adam's step when DistributedOptimizer wraps torch's AdamW (no TransformerEngine or
Apex): a fresh optimizer has no step to load into, the load then looks for a step among the sharded tensors,
and what it finally restores is one tensor shared by all parameters, which each of them then increments.
`_StepKeeper` mends the three.
"""

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_finalize
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, distributed


class InProcessSave(TorchDistSaveShardedStrategy):
    """The `torch_dist` format, written by the calling process: one file per rank, no process started."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> AsyncRequest:
        """Megatron's, but results return through a queue of this process, not of a manager's."""
        filesystem_async._results_queue = queue.Queue()
        return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: Any
    ) -> AsyncRequest:
        return AsyncRequest(
            async_fn=_write_buckets,
            async_fn_args=(writer,),
            finalize_fns=[lambda: save_state_dict_async_finalize(*save_state_dict_ret)],
        )


def _write_buckets(writer: FileSystemWriterAsync) -> None:
    if not writer.write_buckets:
        return
    results: queue.Queue[tuple[int, Any]] = queue.Queue()
    pending: queue.Queue[int] = queue.Queue()
    for number, bucket in enumerate(
        FileSystemWriterAsync.preload_tensors(writer.write_buckets, non_blocking=False)
    ):
        pending.put(number)
        FileSystemWriterAsync.write_preloaded_data(
            [writer.transforms], number, bucket, results, pending, use_fsync=True
        )
    written = dict(results.get_nowait() for _ in writer.write_buckets)
    failure = next((result for result in written.values() if isinstance(result, Exception)), None)
    writer.results_queue.put(failure or written)


class _StepKeeper:
    """Carries Adam's step through a load of DistributedOptimizer around a torch optimizer."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._distributed = [part for part in _parts(optimizer) if isinstance(part, DistributedOptimizer)]

    def prepare(self) -> None:
        """Before the load: give a fresh optimizer its steps, and keep it from asking the shards for them."""
        for part in self._distributed:
            part.init_state_fn(part.optimizer, part.config)
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))
            part._set_main_param_and_optimizer_states = _with_own_step(part)

    def finish(self) -> None:
        """After the load: every parameter counts its own steps again."""
        for part in self._distributed:
            del part._set_main_param_and_optimizer_states
            for state in part.optimizer.state.values():
                state["step"] = state["step"].clone()


def _with_own_step(part: DistributedOptimizer) -> Callable[[Tensor, dict[str, Tensor]], None]:
    assign = part._set_main_param_and_optimizer_states

    def assign_with_step(parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        group, place = part.model_param_group_index_map[parameter]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        assign(parameter, {**tensors, "step": state["step"]})

    return assign_with_step


def adam_steps(optimizer: MegatronOptimizer) -> list[float]:
    """How often each parameter of this rank has been updated."""
    return [float(state["step"]) for part in _parts(optimizer) for state in part.optimizer.state.values()]


def write_checkpoint(
    directory: Path, model: GPTModel, optimizer: MegatronOptimizer, *, steps: int, extra: bytes
) -> None:
    """Write into an existing, empty directory. Collective; call inside `backend.device_scope`.

    Before the first step the optimizer has no state, and none is written.
    """
    weights = model.sharded_state_dict(metadata=_metadata(optimizer))
    state: dict[str, Any] = {
        "model": weights,
        "steps": steps,
        "extra": torch.from_numpy(np.frombuffer(extra, np.uint8).copy()),
        "rng": torch.get_rng_state(),
        "distributed_optimizer": _is_distributed(optimizer),
    }
    if steps:
        state["optimizer"] = optimizer.sharded_state_dict(weights, metadata=_metadata(optimizer))
    dist_checkpointing.save(state, str(directory), InProcessSave())


def read_checkpoint(directory: Path, model: GPTModel, optimizer: MegatronOptimizer) -> tuple[int, bytes]:
    """Restore model, optimizer and random state; return steps taken and the caller's blob. Collective, as
    above.

    Raises ValueError for a checkpoint written with the other kind of optimizer.
    """
    common = dist_checkpointing.load_common_state_dict(str(directory))
    if common["distributed_optimizer"] != _is_distributed(optimizer):
        raise ValueError(
            f"{directory} was written with learner.distributed_optimizer = "
            f"{str(common['distributed_optimizer']).lower()}: set it so to resume from there"
        )
    if common["steps"]:
        _read_both(directory, model, optimizer)
    else:
        weights = {"model": model.sharded_state_dict(metadata=_metadata(optimizer))}
        model.load_state_dict(dist_checkpointing.load(weights, str(directory))["model"])
        for part in _parts(optimizer):
            part.optimizer.state.clear()
        optimizer.reload_model_params()
    torch.set_rng_state(common["rng"])
    distributed.barrier()
    return common["steps"], common["extra"].numpy().tobytes()


def _read_both(directory: Path, model: GPTModel, optimizer: MegatronOptimizer) -> None:
    steps = _StepKeeper(optimizer)
    steps.prepare()
    weights = model.sharded_state_dict(metadata=_metadata(optimizer))
    moments = optimizer.sharded_state_dict(weights, is_loading=True, metadata=_metadata(optimizer))
    state = dist_checkpointing.load({"model": weights, "optimizer": moments}, str(directory))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    steps.finish()


def _metadata(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """How Megatron is to shard: always in the form that other layouts can read."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    if _is_distributed(optimizer):
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
    return metadata


def _is_distributed(optimizer: MegatronOptimizer) -> bool:
    return any(isinstance(part, DistributedOptimizer) for part in _parts(optimizer))


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    return cast(list[Any], getattr(optimizer, "chained_optimizers", [optimizer]))
