"""Writes the weights of a Megatron model as a Hugging Face directory, all ranks at once.

Each parameter has one writer: a rank of one of the tensor-parallel groups that hold it, or for an expert, a rank that holds it.
Its parts are gathered there and nowhere else, one parameter at a time; the writer moves the joined tensor to its host and
appends it to a safetensors file of its own. So each byte is moved to a host once, and no host holds more than one tensor. The
writers are chosen so that all ranks write about the same number of bytes. Rank 0 also writes the index, the config and the
tokenizer.

The directory lies on a filesystem that all ranks share.
"""

import functools
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, distributed

from trainer.learner import backend, directories
from trainer.learner.hf import INDEX_FILE, SINGLE_FILE, join, origins
from trainer.learner.lora import SUFFIX, adapters
from trainer.learner.safetensors_file import write_safetensors

SHARD_BYTES = 4 << 30
"""The size above which a rank begins another file."""

COPIED_SUFFIXES = (".json", ".txt", ".jinja", ".model")
"""The files of tokenizer, chat template and generation defaults end in one of these."""

_Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank holds of one parameter that is to be written."""

    # of the tensors that it becomes
    names: _Names
    # of this rank's shape and type
    like: Tensor
    # read when its turn comes
    read: Callable[[], Tensor]
    # among the tensor-parallel ranks; otherwise each of them holds the whole
    is_divided: bool
    # from the parts of all tensor-parallel ranks in order, or the whole, to the tensors of these names
    join: Callable[[list[Tensor]], list[Tensor]]

    def announce(self) -> list[Tensor]:
        """The joined tensors, without content."""
        num_parts = backend.tensor_parallel_group().size() if self.is_divided else 1
        return self.join([torch.empty_like(self.like, device="meta") for _ in range(num_parts)])


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    writer: int
    parts: tuple[_Names, ...]


def weight_parts(model: GPTModel, *, vocab_size: int) -> list[Part]:
    """All weights that this rank holds."""
    table, adapted = origins(model), dict(adapters(model))
    parts = []
    for name, parameter in model.named_parameters():
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            continue  # the first stage holds the same matrix
        if SUFFIX in name:
            continue  # merged into the weight that it changes
        origin = table[name]
        adapter = adapted.get(name)
        parts.append(
            Part(
                names=origin.names,
                like=parameter,
                read=parameter.detach if adapter is None else functools.partial(adapter.merged, parameter),
                is_divided=origin.is_divided,
                join=lambda pieces, origin=origin: join(model, origin, pieces, vocab_size=vocab_size),
            )
        )
    return parts


class Exporter:
    """Writes the same parts again and again, with their contents of that moment. Every rank builds one."""

    def __init__(self, parts: Sequence[Part], *, describe: Callable[[Path], None]) -> None:
        """`describe` writes what stands beside the weights into a directory; rank 0 calls it."""
        # Larger types first, as `write_safetensors` wants them.
        self._parts = sorted(parts, key=lambda part: -part.like.itemsize)
        self._describe = describe
        self._plan: list[_File] | None = None
        self._num_bytes = 0

    @torch.no_grad()
    def write(self, directory: Path) -> None:
        """Collective. The directory appears whole or not at all; an OSError of one rank is raised on all of them."""
        if self._plan is None:
            self._plan, self._num_bytes = _plan(self._parts)
        rank = distributed.get_rank()
        if rank == 0:
            directories.begin(directory)
        distributed.barrier()
        partial = directories.partial_of(directory)
        failure = self._write_own(partial, self._plan)
        if rank == 0 and failure is None:
            failure = self._write_rest(partial, self._plan)
        _agree(failure)
        if rank == 0:
            directories.commit(directory)
        distributed.barrier()

    def _write_own(self, partial: Path, plan: list[_File]) -> OSError | None:
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
                    write_safetensors(partial / file.name, announced, islice(tensors, len(announced)))
        except OSError as error:
            return error
        finally:
            for _ in tensors:  # a writer in the same group may still need parts of this rank
                pass
        return None

    def _joined(self, writers: dict[_Names, int]) -> Iterator[Tensor]:
        """The tensors that this rank writes, on the host; takes part in those of its tensor-parallel group meanwhile."""
        group = backend.tensor_parallel_group()
        ranks = distributed.get_process_group_ranks(group)
        for part in self._parts:
            writer = writers[part.names]
            if writer not in ranks:
                continue
            pieces = _gather(part, writer, group)
            if writer == distributed.get_rank():
                yield from (to_host(tensor) for tensor in part.join(pieces))

    def _write_rest(self, partial: Path, plan: list[_File]) -> OSError | None:
        weight_map = {name: file.name for file in plan for names in file.parts for name in names}
        try:
            if len(plan) > 1:
                index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
                (partial / INDEX_FILE).write_bytes(msgspec.json.encode(index))
            self._describe(partial)
        except OSError as error:
            return error
        return None


def to_host(tensor: Tensor) -> Tensor:
    """Every byte of an export passes through here."""
    return tensor.cpu()


def _gather(part: Part, writer: int, group: distributed.ProcessGroup) -> list[Tensor]:
    """The pieces of a parameter, on the writer's device; elsewhere what is returned means nothing."""
    own = part.read().contiguous()
    if not part.is_divided or group.size() == 1:
        return [own]
    pieces = (
        [torch.empty_like(own) for _ in range(group.size())] if writer == distributed.get_rank() else None
    )
    distributed.gather(own, pieces, dst=writer, group=group)
    return pieces or []


def _plan(parts: Sequence[Part]) -> tuple[list[_File], int]:
    """Which rank writes what into which file, the same on every rank, and the bytes of all files together. Collective."""
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
    """A writer for every parameter among the ranks that hold it: large ones first, each to who has least so far."""
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


def _agree(failure: OSError | None) -> None:
    """Raise on every rank what broke on one. Collective."""
    failures: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(failures, None if failure is None else str(failure))
    for rank, text in enumerate(failures):
        if text is not None:
            raise OSError(f"rank {rank}: {text}") from failure


def copy_description(source: Path, directory: Path, dtype: torch.dtype) -> None:
    """Config, tokenizer, chat template and generation defaults of `source`, for weights of a type."""
    for path in source.iterdir():
        if path.is_file() and path.suffix in COPIED_SUFFIXES and path.name not in ("config.json", INDEX_FILE):
            shutil.copyfile(path, directory / path.name)
    config = msgspec.json.decode((source / "config.json").read_bytes())
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
