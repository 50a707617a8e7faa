"""Weights by broadcast, with SGLang's distributed update: NCCL to engines on GPUs, gloo to engines on the CPU.

The trainer exports each version to its own disk; one sender process for each engine reads it from there and broadcasts it to the
engine's ranks. Engines need neither a shared file system nor a disk. Each engine has a group of its own, so one that hangs holds up
nobody else. While an engine holds only a part of a version it says so in its version's name, which no run has published: what it samples
then is never trained.
"""

import asyncio
import contextlib
import logging
import socket
from collections import defaultdict
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.weights import WeightVersion, version_name
from trainer.weights.disk import DiskTransport
from trainer.weights.engines import EngineFailure, Engines, PauseMode, Served
from trainer.weights.senders import Sender, buckets

log = logging.getLogger("swerve.weights")

END_S = 5.0
"""How long an engine may take to close an update that broke off; the next one tries that again."""


class DistributedTransport:
    """A `WeightTransport`. `aclose` ends the sender processes."""

    def __init__(self, disk: DiskTransport) -> None:
        self._disk = disk
        self.senders: dict[str, Sender] = {}  # by engine
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def aclose(self) -> None:
        for sender in self.senders.values():
            await sender.end()

    async def prepare(self, version: int, step: int) -> WeightVersion:
        return await self._disk.prepare(version, step)

    async def is_available(self, version: WeightVersion) -> bool:
        return await self._disk.is_available(version)

    def is_current(self, served: Served, version: WeightVersion) -> bool:
        """An engine that starts has no name of this run's, and one that was updated keeps its directory's name."""
        return served.weight_version == version_name(version.run_id, version.version)

    async def prefetch(self, engine_url: str, version: WeightVersion) -> None:
        """Start the sender, which takes seconds the first time."""
        async with self._turns[engine_url]:
            await self._sender(engine_url)

    async def deliver(
        self, engines: Engines, engine_url: str, version: WeightVersion, mode: PauseMode
    ) -> None:
        async with self._turns[engine_url]:
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
        sender.join(world_size, backend), engines.command(engine_url, "init_weights_update_group", group)
    )
    log.info("weights to %s go by %s, to %d of its processes", engine_url, backend, layout.tp_size)


async def _broadcast(
    engines: Engines, engine_url: str, sender: Sender, version: WeightVersion, mode: PauseMode
) -> None:
    name = version_name(version.run_id, version.version)
    parts = await asyncio.to_thread(lambda: list(buckets(Path(version.directory))))
    await engines.command(engine_url, "begin_weight_update", {})
    for number, bucket in enumerate(parts, 1):
        is_last = number == len(parts)
        update = {
            "names": [tensor.name for tensor in bucket],
            "dtypes": [tensor.dtype for tensor in bucket],
            "shapes": [tensor.shape for tensor in bucket],
            "group_name": sender.group,
            "weight_version": name if is_last else f"{name}-incomplete",
            "flush_cache": is_last and mode != "in_place",
        }
        await _both(
            sender.send(bucket), engines.command(engine_url, "update_weights_from_distributed", update)
        )
    await engines.command(engine_url, "end_weight_update", {})


async def _both(sending: Coroutine[Any, Any, None], receiving: Coroutine[Any, Any, None]) -> None:
    """Wait for both ends of a collective. If one fails, the other is waited for no longer."""
    ends = [asyncio.ensure_future(sending), asyncio.ensure_future(receiving)]
    try:
        await asyncio.gather(*ends)
    finally:
        for end in ends:
            end.cancel()
        await asyncio.wait(ends)


def _own_address(engine_url: str) -> str:
    """The address of this host on the network that leads to the engine."""
    parts = urlsplit(engine_url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((parts.hostname or "", parts.port or 80))
        except OSError as error:
            raise EngineFailure(f"{engine_url}: no way leads to its host: {error}") from error
        return probe.getsockname()[0]
