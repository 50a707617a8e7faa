"""Checkpoints in Megatron's `torch_dist` format, exactly resumable, also under another parallel layout.

A checkpoint holds weights, optimizer state, random state, the number of steps taken and opaque bytes of the caller's. Two
things differ from Megatron's defaults:

Files are written by a thread of each rank, from copies on the host, while the next steps change the originals. Megatron would
start a manager process and a process per file, which costs seconds each time.

megatron-core 0.16.1 loses Adam's step count when DistributedOptimizer wraps torch's AdamW (no TransformerEngine or Apex):
a fresh optimizer has no step to load into, the load then looks for a step among the sharded tensors, and what it finally
restores is one tensor shared by all parameters, which each of them then increments. `_StepKeeper` works around all three.
"""

import os
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_finalize
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _write_item

from trainer.learner import backend, directories
from trainer.learner.optimizer import inner_optimizers

_OPTIMIZER_PREFIX = "optimizer."
"""The names of the optimizer's tensors in a checkpoint begin with it."""


class Saving:
    """A checkpoint whose files a thread of this rank is writing."""

    def __init__(self, directory: Path, request: AsyncRequest) -> None:
        self._directory = directory
        self._finalize: list[Callable[[], None]] = request.finalize_fns
        assert request.async_fn is not None
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written = thread.submit(request.async_fn, *request.async_fn_args)
        thread.shutdown(wait=False)

    @property
    def is_written(self) -> bool:
        """Whether `finish` need not wait for the files of this rank."""
        return self._written.done()

    def finish(self) -> None:
        """Wait for the files of all ranks, write what makes them a checkpoint, and give the directory its name.

        Collective; call inside `backend.device_scope`. Raises OSError on every rank if one of them could not write its files.
        """
        self._written.result()
        try:
            for finalize in self._finalize:
                finalize()
        except CheckpointException as error:
            causes = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items())
            raise OSError(f"a checkpoint could not be written: {causes or 'rank 0 knows why'}") from error
        if distributed.get_rank() == 0:
            directories.sync_files(directories.partial_of(self._directory))
            directories.commit(self._directory)
        distributed.barrier()


class _ThreadedSave(TorchDistSaveShardedStrategy):
    """The `torch_dist` format, one file per rank, written by a thread from copies on the host."""

    def __init__(self, *, owns_optimizer: bool) -> None:
        """`owns_optimizer`: the optimizer's state was gathered for the checkpoint, so no update changes what is written."""
        super().__init__("torch_dist", 1, thread_count=1)
        self._owns_optimizer = owns_optimizer

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> AsyncRequest:
        """As Megatron does, except that results come through a queue of this process instead of a manager process's."""
        filesystem_async._results_queue = queue.Queue()
        return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: Any
    ) -> AsyncRequest:
        _copy_to_host(writer, owns_optimizer=self._owns_optimizer)
        return AsyncRequest(
            async_fn=_write_buckets,
            async_fn_args=(writer,),
            finalize_fns=[lambda: save_state_dict_async_finalize(*save_state_dict_ret)],
        )


def _copy_to_host(writer: FileSystemWriterAsync, *, owns_optimizer: bool) -> None:
    """Let the writer hold copies of everything that the next steps change."""
    buckets = []
    for path, key, (objects, tensors) in writer.write_buckets or ():
        used = [
            (item, tensor)
            for item, tensor in tensors
            if not (owns_optimizer and item.index.fqn.startswith(_OPTIMIZER_PREFIX))
        ]
        copies = backend.host_copies([tensor for _, tensor in used])
        copy_of = {id(item): copy for (item, _), copy in zip(used, copies, strict=True)}
        data = [(item, copy_of.get(id(item), tensor)) for item, tensor in tensors]
        buckets.append((path, key, (objects, data)))
    writer.write_buckets = buckets


def _write_buckets(writer: FileSystemWriterAsync) -> None:
    """Write the files of this rank, and leave with the writer what became of them."""
    if not writer.write_buckets:
        return
    assert writer.results_queue is not None, "set by async_save"
    try:
        results = {
            number: _write_bucket(writer, bucket) for number, bucket in enumerate(writer.write_buckets)
        }
    except (OSError, RuntimeError) as error:  # torch reports some failures of a file as RuntimeError
        writer.results_queue.put(error)
    else:
        writer.results_queue.put(results)


def _write_bucket(writer: FileSystemWriterAsync, bucket: WriteBucket) -> list[Any]:
    path, key, (objects, tensors) = bucket
    with open(path, "wb") as file:
        written = [
            _write_item(
                writer.transforms,
                file,
                data,
                item,
                key,
                serialization_format=SerializationFormat.TORCH_SAVE,
            )
            for item, data in (*objects, *tensors)
        ]
        file.flush()
        os.fsync(file.fileno())
    return written


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


def begin_checkpoint(
    directory: Path, model: GPTModel, optimizer: MegatronOptimizer | None, *, steps: int, extra: bytes
) -> Saving:
    """Begin to write a directory that appears whole or not at all. Collective; call inside `backend.device_scope`.

    On return the content is fixed: what changes from then on is not in the checkpoint. Before the first step the optimizer
    has no state, so none is written; without an optimizer the checkpoint may be read with either kind.
    """
    if distributed.get_rank() == 0:
        directories.begin(directory)
    distributed.barrier()
    is_distributed = None if optimizer is None else _is_distributed(optimizer)
    weights = model.sharded_state_dict(metadata=_metadata(optimizer))
    state: dict[str, Any] = {
        "model": weights,
        "steps": steps,
        "extra": torch.from_numpy(np.frombuffer(extra, np.uint8).copy()),
        "rng": torch.get_rng_state(),
        "distributed_optimizer": is_distributed,
    }
    if optimizer is not None and steps:
        state["optimizer"] = optimizer.sharded_state_dict(weights, metadata=_metadata(optimizer))
    partial = directories.partial_of(directory)
    strategy = _ThreadedSave(owns_optimizer=bool(is_distributed))
    request = dist_checkpointing.save(state, str(partial), strategy, async_sharded_save=True)
    assert request is not None, "of an asynchronous save"
    return Saving(directory, request)


def read_checkpoint(directory: Path, model: GPTModel, optimizer: MegatronOptimizer) -> tuple[int, bytes]:
    """Restore model, optimizer and random state; return the steps taken and the caller's bytes.

    Collective; call inside `backend.device_scope`. Raises ValueError for a checkpoint written with the other kind of
    optimizer.
    """
    common = dist_checkpointing.load_common_state_dict(str(directory))
    if common["distributed_optimizer"] not in (None, _is_distributed(optimizer)):
        raise ValueError(
            f"{directory} was written with learner.distributed_optimizer = "
            f"{str(common['distributed_optimizer']).lower()}: set it so to resume from there"
        )
    if common["steps"]:
        _read_both(directory, model, optimizer)
    else:
        _read_model(directory, model)
        for part in inner_optimizers(optimizer):
            part.optimizer.state.clear()
        optimizer.reload_model_params()
    torch.set_rng_state(common["rng"])
    distributed.barrier()
    return common["steps"], common["extra"].numpy().tobytes()


def read_weights(directory: Path, model: GPTModel) -> None:
    """Give the model the weights of a checkpoint, and nothing else of it. Collective; call inside `backend.device_scope`.

    Raises ValueError if the checkpoint holds another model.
    """
    sharded = model.sharded_state_dict(metadata=_metadata(None))
    expected: set[str] = set()
    for stage in _all_gathered([value.key for value in nested_values(sharded) if hasattr(value, "key")]):
        expected.update(stage)
    for name in sorted(_weights_in(directory).keys() - expected):
        raise ValueError(
            f"{directory} holds {name}, which the model lacks: give the model that was trained; of a run that trained LoRA "
            "adapters, take published weights, which have them merged"
        )
    try:
        _read_model(directory, model)
    except (CheckpointingException, CheckpointException) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise ValueError(
            f"{directory} does not hold the weights of this model ({cause}): give the model that was trained"
        ) from error


def weights_dtype_in(directory: Path) -> torch.dtype:
    """The type of the weights of a checkpoint. Raises ValueError if the directory holds none."""
    return next(iter(_weights_in(directory).values()))


def _weights_in(directory: Path) -> dict[str, torch.dtype]:
    try:
        found = dist_checkpointing.load_tensors_metadata(str(directory))
    except CheckpointingException as error:
        raise ValueError(f"{directory} is no checkpoint: {error}") from error
    return {
        name: value.dtype
        for name, value in found.items()
        if isinstance(value, ShardedTensor) and not name.startswith(_OPTIMIZER_PREFIX)
    }


def _read_model(directory: Path, model: GPTModel) -> None:
    model.load_state_dict(
        _load({"model": model.sharded_state_dict(metadata=_metadata(None))}, directory)["model"]
    )


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


def _metadata(optimizer: MegatronOptimizer | None) -> dict[str, Any]:
    """How Megatron must shard the state so that other layouts can read it."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    if optimizer is not None and _is_distributed(optimizer):
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        # Only the first data-parallel rank gathers the optimizer's state when it is written; otherwise all of them would.
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = True
    return metadata


def _is_distributed(optimizer: MegatronOptimizer) -> bool:
    return any(isinstance(part, DistributedOptimizer) for part in inner_optimizers(optimizer))


def _all_gathered(own: list[str]) -> list[list[str]]:
    everywhere: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everywhere, own)
    return everywhere
