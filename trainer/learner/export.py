"""Writes the weights of a Megatron model as a Hugging Face directory, all ranks at once, and converts such a directory to a Megatron
checkpoint and back.

Each parameter has one writer: a rank of one of the tensor-parallel groups that hold it, or for an expert, a rank that holds it.
Its parts are gathered only there, one parameter at a time; the writer moves the joined tensor to its host and
appends it to a safetensors file of its own. So each byte is moved to a host once, and no host holds more than one tensor. The
writers are chosen so that all ranks write about the same number of bytes. Rank 0 also writes the index, the config and the
tokenizer.

The directory is on a file system that all ranks share.

A conversion has no optimizer, and each rank holds only its part of the model. A checkpoint can be read under another layout than it
was written in.
"""

import functools
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor, distributed

from pipeline.model_config import LANGUAGE_TABLES
from trainer.learner import backend, checkpoint, directories, hf
from trainer.learner.architecture import Architecture
from trainer.learner.config import LearnerConfig
from trainer.learner.families.registry import FAMILIES, read_architecture
from trainer.learner.hf import DTYPES, INDEX_FILE, SINGLE_FILE
from trainer.learner.lora import SUFFIX, adapters
from trainer.learner.model import build_model, keep_in_fp32
from trainer.learner.parameters import Parameter

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.float8_e4m3fn: "F8_E4M3"}
_HEADER_ALIGNMENT = 8


def write_safetensors(path: Path, announced: Mapping[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Write `tensors`, which are on the host, and force the file to disk.

    `announced` gives their names, in the same order, with tensors of the same shapes and types, which may be on the meta
    device. Larger types come first, so that each tensor is aligned.
    """
    with path.open("wb") as file:
        file.write(_header(announced))
        for (name, like), tensor in zip(announced.items(), tensors, strict=True):
            assert (tensor.shape, tensor.dtype) == (like.shape, like.dtype), name
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _header(announced: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in announced.items():
        assert end % tensor.itemsize == 0, name
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    encoded = msgspec.json.encode(entries)
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded


SHARD_BYTES = 4 << 30
"""The size at which a rank begins another file."""

COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model")
"""The files of tokenizer, chat template and generation defaults end in one of these."""

_Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of one parameter that is to be written."""

    # the names of the tensors that it becomes
    names: _Names
    # a tensor of this rank's shape and type
    like: Tensor
    # reads the values when the part is written
    read: Callable[[], Tensor]
    # the ranks that hold it: those of the tensor-parallel group, or for a tensor that has all experts, of the expert-parallel group
    group: distributed.ProcessGroup
    # whether they divide it; otherwise each of them holds the whole
    is_divided: bool
    # makes the tensors of `names` from the parts of all ranks of the group, in order, or from a list of the whole tensor alone
    join: Callable[[list[Tensor]], list[Tensor]]

    def announce(self) -> list[Tensor]:
        """The joined tensors, without content."""
        num_parts = self.group.size() if self.is_divided else 1
        return self.join([torch.empty_like(self.like, device="meta") for _ in range(num_parts)])


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    writer: int
    parts: tuple[_Names, ...]


def weight_parts(model: GPTModel, architecture: Architecture, *, merges: bool = True) -> list[Part]:
    """All weights that this rank holds; with `merges`, the adapters are added to those that they change."""
    table, adapted = hf.parameters(model, architecture), dict(adapters(model)) if merges else {}
    parts, of_all = [], dict[str, list[tuple[Parameter, Tensor]]]()
    for name, values in hf.weights(model):
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            continue  # the first stage holds the same matrix
        if SUFFIX in name:
            continue  # merged into the weight that it changes, or written by itself
        parameter, adapter = table[name], adapted.get(name)
        if parameter.is_of_all:
            of_all.setdefault(parameter.origins[0], []).append((parameter, values))
            continue
        parts.append(
            Part(
                names=parameter.origins,
                like=values,
                read=values.detach if adapter is None else functools.partial(adapter.merged, values),
                group=backend.tensor_parallel_group(),
                is_divided=parameter.is_divided,
                join=lambda pieces, parameter=parameter: hf.join(parameter, pieces, architecture),
            )
        )
    return [*parts, *(_part_of_all(held, architecture) for held in of_all.values())]


def _part_of_all(held: list[tuple[Parameter, Tensor]], architecture: Architecture) -> Part:
    """The part of a tensor that holds all experts of a layer: the parameters of this rank's experts, in order."""
    parameter, tensors = held[0][0], [values for _, values in held]
    return Part(
        names=parameter.origins,
        like=tensors[0].new_empty((len(tensors), *tensors[0].shape), device="meta"),
        read=lambda: torch.stack([values.detach() for values in tensors]),
        group=backend.expert_parallel_group(),
        is_divided=True,
        join=lambda pieces: hf.join(parameter, pieces, architecture),
    )


def carried_parts(architecture: Architecture, source: Path) -> list[Part]:
    """The tensors of `source` that are not trained and are written as they are, such as those of a vision tower.

    Each is read when it is written, by the first tensor-parallel rank of one of the groups.
    """
    prefixes = FAMILIES[architecture.family].carried_prefixes
    if not prefixes or parallel_state.get_tensor_model_parallel_rank() != 0:
        return []
    tensors = hf.SafetensorsDirectory(source)
    return [
        Part(
            names=(name,),
            like=tensors.announced(name),
            read=functools.partial(tensors.__getitem__, name),
            group=backend.tensor_parallel_group(),
            is_divided=False,
            join=lambda pieces: pieces,
        )
        for name in tensors
        if name.startswith(prefixes)
    ]


class Exporter:
    """Writes the same parameters whenever it is called, with their present values. Every rank builds one."""

    def __init__(self, parts: Sequence[Part], *, describe: Callable[[Path], None]) -> None:
        """`describe` writes the config and tokenizer into a directory; rank 0 calls it."""
        # Larger types come first, as `write_safetensors` requires.
        self._parts = sorted(parts, key=lambda part: -max(one.itemsize for one in part.announce()))
        self._describe = describe
        self._plan: list[_File] | None = None
        self._num_bytes = 0

    @torch.no_grad()
    def write(self, directory: Path) -> None:
        """Writes the directory. Collective. It appears complete or not at all; an OSError of one rank is raised on all of them."""
        if self._plan is None:
            self._plan, self._num_bytes = _plan(self._parts)
        with directories.discarded_if_failed(directory):
            self._write_agreed(directory, self._plan)

    def _write_agreed(self, directory: Path, plan: list[_File]) -> None:
        rank, partial = distributed.get_rank(), directories.partial_of(directory)
        with backend.together():
            if rank == 0:
                directories.begin(directory)
        with backend.together():
            directories.wait_for(partial)
        failure = self._write_own(partial, plan)
        if rank == 0 and failure is None:
            failure = self._write_rest(partial, plan)
        backend.agree(failure)
        with backend.together():
            if rank == 0:
                directories.commit(directory)

    def _write_own(self, partial: Path, plan: list[_File]) -> Exception | None:
        """Write the files of this rank, and send the others what they need for theirs."""
        writers = {names: file.writer for file in plan for names in file.parts}
        by_names = {part.names: part for part in self._parts}
        tensors = self._joined(writers)
        try:
            for file in plan:
                if file.writer == distributed.get_rank():
                    announced = {
                        name: tensor
                        for names in file.parts
                        for name, tensor in zip(names, by_names[names].announce(), strict=True)
                    }
                    with directories.writing(partial / file.name):
                        write_safetensors(partial / file.name, announced, islice(tensors, len(announced)))
        except (OSError, MemoryError, RuntimeError) as error:  # torch's errors are RuntimeErrors
            return error
        finally:
            for _ in tensors:  # a writer in the same group may still need parts of this rank
                pass
        return None

    def _joined(self, writers: dict[_Names, int]) -> Iterator[Tensor]:
        """The tensors that this rank writes, on the host. In between, it takes part in gathering those of its groups."""
        for part in self._parts:
            writer = writers[part.names]
            if writer not in distributed.get_process_group_ranks(part.group):
                continue
            pieces = _gather(part, writer)
            if writer == distributed.get_rank():
                yield from (to_host(tensor) for tensor in part.join(pieces))

    def _write_rest(self, partial: Path, plan: list[_File]) -> Exception | None:
        weight_map = {name: file.name for file in plan for names in file.parts for name in names}
        try:
            with directories.writing(partial):
                if len(plan) > 1:
                    index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
                    (partial / INDEX_FILE).write_bytes(msgspec.json.encode(index))
                self._describe(partial)
        except (OSError, MemoryError, RuntimeError) as error:  # torch's errors are RuntimeErrors
            return error
        return None


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the host. Every byte of an export passes through here."""
    return tensor.cpu()


def _gather(part: Part, writer: int) -> list[Tensor]:
    """The pieces of a parameter, on the writer's device; on other ranks the result has no meaning."""
    own, group = part.read().contiguous(), part.group
    if not part.is_divided or group.size() == 1:
        return [own]
    pieces = (
        [torch.empty_like(own) for _ in range(group.size())] if writer == distributed.get_rank() else None
    )
    distributed.gather(own, pieces, dst=writer, group=group)
    return pieces or []


def _plan(parts: Sequence[Part]) -> tuple[list[_File], int]:
    """The assignment of tensors to ranks and files, the same on every rank, and the total number of bytes. Collective."""
    held = {part.names: sum(tensor.nbytes for tensor in part.announce()) for part in parts}
    everywhere: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everywhere, held)
    held_by: dict[int, dict[_Names, int]] = dict(enumerate(everywhere))
    sizes: dict[_Names, int] = {names: size for held in held_by.values() for names, size in held.items()}
    writers = writers_of(held_by)
    shards: list[tuple[int, list[_Names]]] = []
    for rank in sorted(held_by):
        own = [names for names in held_by[rank] if writers[names] == rank]
        shards += [(rank, shard) for shard in _split(own, sizes)]
    files = [
        _File(_file_name(number, len(shards)), rank, tuple(shard))
        for number, (rank, shard) in enumerate(shards, 1)
    ]
    return files, sum(sizes.values())


def writers_of(held_by: dict[int, dict[_Names, int]]) -> dict[_Names, int]:
    """Chooses, for each parameter, which of the ranks that hold it writes it.

    The largest are assigned first, each to the rank with the fewest bytes so far.
    """
    holders: dict[tuple[int, _Names], list[int]] = defaultdict(list)
    for rank in sorted(held_by):
        for names, size in held_by[rank].items():
            holders[size, names].append(rank)
    assigned_bytes: Counter[int] = Counter()
    writers: dict[_Names, int] = {}
    for (size, names), ranks in sorted(holders.items(), reverse=True):
        writer = min(ranks, key=lambda rank: (assigned_bytes[rank], rank))
        writers[names] = writer
        assigned_bytes[writer] += size
    return writers


def _split(own: list[_Names], sizes: dict[_Names, int]) -> Iterator[list[_Names]]:
    shard: list[_Names] = []
    shard_bytes = 0
    for names in own:
        if shard and shard_bytes + sizes[names] > SHARD_BYTES:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(names)
        shard_bytes += sizes[names]
    if shard:
        yield shard


def _file_name(number: int, of: int) -> str:
    return SINGLE_FILE if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"


def copy_description(source: Path, directory: Path, dtype: torch.dtype, *, is_packed: bool = False) -> None:
    """Copies config, tokenizer, chat template and generation defaults of `source`, for weights of a type. With `is_packed`, those that are
    packed in `source` are packed in `directory`, too.
    """
    for path in source.iterdir():
        if path.is_file() and path.suffix in COPIED_SUFFIXES and path.name not in ("config.json", INDEX_FILE):
            shutil.copyfile(path, directory / path.name)
    config = msgspec.json.decode((source / "config.json").read_bytes())
    for keys in (config, *(config.get(name) for name in LANGUAGE_TABLES)):
        if isinstance(keys, dict) and not is_packed:
            keys.pop("quantization_config", None)  # what is written are numbers of `dtype`
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def to_checkpoint(source: Path, target: Path, config: LearnerConfig) -> None:
    """Write the weights of a Hugging Face directory as a checkpoint of step 0. Collective."""
    architecture = read_architecture(source)
    model = _build(architecture, config)
    with backend.device_scope():
        hf.read_weights(model, architecture, source)
        model.to(backend.device())
        checkpoint.begin_checkpoint(target, model, None, steps=0, extra=b"").finish()


def to_hugging_face(source: Path, target: Path, config: LearnerConfig, *, model_directory: Path) -> None:
    """Write the weights of a checkpoint as a Hugging Face directory, config and tokenizer from `model_directory`. Collective.

    The weights keep the type that they have in the checkpoint.
    """
    architecture = read_architecture(model_directory)
    model = _build(architecture, config)
    dtype = checkpoint.weights_dtype_in(source)
    with backend.device_scope():
        model.to(device=backend.device(), dtype=dtype)
        keep_in_fp32(model)
        checkpoint.read_weights(source, model)
    exporter = Exporter(
        [*weight_parts(model, architecture), *carried_parts(architecture, model_directory)],
        describe=lambda partial: copy_description(model_directory, partial, dtype),
    )
    exporter.write(target)


def _build(architecture: Architecture, config: LearnerConfig) -> GPTModel:
    backend.lay_out(
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
        expert_parallel=config.expert_parallel,
    )
    torch.manual_seed(config.seed)
    with backend.device_scope():
        return build_model(architecture, config)
