"""What a rollout costs Redis and the trainer with 10, 100, 1,000 and 10,000 workers.

Two questions. Does a rollout become dearer as the fleet grows? Workers are alike, each plays one episode after the other, so
more of them play more. And what does it cost to have many workers? The largest fleet's episodes, at the same pace, are also
spread over as few workers as the smallest has, so that only the number of workers differs.

Each worker has a connection of its own, renews the lease of each of its claims, beats its status and publishes trajectories
of a real one's size. Redis is real, and so is the trainer, in a process of its own, but for the learning.
`python -m benchmarks.fleet [--json] [--short]`
"""

import asyncio
import resource
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from benchmarks import simulated_workers, trainer_side
from benchmarks.children import child
from benchmarks.report import Comparison, compared, main, p50, shuffled
from benchmarks.simulated_workers import Share
from benchmarks.sleeping_trainer import RUN_ID
from benchmarks.trainer_side import GROUP_SIZE, Load
from infra.redis_server import FORGETFUL, own_redis
from pipeline import keys

NUM_PROCESSES = 2  # that simulate workers
MAX_CLIENTS = "16000"  # a connection for each worker, and a few
SPARE_FILES = 100  # of Redis, which holds the most
QUEUED_S = 10.0  # so much work waits beyond what is under way
LOOK_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class Fleet:
    num_workers: int
    under_way: int  # episodes, at any time
    per_s: float  # episodes that end

    def __str__(self) -> str:
        return f"{self.num_workers:,} workers, {self.under_way:,} episodes under way, {self.per_s:g} end a second"


@dataclass(frozen=True, slots=True)
class Plan:
    sizes: tuple[int, ...]  # the first is what the others are compared with
    episode_s: float
    num_rounds: int
    warm_s: float
    window_s: float  # at least
    least_ends: int  # in a window: a small fleet is watched for longer
    least_share: float  # of the episodes that are to end in the window; with fewer, the simulation lagged

    def fleet(self, num_workers: int, *, under_way: int) -> Fleet:
        return Fleet(num_workers, under_way, under_way / self.episode_s)

    @property
    def alike(self) -> tuple[Fleet, ...]:
        return tuple(self.fleet(size, under_way=size) for size in self.sizes)

    @property
    def crowded(self) -> Fleet:
        """As few workers as the smallest fleet has, with the episodes of the largest."""
        return self.fleet(self.sizes[0], under_way=self.sizes[-1])

    def window_for_s(self, fleet: Fleet) -> float:
        return max(self.window_s, self.least_ends / fleet.per_s)


LONG = Plan(
    (10, 100, 1000, 10_000),
    episode_s=200.0,
    num_rounds=2,
    warm_s=4.0,
    window_s=20.0,
    least_ends=10,
    least_share=0.8,
)
SHORT = Plan(
    (10, 200),
    episode_s=10.0,
    num_rounds=1,
    warm_s=2.0,
    window_s=3.0,
    least_ends=5,
    least_share=0.0,
)


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds, and how many episodes they were for."""

    redis_s: float
    trainer_s: float
    num_arrived: int


class TooBusy(Exception):
    """This machine cannot simulate so many at the moment, and what was measured means nothing."""


async def fleet(short: bool) -> list[Comparison]:
    plan = SHORT if short else LONG
    _allow_connections(max(plan.sizes))
    fleets = (*plan.alike, plan.crowded)
    used: dict[Fleet, list[Usage]] = {one: [] for one in fleets}
    for _ in range(plan.num_rounds):
        for one in shuffled(fleets):
            try:
                used[one].append(await _measured(one, plan))
            except TooBusy as error:
                print(f"fleet: a round is left out: {error}", file=sys.stderr)
    smallest, largest = plan.alike[0], plan.alike[-1]
    pairs = [*((one, smallest) for one in plan.alike[1:]), (largest, plan.crowded)]
    whole = [(many, few) for many, few in pairs if used[many] and used[few]]
    if not whole:
        raise RuntimeError("no comparison came about: try again on a quieter machine")
    return [row for many, few in whole for row in _comparisons(many, few, used[many], used[few])]


async def _measured(fleet: Fleet, plan: Plan) -> Usage:
    """Of a window in the middle. Raises TooBusy."""
    window_s = plan.window_for_s(fleet)
    async with _trainer(fleet) as (url, trainer), Redis.from_url(url) as redis:
        with ExitStack() as stack:
            workers = [
                stack.enter_context(child(simulated_workers.run, url, share))[1] for share in shares(fleet)
            ]
            for one in workers:
                await _said(one)
            for one in workers:
                one.send("go")
            await asyncio.sleep(plan.warm_s)
            used = await _watched(redis, trainer, window_s)
            for one in workers:
                one.send("stop")
                lost = await _said(one)
                if lost:
                    raise TooBusy(f"{fleet}: {lost} leases lapsed")
    if used.num_arrived < max(1.0, plan.least_share * fleet.per_s * window_s):
        raise TooBusy(f"{fleet}: only {used.num_arrived} ended in {window_s:g} s")
    return used


@asynccontextmanager
async def _trainer(fleet: Fleet) -> AsyncIterator[tuple[str, Connection]]:
    """URL of a Redis in which work waits for the fleet, and a line to the trainer that asked for it."""
    load = Load(
        num_requests=fleet.under_way + int(QUEUED_S * fleet.per_s) + 2 * GROUP_SIZE, per_s=fleet.per_s
    )
    with ExitStack() as stack:
        url = stack.enter_context(own_redis({**FORGETFUL, "maxclients": MAX_CLIENTS}))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="swerve-bench-"))
        process, trainer = stack.enter_context(child(trainer_side.run, url, Path(directory), load))
        async with Redis.from_url(url) as redis:
            while await redis.zcard(keys.QUEUE) < load.num_requests:
                if not process.is_alive():
                    raise RuntimeError("the trainer ended before it had asked for everything")
                await asyncio.sleep(LOOK_AGAIN_S)
        yield url, trainer


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


def shares(fleet: Fleet) -> Iterator[Share]:
    """Each process simulates every NUM_PROCESSES-th worker."""
    per_worker, more = divmod(fleet.under_way, fleet.num_workers)
    slots = [per_worker + (number < more) for number in range(fleet.num_workers)]
    for first in range(min(NUM_PROCESSES, fleet.num_workers)):
        yield Share(
            first=first,
            slots=tuple(slots[first::NUM_PROCESSES]),
            per_s=fleet.per_s,
            under_way=fleet.under_way,
        )


async def _watched(redis: Redis, trainer: Connection, seconds: float) -> Usage:
    before = await _usage(redis, trainer)
    await asyncio.sleep(seconds)
    after = await _usage(redis, trainer)
    return Usage(
        redis_s=after.redis_s - before.redis_s,
        trainer_s=after.trainer_s - before.trainer_s,
        num_arrived=after.num_arrived - before.num_arrived,
    )


async def _usage(redis: Redis, trainer: Connection) -> Usage:
    """So far."""
    trainer.send("how much?")
    trainer_s = await _said(trainer)
    used = await redis.info("cpu")
    readers: list[dict[str, int | None]] = await redis.xinfo_groups(keys.stream(RUN_ID))
    return Usage(
        redis_s=float(used["used_cpu_user"]) + float(used["used_cpu_sys"]),
        trainer_s=trainer_s,
        num_arrived=readers[0]["entries-read"] or 0,
    )


async def _said(by: Connection) -> Any:
    return await asyncio.to_thread(by.recv)


def _comparisons(many: Fleet, few: Fleet, ours: list[Usage], rival: list[Usage]) -> list[Comparison]:
    figures = {
        "Redis": lambda used: used.redis_s / used.num_arrived,
        "the trainer": lambda used: used.trainer_s / used.num_arrived,
        "both": lambda used: (used.redis_s + used.trainer_s) / used.num_arrived,
    }
    return [
        compared(
            "fleet",
            [[figure(used)] for used in ours],
            [[figure(used)] for used in rival],
            p50,
            rival_name=f"{few.num_workers} workers, {few.under_way:,} episodes",
            unit=f"CPU ms of {who} per rollout, {many}",
            scale=1e3,
        )
        for who, figure in figures.items()
    ]


if __name__ == "__main__":
    sys.exit(main("fleet", __doc__, fleet))
