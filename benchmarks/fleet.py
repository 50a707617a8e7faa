"""What a rollout costs Redis and the trainer's intake with 10, 100, 1,000 and 10,000 workers.

The number of episodes under way and the rate at which they end are the same for every size, so only the number of workers
differs that they are spread over: each has a connection of its own, renews the lease of each of its claims, beats its
status and publishes real trajectories. Redis is real, and so are the trainer's dispatcher, intake, groups and ledger, in a
process of their own. `python -m benchmarks.fleet [--json] [--short]`
"""

import asyncio
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from benchmarks import simulated_workers, trainer_side
from benchmarks.children import child
from benchmarks.report import Comparison, compared, main, p50, shuffled
from benchmarks.simulated_workers import Share
from infra.redis_server import FORGETFUL, own_redis

NUM_PROCESSES = 2  # that simulate workers
MAX_CLIENTS = "16000"  # a connection for each worker, and a few
SPARE_FILES = 100  # of Redis, which holds the most


@dataclass(frozen=True, slots=True)
class Plan:
    sizes: tuple[int, ...]  # the first is what the others are compared with
    under_way: int  # episodes, at any time
    per_s: float  # episodes that end
    num_rounds: int
    warm_s: float
    window_s: float
    least_share: float  # of the episodes that are to end in the window; with fewer, the simulation lagged


LONG = Plan(
    (10, 100, 1000, 10_000),
    under_way=10_000,
    per_s=50.0,
    num_rounds=2,
    warm_s=4.0,
    window_s=20.0,
    least_share=0.8,
)
SHORT = Plan((10, 200), under_way=200, per_s=20.0, num_rounds=1, warm_s=2.0, window_s=3.0, least_share=0.0)


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds per rollout."""

    redis: float
    intake: float


class TooBusy(Exception):
    """This machine cannot simulate so many at the moment, and what was measured means nothing."""


async def fleet(short: bool) -> list[Comparison]:
    plan = SHORT if short else LONG
    _allow_connections(max(plan.sizes))
    costs: dict[int, list[Cost]] = {size: [] for size in plan.sizes}
    for _ in range(plan.num_rounds):
        for size in shuffled(plan.sizes):
            try:
                costs[size].append(await measured(size, plan))
            except TooBusy as error:
                print(f"fleet: a round is left out: {error}", file=sys.stderr)
    if not costs[plan.sizes[0]]:
        raise RuntimeError(
            f"no round with {plan.sizes[0]} workers came through: try again on a quieter machine"
        )
    return [one for size in plan.sizes[1:] if costs[size] for one in comparisons(size, costs, plan)]


async def measured(size: int, plan: Plan) -> Cost:
    """Of a window in the middle. Raises TooBusy."""
    num_needed = plan.under_way + int(plan.per_s * (plan.warm_s + plan.window_s + 10))
    with ExitStack() as stack:
        url = stack.enter_context(own_redis({**FORGETFUL, "maxclients": MAX_CLIENTS}))
        journal = stack.enter_context(tempfile.TemporaryDirectory(prefix="swerve-bench-"))
        _, trainer = stack.enter_context(child(trainer_side.run, url, Path(journal), num_needed))
        await _said(trainer)
        workers = [
            stack.enter_context(child(simulated_workers.run, url, share))[1] for share in shares(size, plan)
        ]
        for one in workers:
            await _said(one)
        for one in workers:
            one.send("go")
        await asyncio.sleep(plan.warm_s)
        async with Redis.from_url(url) as redis:
            before = await _usage(redis, trainer)
            await asyncio.sleep(plan.window_s)
            after = await _usage(redis, trainer)
        for one in workers:
            one.send("stop")
            lost = await _said(one)
            if lost:
                raise TooBusy(f"{size} workers: {lost} leases lapsed")
    redis_s, intake_s, num_arrived = (late - early for late, early in zip(after, before, strict=True))
    num_due = plan.per_s * plan.window_s
    if num_arrived < plan.least_share * num_due:
        raise TooBusy(f"{size} workers: only {num_arrived:.0f} of {num_due:.0f} episodes ended in time")
    return Cost(redis=redis_s / num_arrived, intake=intake_s / num_arrived)


def _allow_connections(num_workers: int) -> None:
    """Raises RuntimeError if the system does not let a process have so many."""
    wanted = num_workers + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted > hard != resource.RLIM_INFINITY:
        raise RuntimeError(
            f"{num_workers} workers take {wanted} open files, and {hard} are allowed: raise `ulimit -Hn`"
        )
    if wanted > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def shares(size: int, plan: Plan) -> Iterator[Share]:
    """Each process simulates every NUM_PROCESSES-th worker."""
    slots = [plan.under_way // size + (number < plan.under_way % size) for number in range(size)]
    for first in range(min(NUM_PROCESSES, size)):
        yield Share(first=first, slots=tuple(slots[first::NUM_PROCESSES]), per_s=plan.per_s)


async def _usage(redis: Redis, trainer: Connection) -> tuple[float, float, float]:
    trainer.send("how much?")
    intake_s, num_arrived = await _said(trainer)
    used = await redis.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"]), intake_s, num_arrived


async def _said(by: Connection) -> Any:
    return await asyncio.to_thread(by.recv)


def comparisons(size: int, costs: dict[int, list[Cost]], plan: Plan) -> list[Comparison]:
    few = plan.sizes[0]
    figures = {
        "Redis": lambda cost: cost.redis,
        "the intake": lambda cost: cost.intake,
        "both": lambda cost: cost.redis + cost.intake,
    }
    return [
        compared(
            "fleet",
            [[figure(cost)] for cost in costs[size]],
            [[figure(cost)] for cost in costs[few]],
            p50,
            rival_name=f"{few} workers",
            unit=f"CPU ms of {who} per rollout, {size:,} workers, {plan.under_way:,} episodes under way, "
            f"{plan.per_s:g} end a second",
            scale=1e3,
        )
        for who, figure in figures.items()
    ]


if __name__ == "__main__":
    sys.exit(main("fleet", __doc__, fleet))
