"""Which of a worker's Docker engines an episode runs on, from its first container to its last.

Each engine has a breaker of its own. One that is out, or short of disk, is set aside, its claims go back to the queue uncounted
and on to the others; when it answers again it gets one episode, then its share. Claims are held back only while no engine
takes one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.errors import SandboxError
from workers.breaker import Breaker
from workers.docker.host import DockerHost
from workers.sandbox.disk import DiskWatch
from workers.sandbox.docker import DockerSandboxes


@dataclass(slots=True)
class PooledEngine:
    """One engine, and what this worker has on it."""

    sandboxes: DockerSandboxes
    disk: DiskWatch
    slots: int  # most episodes at once
    breaker: Breaker
    running: set[str] = field(default_factory=set[str])  # request ids

    @property
    def host(self) -> DockerHost:
        return self.sandboxes.host

    @property
    def room(self) -> int:
        """How many more episodes may begin here now."""
        return self.breaker.room(max(self.slots - len(self.running), 0))


class EnginePool:
    """The worker's gate at Docker. A claim gets its engine when it is made and keeps it until it has ended."""

    def __init__(self, engines: Sequence[DockerSandboxes], *, slots: int) -> None:
        """`slots` is the whole worker's; an engine takes as many unless its host says how many."""
        self.engines = tuple(_pooled(each, slots, alone=len(engines) == 1) for each in engines)
        self._of: dict[str, PooledEngine] = {}  # by request id

    async def check(self) -> tuple[PooledEngine, ...]:
        """The engines that answer, some of which may be short of disk. Raises SandboxError if none does."""
        await asyncio.gather(*(engine.breaker.check() for engine in self.engines))
        answers = await asyncio.gather(*(_answers(engine) for engine in self.engines))
        if not any(answers):
            raise SandboxError(self.paused)
        return tuple(engine for engine, does in zip(self.engines, answers, strict=True) if does)

    def of(self, request_id: str) -> PooledEngine:
        """Where the claim of this request runs."""
        return self._of[request_id]

    @property
    def paused(self) -> str:
        reasons = [engine.breaker.paused for engine in self.engines]
        return "; ".join(reasons) if all(reasons) else ""

    @property
    def set_aside(self) -> str:
        reasons = [engine.breaker.paused for engine in self.engines]
        return "" if all(reasons) else "; ".join(filter(None, reasons))

    def room(self, free: int) -> int:
        return min(free, sum(engine.room for engine in self.engines))

    def claimed(self, request_id: str) -> None:
        engine = self._of[request_id] = max(self.engines, key=_preference)
        engine.running.add(request_id)
        engine.breaker.claimed(request_id)

    def succeeded(self, request_id: str) -> None:
        self._of[request_id].breaker.succeeded(request_id)

    async def blamed(self, request_id: str, message: str) -> bool:
        return await self._of[request_id].breaker.blamed(request_id, message)

    def ended(self, request_id: str) -> None:
        self._of.pop(request_id).running.discard(request_id)

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for engine in self.engines:
                tasks.create_task(engine.breaker.watch())
                tasks.create_task(engine.disk.watch())

    async def close(self) -> None:
        for engine in self.engines:
            await engine.sandboxes.close()


def _pooled(sandboxes: DockerSandboxes, slots: int, *, alone: bool) -> PooledEngine:
    disk = DiskWatch(sandboxes)

    async def probe() -> None:
        await sandboxes.check()
        await disk.check()

    name = "docker" if alone else f"docker at {sandboxes.host.url}"
    return PooledEngine(sandboxes, disk, sandboxes.host.slots or slots, Breaker(name, probe))


async def _answers(engine: PooledEngine) -> bool:
    try:
        await engine.sandboxes.check()
    except SandboxError:
        return False
    return True


def _preference(engine: PooledEngine) -> tuple[bool, bool, bool, int]:
    """An engine that is back first, for its one trial; then one that nothing failed on lately, for an engine that fails at
    once would always have the most room; then the one with the most room.
    """
    has_room = engine.room > 0
    is_trial = has_room and engine.breaker.state == "half-open"
    return has_room, is_trial, not engine.breaker.suspected, engine.room
