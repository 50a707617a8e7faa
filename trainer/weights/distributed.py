"""Weights by broadcast, with SGLang's distributed update: NCCL to engines on GPUs, gloo to engines on the CPU.

The trainer exports each version to its own disk; one sender process for each engine reads it from there and broadcasts it to the engine's
ranks. Engines need neither a shared file system nor a disk. Each engine has its own group, so an engine that hangs does not delay the
others. While an engine holds only a part of a version, its version's name is one that no run has published, so that tokens sampled then are
never trained.
"""

import asyncio
import contextlib
import logging
import socket
import sys
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from itertools import count
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from pipeline.weights import WeightVersion
from trainer.weights.engines import EngineFailure, Engines, PauseMode, Served
from trainer.weights.transport import DiskTransport, Whole

BUCKET_BYTES = 512 << 20
"""The size of the tensors of one call, which an engine holds in addition to its weights."""

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn"}
_HEADER_LENGTH_BYTES = 8
_group_numbers = count()


class SentTensor(msgspec.Struct, frozen=True):
    """A tensor in a safetensors file."""

    path: str
    name: str
    dtype: str  # torch's name of the type
    shape: tuple[int, ...]
    num_bytes: int


def buckets(directory: Path) -> Iterator[list[SentTensor]]:
    """The tensors of an export in groups of at most BUCKET_BYTES; a larger tensor is a group of its own."""
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
    """One child process, which broadcasts to one engine. Each failure is an EngineFailure, after which the sender is unusable."""

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
        """Joins the group as rank 0; returns when the engine's ranks have joined too."""
        await self._call({"join": world_size, "group": self.group, "backend": backend})
        self.has_joined = True

    async def send(self, bucket: list[SentTensor]) -> None:
        await self._call({"send": [(tensor.path, tensor.name) for tensor in bucket]})

    async def end(self) -> None:
        await _end(self._process)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

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


log = logging.getLogger("swerve.weights")

END_S = 5.0
"""The longest time that an engine may take to end a broken-off update; the next update tries that again."""


class DistributedTransport(Whole):
    """A `WeightTransport`. `aclose` ends the sender processes."""

    def __init__(self, disk: DiskTransport) -> None:
        self._disk = disk
        self.senders: dict[str, Sender] = {}  # keys are URLs of engines
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def aclose(self) -> None:
        for sender in self.senders.values():
            await sender.end()

    async def prepare(self, version: int, step: int) -> WeightVersion:
        return await self._disk.prepare(version, step)

    async def is_available(self, version: WeightVersion) -> bool:
        return await self._disk.is_available(version)

    def is_current(self, served: Served, version: WeightVersion) -> bool:
        """Whether the engine serves this version.

        A started engine does not have a name of this run, and an updated one keeps its directory's name.
        """
        return served.weight_version == version.name

    async def prefetch(self, engine_url: str, version: WeightVersion) -> None:
        """Starts the sender, which takes seconds the first time."""
        async with self._turns[engine_url]:
            await self._sender(engine_url)

    async def deliver(
        self, engines: Engines, engine_url: str, version: WeightVersion, mode: PauseMode
    ) -> None:
        async with self._turns[engine_url]:
            await engines.check_precision(engine_url)
            sender = await self._sender(engine_url)
            try:
                if not sender.has_joined:
                    await _join(engines, engine_url, sender)
                await _broadcast(engines, engine_url, sender, version, mode)
            except BaseException:
                # A broadcast that broke off leaves the group unusable.
                del self.senders[engine_url]
                await asyncio.shield(sender.end())
                with contextlib.suppress(EngineFailure, TimeoutError):
                    async with asyncio.timeout(END_S):
                        await engines.command(engine_url, "end_weight_update", {})
                raise

    async def discard_old(self, oldest_needed: int) -> None:
        await self._disk.discard_old(oldest_needed)

    async def _sender(self, engine_url: str) -> Sender:
        if engine_url not in self.senders:
            self.senders[engine_url] = await Sender.start()
        return self.senders[engine_url]


async def _join(engines: Engines, engine_url: str, sender: Sender) -> None:
    layout = await engines.layout(engine_url)
    backend = "nccl" if layout.device == "cuda" else "gloo"
    world_size = 1 + layout.tp_size
    group = {
        "master_address": _own_address(engine_url),
        "master_port": sender.port,
        "rank_offset": 1,
        "world_size": world_size,
        "group_name": sender.group,
        "backend": backend,
    }
    await _both(
        sender,
        sender.join(world_size, backend),
        engines.command(engine_url, "init_weights_update_group", group),
    )
    log.info("weights to %s go by %s, to %d of its processes", engine_url, backend, layout.tp_size)


async def _broadcast(
    engines: Engines, engine_url: str, sender: Sender, version: WeightVersion, mode: PauseMode
) -> None:
    parts = await asyncio.to_thread(lambda: list(buckets(Path(version.directory))))
    await engines.command(engine_url, "begin_weight_update", {})
    for number, bucket in enumerate(parts, 1):
        is_last = number == len(parts)
        update = {
            "names": [tensor.name for tensor in bucket],
            "dtypes": [tensor.dtype for tensor in bucket],
            "shapes": [tensor.shape for tensor in bucket],
            "group_name": sender.group,
            "weight_version": version.name if is_last else f"{version.name}-incomplete",
            "flush_cache": is_last and mode != "in_place",
        }
        await _both(
            sender,
            sender.send(bucket),
            engines.command(engine_url, "update_weights_from_distributed", update),
        )
    await engines.command(engine_url, "end_weight_update", {})


async def _both(
    sender: Sender, sending: Coroutine[Any, Any, None], receiving: Coroutine[Any, Any, None]
) -> None:
    """Waits for both ends of a collective. If one fails, stops waiting for the other."""
    ends = [asyncio.ensure_future(sending), asyncio.ensure_future(receiving)]
    try:
        await asyncio.gather(*ends)
    except EngineFailure as error:
        if sender.has_ended:  # the engine may have noticed it first
            raise EngineFailure(f"the process that broadcasts weights has ended: {error}") from error
        raise
    finally:
        for end in ends:
            end.cancel()
        await asyncio.wait(ends)


def _own_address(engine_url: str) -> str:
    """The address of this host on the network that leads to the engine."""
    parts = urlsplit(engine_url)
    # A datagram socket sends nothing when it connects
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname or "", parts.port or 80))
        except OSError as error:
            raise EngineFailure(f"{engine_url}: no way leads to its host: {error}") from error
        return probe.getsockname()[0]
