"""What a container costs from creation to removal: ours, with its set-up and the worker's limit on concurrent starts,
against Docker's HTTP API with the same options.

A cycle is create, start, one command, remove. The options are read from one of our own containers, so that they are always
the same; only the first process differs. `python -m benchmarks.containers [--json] [--short]`
"""

import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import bug
from benchmarks.docker_api import DockerApi
from benchmarks.report import Comparison, Measurements, compared, main, p50, p95, shuffled
from workers.sandbox.docker import DockerSandboxes

OURS, API = "ours", "Docker API, same options"
COMMAND_S = 60.0

Cycle = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class ContainersPlan:
    concurrencies: tuple[int, ...]
    num_rounds: int
    num_cycles: int  # of a block, for each concurrent caller


LONG = ContainersPlan((1, 8), num_rounds=6, num_cycles=4)
SHORT = ContainersPlan((1, 2), num_rounds=1, num_cycles=1)


async def containers(short: bool) -> list[Comparison]:
    plan = SHORT if short else LONG
    with bug.image():
        fleet = DockerSandboxes(fleet=f"bench-{secrets.token_hex(4)}")
        async with DockerApi() as api:
            try:
                options = await _options(fleet, api)
                cycles: dict[str, Cycle] = {OURS: partial(_ours, fleet), API: partial(_direct, api, options)}
                return comparisons(await measured(cycles, plan), plan)
            finally:
                await fleet.close()


async def measured(cycles: dict[str, Cycle], plan: ContainersPlan) -> dict[tuple[str, int], Measurements]:
    found = {(name, many): Measurements() for name in cycles for many in plan.concurrencies}
    for _ in range(plan.num_rounds):
        for name, many in shuffled(found):
            await _block(found[name, many], cycles[name], many, plan.num_cycles)
    return found


async def _block(into: Measurements, cycle: Cycle, many: int, num_cycles: int) -> None:
    latencies: list[float] = []

    async def caller() -> None:
        for _ in range(num_cycles):
            began = time.perf_counter()
            await cycle()
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(many)))
    into.latencies_s.append(latencies)
    into.per_s.append([len(latencies) / (time.perf_counter() - began)])


async def _ours(fleet: DockerSandboxes) -> None:
    async with fleet.open(bug.claim(), role="agent") as sandbox:
        await sandbox.run("true", timeout_s=COMMAND_S)


async def _direct(api: DockerApi, options: dict[str, Any]) -> None:
    container = await api.create(options)
    try:
        await api.start(container)
        await api.execute(container, ["bash", "-c", "true"])
    finally:
        await api.remove(container)


async def _options(fleet: DockerSandboxes, api: DockerApi) -> dict[str, Any]:
    """The options of one of our containers, for one that only sleeps."""
    async with fleet.open(bug.claim(), role="agent") as sandbox:
        found = await api.inspect(sandbox.id)
    kept = ("User", "WorkingDir", "Env", "Image", "Healthcheck", "NetworkDisabled")
    config = {name: found["Config"][name] for name in kept if name in found["Config"]}
    return config | {
        "Entrypoint": ["sleep"],
        "Cmd": ["1000"],
        "Labels": {bug.LABEL: bug.OWNER},
        "HostConfig": found["HostConfig"],
    }


def comparisons(blocks: dict[tuple[str, int], Measurements], plan: ContainersPlan) -> list[Comparison]:
    found: list[Comparison] = []
    against = partial(compared, "containers", rival_name=API)
    for many in plan.concurrencies:
        ours, direct = blocks[OURS, many], blocks[API, many]
        for word, statistic in (("p50", p50), ("p95", p95)):
            unit = f"ms per cycle, {word}, {many} at once"
            found.append(against(ours.latencies_s, direct.latencies_s, statistic, unit=unit, scale=1e3))
        found.append(against(ours.per_s, direct.per_s, p50, unit=f"cycles per second, {many} at once"))
    return found


if __name__ == "__main__":
    sys.exit(main("containers", __doc__, containers))
