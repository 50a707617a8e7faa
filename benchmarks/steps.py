"""What one command costs: ours against mini-swe-agent, `docker exec`, Docker's HTTP API, and bash on the host.

The command is `true`, so that only the way to it is measured. Each concurrent caller has its own container. A round has a
block for each method and concurrency, in random order. `python -m benchmarks.steps [--json] [--short]`
"""

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import bug, mini_swe_agent, survivors
from benchmarks.cpu_meter import CpuMeter
from benchmarks.docker_api import DockerApi
from benchmarks.mini_swe_agent import RIVAL
from benchmarks.report import Comparison, Measurements, compared, main, p50, p95, shuffled
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import Sandbox

OURS = "ours"
CLI, API, HOST = "docker exec", "Docker API exec", "host bash -c"
FAST = (OURS, HOST)
COMMAND = "true"
COMMAND_S = 60.0
IDLE_S = 0.3  # before each block, to measure what dockerd does for others

Call = Callable[[int], Awaitable[object]]
"""Runs COMMAND once in the container of the caller with this number."""


@dataclass(frozen=True, slots=True)
class StepsPlan:
    concurrencies: tuple[int, ...]
    num_rounds: int
    num_slow: int  # steps of a block
    num_fast: int  # the same, of methods that take a millisecond or two
    num_timeouts: int
    num_rival_timeouts: int


LONG = StepsPlan((1, 8), num_rounds=8, num_slow=40, num_fast=400, num_timeouts=200, num_rival_timeouts=20)
SHORT = StepsPlan((1, 2), num_rounds=1, num_slow=4, num_fast=20, num_timeouts=2, num_rival_timeouts=1)


@dataclass(frozen=True, slots=True)
class Arena:
    """The methods with their containers, and the meter of each."""

    methods: Mapping[str, Call]
    meters: Mapping[str, CpuMeter]
    sandboxes: list[Sandbox]
    rivals: list[Any]


async def steps(short: bool) -> list[Comparison]:
    plan = SHORT if short else LONG
    with bug.image() as image:
        async with arena(image, max(plan.concurrencies)) as made:
            blocks = await measured(made, plan)
            print(f"steps: {survivors.WHAT}", file=sys.stderr)
            left = await survivors.compared_survivors(
                made.sandboxes, made.rivals, num_ours=plan.num_timeouts, num_rival=plan.num_rival_timeouts
            )
    return [*comparisons(blocks, plan), left]


@asynccontextmanager
async def arena(image: str, count: int) -> AsyncGenerator[Arena, None]:
    """`count` containers of ours, and as many of mini-swe-agent's, which the other methods use too."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(DockerApi())
        threads = stack.enter_context(ThreadPoolExecutor(count))
        rivals = stack.enter_context(mini_swe_agent.environments(image, count))
        fleet = DockerSandboxes(fleet=f"bench-{secrets.token_hex(4)}")
        stack.push_async_callback(fleet.close)
        opening = (stack.enter_async_context(fleet.open(bug.claim(n), role="agent")) for n in range(count))
        sandboxes = [await one for one in opening]

        def in_thread(call: Callable[[int], object]) -> Call:
            return lambda number: loop.run_in_executor(threads, call, number)

        def ask_cli(number: int) -> object:
            words = ["docker", "exec", rivals[number].container_id, "bash", "-c", COMMAND]
            return subprocess.run(words, capture_output=True, check=True)

        methods: dict[str, Call] = {
            OURS: lambda number: sandboxes[number].run(COMMAND, timeout_s=COMMAND_S),
            RIVAL: in_thread(lambda number: rivals[number].execute({"command": COMMAND})),
            CLI: in_thread(ask_cli),
            API: lambda number: api.execute(rivals[number].container_id, ["bash", "-c", COMMAND]),
            HOST: _on_the_host,
        }
        theirs = CpuMeter([await _place(api, one.container_id) for one in rivals])
        ours = CpuMeter([await _place(api, one.id) for one in sandboxes])
        meters = {name: ours if name == OURS else theirs for name in methods}
        yield Arena(methods, meters, sandboxes, rivals)


async def measured(arena: Arena, plan: StepsPlan) -> dict[tuple[str, int], Measurements]:
    found = {(name, many): Measurements() for name in arena.methods for many in plan.concurrencies}
    for call in arena.methods.values():  # the first call is never like the others
        await asyncio.gather(*(call(number) for number in range(max(plan.concurrencies))))
    for _ in range(plan.num_rounds):
        for name, many in shuffled(found):
            num_steps = plan.num_fast if name in FAST else plan.num_slow
            await _block(found[name, many], arena.methods[name], arena.meters[name], many, num_steps)
    return found


async def _block(into: Measurements, call: Call, meter: CpuMeter, many: int, num_steps: int) -> None:
    latencies: list[float] = []

    async def caller(number: int) -> None:
        for _ in range(num_steps // many):
            began = time.perf_counter()
            await call(number)
            latencies.append(time.perf_counter() - began)

    idle = meter.read()
    await asyncio.sleep(IDLE_S)
    before = meter.read()
    await asyncio.gather(*map(caller, range(many)))
    after = meter.read()
    wall_s, used_s = after.at - before.at, after.since(before, for_others=before.dockerd_rate(idle))
    into.latencies_s.append(latencies)
    into.per_s.append([len(latencies) / wall_s])
    into.cpu_s.append([used_s / len(latencies)])


async def _on_the_host(_: int) -> None:
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        COMMAND,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    await process.communicate()


async def _place(api: DockerApi, container: str) -> tuple[str, int]:
    found = await api.inspect(container)
    return found["Id"], found["State"]["Pid"]


def comparisons(blocks: Mapping[tuple[str, int], Measurements], plan: StepsPlan) -> list[Comparison]:
    found: list[Comparison] = []
    rivals = [name for name, many in blocks if name != OURS and many == plan.concurrencies[0]]
    for rival in rivals:
        against = partial(compared, "steps", rival_name=rival)
        for many in plan.concurrencies:
            ours, theirs = blocks[OURS, many], blocks[rival, many]
            for word, statistic in (("p50", p50), ("p95", p95)):
                unit = f"ms per step, {word}, {many} at once"
                found.append(against(ours.latencies_s, theirs.latencies_s, statistic, unit=unit, scale=1e3))
        many = plan.concurrencies[-1]
        ours, theirs = blocks[OURS, many], blocks[rival, many]
        found.append(against(ours.per_s, theirs.per_s, p50, unit=f"steps per second, {many} at once"))
        ours, theirs = blocks[OURS, plan.concurrencies[0]], blocks[rival, plan.concurrencies[0]]
        found.append(against(ours.cpu_s, theirs.cpu_s, p50, unit="CPU ms per step, 1 at once", scale=1e3))
    return found


if __name__ == "__main__":
    sys.exit(main("steps", __doc__, steps))
