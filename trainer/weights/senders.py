"""The trainer's side of the processes that broadcast weights (`trainer/learner/weight_sender.py`), and what each broadcast holds."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Self

import msgspec

from trainer.weights.engines import EngineFailure

BUCKET_BYTES = 512 << 20
"""An engine holds the tensors of one call beside its weights."""

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_HEADER_LENGTH_BYTES = 8
_group_numbers = count()


class SentTensor(msgspec.Struct, frozen=True):
    """A tensor in a safetensors file."""

    path: str
    name: str
    dtype: str  # as torch names it
    shape: tuple[int, ...]
    num_bytes: int


def buckets(directory: Path) -> Iterator[list[SentTensor]]:
    """The tensors of an export, in groups of at most BUCKET_BYTES, or of one that is larger."""
    bucket: list[SentTensor] = []
    num_bytes = 0
    for tensor in (tensor for path in sorted(directory.glob("*.safetensors")) for tensor in _tensors(path)):
        if bucket and num_bytes + tensor.num_bytes > BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += tensor.num_bytes
    if bucket:
        yield bucket


def _tensors(path: Path) -> Iterator[SentTensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
        header: dict[str, Any] = msgspec.json.decode(file.read(length))
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            yield SentTensor(str(path), name, DTYPES[about["dtype"]], tuple(about["shape"]), end - begin)


class Sender:
    """One child process, which broadcasts to one engine. Each failure is an EngineFailure, and then the sender is of no more use."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.port = port
        self.group = f"swerve-{next(_group_numbers)}-{process.pid}"  # an engine takes each name once
        self.has_joined = False

    @classmethod
    async def start(cls) -> Self:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "trainer.learner.weight_sender"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            return cls(process, (await _answer_of(process))["port"])
        except BaseException:
            await _end(process)
            raise

    async def join(self, world_size: int, backend: str) -> None:
        """Join the group as rank 0; returns when the engine's ranks have joined too."""
        await self._call({"join": world_size, "group": self.group, "backend": backend})
        self.has_joined = True

    async def send(self, bucket: list[SentTensor]) -> None:
        await self._call({"send": [(tensor.path, tensor.name) for tensor in bucket]})

    async def end(self) -> None:
        await _end(self._process)

    async def _call(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(command) + b"\n")
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise EngineFailure("the process that broadcasts weights has ended") from error
        await _answer_of(self._process)


async def _answer_of(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise EngineFailure(f"the process that broadcasts weights ended with status {await process.wait()}")
    return msgspec.json.decode(line)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
