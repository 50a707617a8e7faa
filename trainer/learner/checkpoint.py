"""Checkpoints in Megatron's `torch_dist` format, exactly resumable, also under another parallel layout.

A checkpoint holds weights, optimizer state, random state, the number of steps taken and opaque bytes of the caller's. Three
things differ from Megatron's defaults:

Files are written by a thread of each rank, from copies on the host, while the next steps change the originals. Megatron would
start a manager process and a process per file, which costs seconds each time.

Every data-parallel replica writes a part of what all of them hold: parameters are distributed among them, and each rank writes its own part
of the optimizer's state according to `optimizer.shards`. So no rank gathers anything, and all hosts need the same memory.

Each layer and each expert has tensors of its own. Megatron stacks them into one tensor by default, and then compares the parts of thousands
of experts pair by pair whenever a checkpoint begins.
"""

import os
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.serialization import get_default_save_common_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync, WriteBucket
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, SerializationFormat, _write_item
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer.learner import backend, directories
from trainer.learner.optimizer import PREFIX, inner_optimizers, num_updates, prepare, shards
from trainer.learner.snapshots import HostTensors, keepers


class Saving:
    """A checkpoint whose files a thread of this rank is writing."""

    def __init__(self, directory: Path, planned: "_Planned", copies: HostTensors) -> None:
        """`copies` are the tensors that the thread writes."""
        self._directory = directory
        self._planned = planned
        self._copies = copies
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written = thread.submit(_write_buckets, planned.writer)
        thread.shutdown(wait=False)

    @property
    def is_written(self) -> bool:
        """Whether `finish` can return without waiting for the files of this rank."""
        return self._written.done()

    def finish(self) -> None:
        """Wait for the files of all ranks, write the metadata that makes them a checkpoint, and give the directory its name.

        Collective; call inside `backend.device_scope`. Raises OSError on every rank if one of them could not write its files; all files are
        then removed.
        """
        with directories.discarded_if_failed(self._directory):
            self._finish()

    def _finish(self) -> None:
        with backend.together():
            written = self._written.result()
        everywhere = backend.all_gathered(written)
        with backend.together():
            if distributed.get_rank() == 0:
                partial = directories.partial_of(self._directory)
                self._planned.writer.finish(self._planned.metadata, everywhere)
                save_config(CheckpointingConfig(_FORMAT, _FORMAT_VERSION), str(partial))
                directories.sync_files(partial)
                directories.commit(self._directory)


_FORMAT, _FORMAT_VERSION = "torch_dist", 1


@dataclass(frozen=True, slots=True)
class _Planned:
    writer: FileSystemWriterAsync  # prepared with the data that this rank writes
    metadata: Any  # metadata of all tensors; only rank 0 has it


class _Planner(TorchDistSaveShardedStrategy):
    """Megatron's strategy for saving, with one file per rank. It is used for the plan only; we write the files ourselves."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, _FORMAT_VERSION, thread_count=1)

    def plan(self, sharded: dict[str, Any], directory: Path) -> _Planned:
        """Plans the data that each rank writes. Collective."""
        filesystem_async._results_queue = queue.Queue()  # otherwise Megatron starts a manager process for one
        self.async_save(sharded, directory)
        return self._planned

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: Any
    ) -> AsyncRequest:
        _, metadata, _ = save_state_dict_ret
        self._planned = _Planned(writer, metadata)
        return AsyncRequest(async_fn=None, async_fn_args=(), finalize_fns=[])


def _write_buckets(writer: FileSystemWriterAsync) -> list[Any]:
    """Writes the files of this rank; returns their entries for the metadata."""
    return [written for bucket in writer.write_buckets or () for written in _write_bucket(writer, bucket)]


def _write_bucket(writer: FileSystemWriterAsync, bucket: WriteBucket) -> list[Any]:
    path, key, (objects, tensors) = bucket
    with directories.writing(Path(path)), open(path, "wb") as file:
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


def begin_checkpoint(
    directory: Path, model: GPTModel, optimizer: MegatronOptimizer | None, *, steps: int, extra: bytes
) -> Saving:
    """Begin to write a directory that appears complete or not at all. Collective; call inside `backend.device_scope`.

    On return the content is fixed: later changes are not in the checkpoint. Before the first step the optimizer
    has no state, so none is written.
    """
    with directories.discarded_if_failed(directory):
        return _begin(directory, model, optimizer, steps=steps, extra=extra)


def _begin(
    directory: Path, model: GPTModel, optimizer: MegatronOptimizer | None, *, steps: int, extra: bytes
) -> Saving:
    partial = directories.partial_of(directory)
    with backend.together():
        if distributed.get_rank() == 0:
            directories.begin(directory)
    state: dict[str, Any] = {
        "steps": steps,
        "extra": torch.from_numpy(np.frombuffer(extra, np.uint8).copy()),
        "rng": torch.get_rng_state(),
        "updates": num_updates(optimizer) if optimizer is not None and steps else 0,
    }
    with backend.together():
        directories.wait_for(partial)
        state["model"] = weights = _dealt_out(model.sharded_state_dict(metadata=_metadata()), model)
        if optimizer is not None and steps:
            state["optimizer"] = dict(enumerate(shards(model, weights, optimizer)))
        copies = _moved_to_host(state)
        sharded, common = extract_sharded_base(state)
        get_default_save_common_strategy().save_common(common, str(partial))
    return Saving(directory, _Planner().plan(sharded, partial), copies)


def _dealt_out(weights: dict[str, Any], model: GPTModel) -> dict[str, Any]:
    """`weights`, with the parameters distributed among the data-parallel ranks that hold them, so that one rank writes each."""
    parameters = dict(model.named_parameters())
    keeper_of = {id(parameters[name]): rank for name, rank in keepers(parameters).items()}
    for entry in nested_values(weights):
        if id(entry.data) in keeper_of:
            is_other = keeper_of[id(entry.data)] != distributed.get_rank()
            entry.replica_id = (*entry.replica_id[:2], int(is_other))
    return weights


def _moved_to_host(state: dict[str, Any]) -> HostTensors:
    """Replaces everything in `state` that this rank writes by copies, which later steps do not change."""
    apply_factories(state)
    written = [
        value
        for value in nested_values(state)
        if isinstance(value, ShardedTensor) and is_main_replica(value.replica_id)
    ]
    copies = HostTensors.of([value.data for value in written if value.data is not None])
    for value, copy in zip(written, copies.tensors, strict=True):
        value.data = copy
    return copies


def read_checkpoint(directory: Path, model: GPTModel, optimizer: MegatronOptimizer) -> tuple[int, bytes]:
    """Restore model, optimizer and random state; return the steps taken and the caller's bytes.

    Collective; call inside `backend.device_scope`. Raises ValueError for a checkpoint of weights of another type.
    """
    written, present = weights_dtype_in(directory), next(model.parameters()).dtype
    if written != present:
        raise ValueError(
            f"{directory} holds weights in {written} and this run has them in {present}: set learner.dtype as it was"
        )
    common = dist_checkpointing.load_common_state_dict(str(directory))
    weights = model.sharded_state_dict(metadata=_metadata())
    state: dict[str, Any] = {"model": weights}
    if common["steps"]:
        prepare(optimizer, num_updates=common["updates"])
        state["optimizer"] = dict(enumerate(shards(model, weights, optimizer)))
    _read(directory, state)
    if not common["steps"]:
        for part in inner_optimizers(optimizer):
            part.optimizer.state.clear()
        optimizer.reload_model_params()
    torch.set_rng_state(common["rng"])
    return common["steps"], common["extra"].numpy().tobytes()


def read_weights(directory: Path, model: GPTModel) -> None:
    """Load only the weights of a checkpoint into the model. Collective; call inside `backend.device_scope`.

    Raises ValueError if the checkpoint holds another model.
    """
    sharded = model.sharded_state_dict(metadata=_metadata())
    apply_factories(sharded)
    expected: set[str] = set()
    for stage in backend.all_gathered(
        [value.key for value in nested_values(sharded) if hasattr(value, "key")]
    ):
        expected.update(stage)
    for name in sorted(_weights_in(directory).keys() - expected):
        raise ValueError(
            f"{directory} holds {name}, which the model lacks: give the model that was trained; of a run that trained LoRA "
            "adapters, take published weights, which have them merged, or convert published adapters"
        )
    try:
        _read(directory, {"model": sharded})
    except (CheckpointingException, CheckpointException) as error:
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise ValueError(
            f"{directory} does not hold the weights of this model ({cause}): give the model that was trained"
        ) from error


def weights_dtype_in(directory: Path) -> torch.dtype:
    """The type of a checkpoint's weights, of which some may be in fp32. Raises ValueError if the directory contains no checkpoint."""
    return min(_weights_in(directory).values(), key=lambda dtype: dtype.itemsize)


def _weights_in(directory: Path) -> dict[str, torch.dtype]:
    try:
        dist_checkpointing.load_common_state_dict(str(directory))
    except CheckpointingException as error:
        raise ValueError(f"{directory} is not a checkpoint: {error}") from error
    found = FileSystemReader(directory).read_metadata().state_dict_metadata
    return {
        name: value.properties.dtype
        for name, value in found.items()
        if isinstance(value, TensorStorageMetadata) and not name.startswith(PREFIX)
    }


def _read(directory: Path, state: dict[str, Any]) -> None:
    """Reads a checkpoint directly into the tensors of `state`: no rank holds a second copy of more than one of them."""
    apply_factories(state)  # Megatron would join the parts of a weight again, in a tensor of their own
    with backend.patient():
        dist_checkpointing.load(state, str(directory), validate_access_integrity=False)


def _metadata() -> dict[str, Any]:
    """The settings with which Megatron must shard the state so that other layouts can read it."""
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        # Each layer and expert has tensors of its own.
        "singleton_local_shards": True,
    }
