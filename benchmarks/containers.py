"""What a container costs from nothing to gone: ours, set up and behind the worker's start gate, against the engine asked
directly for containers with the very same options.

A cycle is create, start, one command, remove. The options are read off one of our own containers, so that they cannot
drift apart; only the first process differs. `python -m benchmarks.containers [--json] [--short]`
"""

import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import bug
from benchmarks.engine_api import EngineApi
from benchmarks.report import Comparison, compared, main, p50, p95, shuffled
from workers.sandbox.docker import DockerSandboxes

OURS, API = "ours", "engine API, same options"
COMMAND_S = 60.0

Cycle = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Plan:
    concurrencies: tuple[int, ...]
    num_rounds: int
    num_cycles: int  # of a block, for each that are at it at once


LONG = Plan((1, 8), num_rounds=6, num_cycles=4)
SHORT = Plan((1, 2), num_rounds=1, num_cycles=1)


@dataclass(slots=True)
class Blocks:
    latencies: list[list[float]] = field(default_factory=list[list[float]])  # seconds, by round
    per_s: list[list[float]] = field(default_factory=list[list[float]])


async def containers(short: bool) -> list[Comparison]:
    plan = SHORT if short else LONG
    with bug.image():
        fleet = DockerSandboxes(fleet=f"bench-{secrets.token_hex(4)}")
        async with EngineApi() as api:
            try:
                options = await _options(fleet, api)
                cycles: dict[str, Cycle] = {OURS: partial(_ours, fleet), API: partial(_direct, api, options)}
                return comparisons(await measured(cycles, plan), plan)
            finally:
                await fleet.close()


async def measured(cycles: dict[str, Cycle], plan: Plan) -> dict[tuple[str, int], Blocks]:
    found = {(name, many): Blocks() for name in cycles for many in plan.concurrencies}
    for _ in range(plan.num_rounds):
        for name, many in shuffled(found):
            await _block(found[name, many], cycles[name], many, plan.num_cycles)
    return found


async def _block(into: Blocks, cycle: Cycle, many: int, num_cycles: int) -> None:
    latencies: list[float] = []

    async def caller() -> None:
        for _ in range(num_cycles):
            began = time.perf_counter()
            await cycle()
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(many)))
    into.latencies.append(latencies)
    into.per_s.append([len(latencies) / (time.perf_counter() - began)])


async def _ours(fleet: DockerSandboxes) -> None:
    async with fleet.open(bug.claim(), role="agent") as sandbox:
        await sandbox.run("true", timeout_s=COMMAND_S)


async def _direct(api: EngineApi, options: dict[str, Any]) -> None:
    container = await api.create(options)
    try:
        await api.start(container)
        await api.execute(container, ["bash", "-c", "true"])
    finally:
        await api.remove(container)


async def _options(fleet: DockerSandboxes, api: EngineApi) -> dict[str, Any]:
    """Of one of our containers, for one that only sleeps."""
    async with fleet.open(bug.claim(), role="agent") as sandbox:
        found = await api.inspect(sandbox.id)
    kept = ("User", "WorkingDir", "Env", "Image", "Healthcheck", "NetworkDisabled")
    config = {name: found["Config"][name] for name in kept if name in found["Config"]}
    return config | {
        "Entrypoint": ["sleep"],
        "Cmd": ["1000"],
        "Labels": {bug.LABEL: "1"},
        "HostConfig": found["HostConfig"],
    }


def comparisons(blocks: dict[tuple[str, int], Blocks], plan: Plan) -> list[Comparison]:
    found: list[Comparison] = []
    against = partial(compared, "containers", rival_name=API)
    for many in plan.concurrencies:
        ours, direct = blocks[OURS, many], blocks[API, many]
        for word, statistic in (("p50", p50), ("p95", p95)):
            unit = f"ms per cycle, {word}, {many} at once"
            found.append(against(ours.latencies, direct.latencies, statistic, unit=unit, scale=1e3))
        found.append(against(ours.per_s, direct.per_s, p50, unit=f"cycles per second, {many} at once"))
    return found


if __name__ == "__main__":
    sys.exit(main("containers", __doc__, containers))
