"""Checkpoints in Megatron's `torch_dist` format, exactly resumable, also under another parallel layout.

A checkpoint holds weights, optimizer state, random state, the number of steps taken and opaque bytes of the caller's. Two
things differ from Megatron's defaults:

Writing happens in this process. To write in the background, Megatron starts a manager process and one process per file; for
a synchronous save that only costs seconds of start-up.

megatron-core 0.16.1 loses Adam's step count when DistributedOptimizer wraps torch's AdamW (no TransformerEngine or Apex):
a fresh optimizer has no step to load into, the load then looks for a step among the sharded tensors, and what it finally
restores is one tensor shared by all parameters, which each of them then increments. `_StepKeeper` works around all three.
"""

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

from trainer.learner.optimizer import inner_optimizers


class InProcessSave(TorchDistSaveShardedStrategy):
    """The `torch_dist` format, written by the calling process: one file per rank, no process started."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> AsyncRequest:
        """As Megatron does, except that results come through a queue of this process instead of a manager process's."""
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
    # Megatron declares queues between processes here, and needs no more than this.
    results: Any = queue.Queue()
    pending: Any = queue.Queue()
    for number, bucket in enumerate(
        FileSystemWriterAsync.preload_tensors(writer.write_buckets, non_blocking=False)
    ):
        pending.put(number)
        FileSystemWriterAsync.write_preloaded_data(
            [writer.transforms], number, bucket, results, pending, use_fsync=True
        )
    written = dict(results.get_nowait() for _ in writer.write_buckets)
    failure = next((result for result in written.values() if isinstance(result, Exception)), None)
    assert writer.results_queue is not None, "set by async_save"
    writer.results_queue.put(failure or written)


_ASSIGN = "_set_main_param_and_optimizer_states"
"""The method of DistributedOptimizer that a load assigns one parameter's state with; replaced during the load."""


class _StepKeeper:
    """Keeps Adam's step count through a load of DistributedOptimizer around a torch optimizer."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._distributed = [
            part for part in inner_optimizers(optimizer) if isinstance(part, DistributedOptimizer)
        ]

    def prepare(self) -> None:
        """Before the load: give a fresh optimizer its step counts, and keep it from looking for them among the shards."""
        for part in self._distributed:
            part.init_state_fn(part.optimizer, part.config)
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))
            setattr(part, _ASSIGN, _with_own_step(part))

    def finish(self) -> None:
        """After the load: give every parameter a step count of its own again."""
        for part in self._distributed:
            delattr(part, _ASSIGN)
            for state in part.optimizer.state.values():
                state["step"] = state["step"].clone()


def _with_own_step(part: DistributedOptimizer) -> Callable[[Tensor, dict[str, Tensor]], None]:
    assign = part._set_main_param_and_optimizer_states

    def assign_with_step(parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        group, place = part.model_param_group_index_map[parameter]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][place]]
        assign(parameter, {**tensors, "step": state["step"]})

    return assign_with_step


def write_checkpoint(
    directory: Path, model: GPTModel, optimizer: MegatronOptimizer, *, steps: int, extra: bytes
) -> None:
    """Write into an existing, empty directory. Collective; call inside `backend.device_scope`.

    Before the first step the optimizer has no state, so none is written.
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
    """Restore model, optimizer and random state; return the steps taken and the caller's bytes.

    Collective; call inside `backend.device_scope`. Raises ValueError for a checkpoint written with the other kind of
    optimizer.
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
        model.load_state_dict(
            _load({"model": model.sharded_state_dict(metadata=_metadata(optimizer))}, directory)["model"]
        )
        for part in inner_optimizers(optimizer):
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
    state = _load({"model": weights, "optimizer": moments}, directory)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    steps.finish()


def _load(sharded: dict[str, Any], directory: Path) -> dict[str, Any]:
    loaded = dist_checkpointing.load(sharded, str(directory))
    assert isinstance(loaded, dict), "a tuple only where missing keys are to be reported"
    return loaded


def _metadata(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """How Megatron must shard the state so that other layouts can read it."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    if _is_distributed(optimizer):
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
    return metadata


def _is_distributed(optimizer: MegatronOptimizer) -> bool:
    return any(isinstance(part, DistributedOptimizer) for part in inner_optimizers(optimizer))
