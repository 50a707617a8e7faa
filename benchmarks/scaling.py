"""What a rollout costs Redis and the trainer with 10, 100, 1,000 and 10,000 workers.

It answers two questions. Does a rollout cost more as the fleet grows? Every worker plays one episode after the other, so
larger fleets play more. And what do many workers cost? The episodes of the largest fleet, at the same rate, are also run by
as few workers as the smallest fleet has, so that only the number of workers differs.

Each worker has its own connection, renews the lease of each of its claims, sends heartbeats and publishes trajectories of a
real size. Redis is real, and so is the trainer, in its own process, without the learning.
`python -m benchmarks.scaling [--json] [--short]`
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
from benchmarks.child_process import child
from benchmarks.report import Comparison, compared, main, p50, shuffled
from benchmarks.simulated_workers import WorkerShare
from benchmarks.sleeping_trainer import RUN_ID
from benchmarks.trainer_side import GROUP_SIZE, Load
from infra.redis_server import FORGETFUL, own_redis
from pipeline import keys

NUM_PROCESSES = 2  # that simulate workers
MAX_CLIENTS = "16000"  # a connection for each worker, and some more
SPARE_FILES = 100  # of Redis, which has the most open files
QUEUED_S = 10.0  # of work wait in the queue
LOOK_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class FleetSize:
    num_workers: int
    num_running: int  # episodes, at any time
    per_s: float  # episodes that end

    def __str__(self) -> str:
        return f"{self.num_workers:,} workers, {self.num_running:,} running episodes, {self.per_s:g} end a second"


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    sizes: tuple[int, ...]  # the first is what the others are compared with
    episode_s: float
    num_rounds: int
    warm_up_s: float
    window_s: float  # at least
    min_ends: int  # in a window: a small fleet is measured for longer
    min_share: float  # of the episodes that should end in the window; with fewer, the simulation was too slow
    max_lost_leases: int  # with more, it was too slow as well

    def fleet(self, num_workers: int, *, num_running: int) -> FleetSize:
        return FleetSize(num_workers, num_running, num_running / self.episode_s)

    @property
    def growing(self) -> tuple[FleetSize, ...]:
        return tuple(self.fleet(size, num_running=size) for size in self.sizes)

    @property
    def few_workers(self) -> FleetSize:
        """The episodes of the largest fleet on the workers of the smallest."""
        return self.fleet(self.sizes[0], num_running=self.sizes[-1])

    def window_for_s(self, fleet: FleetSize) -> float:
        return max(self.window_s, self.min_ends / fleet.per_s)


LONG = ScalingPlan(
    (10, 100, 1000, 10_000),
    episode_s=200.0,
    num_rounds=2,
    warm_up_s=4.0,
    window_s=20.0,
    min_ends=10,
    min_share=0.8,
    max_lost_leases=0,
)
SHORT = ScalingPlan(
    (10, 200),
    episode_s=10.0,
    num_rounds=1,
    warm_up_s=2.0,
    window_s=3.0,
    min_ends=5,
    min_share=0.0,
    max_lost_leases=1_000_000,
)


@dataclass(frozen=True, slots=True)
class FleetCpu:
    """CPU seconds, and how many episodes they were for."""

    redis_s: float
    trainer_s: float
    num_arrived: int


class MachineTooBusy(Exception):
    """The simulation could not keep up, so the measurement means nothing."""


async def scaling(short: bool) -> list[Comparison]:
    plan = SHORT if short else LONG
    _allow_connections(max(plan.sizes))
    fleets = (*plan.growing, plan.few_workers)
    used: dict[FleetSize, list[FleetCpu]] = {one: [] for one in fleets}
    for _ in range(plan.num_rounds):
        for one in shuffled(fleets):
            try:
                used[one].append(await _measured(one, plan))
            except MachineTooBusy as error:
                print(f"scaling: a round is left out: {error}", file=sys.stderr)
    smallest, largest = plan.growing[0], plan.growing[-1]
    pairs = [*((one, smallest) for one in plan.growing[1:]), (largest, plan.few_workers)]
    whole = [(many, few) for many, few in pairs if used[many] and used[few]]
    if not whole:
        raise RuntimeError("no comparison is possible: try again on a quieter machine")
    return [row for many, few in whole for row in _comparisons(many, few, used[many], used[few])]


async def _measured(fleet: FleetSize, plan: ScalingPlan) -> FleetCpu:
    """Measure a window after the warm-up. Raises MachineTooBusy."""
    window_s = plan.window_for_s(fleet)
    async with _trainer(fleet) as (url, trainer), Redis.from_url(url) as redis:
        with ExitStack() as stack:
            workers = [
                stack.enter_context(child(simulated_workers.run, url, share))[1] for share in shares(fleet)
            ]
            for one in workers:
                await _received(one)
            for one in workers:
                one.send("go")
            await asyncio.sleep(plan.warm_up_s)
            used = await _measured_window(redis, trainer, window_s)
            for one in workers:
                one.send("stop")
                lost = await _received(one)
                if lost > plan.max_lost_leases:
                    raise MachineTooBusy(f"{fleet}: {lost} leases were lost")
    if used.num_arrived < max(1.0, plan.min_share * fleet.per_s * window_s):
        raise MachineTooBusy(f"{fleet}: only {used.num_arrived} episodes ended in {window_s:g} s")
    return used


@asynccontextmanager
async def _trainer(fleet: FleetSize) -> AsyncIterator[tuple[str, Connection]]:
    """URL of a Redis with requests for the fleet in its queue, and a connection to the trainer that enqueued them."""
    load = Load(
        num_requests=fleet.num_running + int(QUEUED_S * fleet.per_s) + 2 * GROUP_SIZE, per_s=fleet.per_s
    )
    with ExitStack() as stack:
        url = stack.enter_context(own_redis({**FORGETFUL, "maxclients": MAX_CLIENTS}))
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="swerve-bench-"))
        process, trainer = stack.enter_context(child(trainer_side.run, url, Path(directory), load))
        async with Redis.from_url(url) as redis:
            while await redis.zcard(keys.queue()) < load.num_requests:
                if not process.is_alive():
                    raise RuntimeError("the trainer ended before it had enqueued everything")
                await asyncio.sleep(LOOK_AGAIN_S)
        yield url, trainer


def _allow_connections(num_workers: int) -> None:
    """Raises RuntimeError if the system does not allow a process that many."""
    wanted = num_workers + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted > hard != resource.RLIM_INFINITY:
        raise RuntimeError(
            f"{num_workers} workers take {wanted} open files, and {hard} are allowed: raise `ulimit -Hn`"
        )
    if wanted > soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def shares(fleet: FleetSize) -> Iterator[WorkerShare]:
    """Each process simulates every NUM_PROCESSES-th worker."""
    per_worker, more = divmod(fleet.num_running, fleet.num_workers)
    slots = [per_worker + (number < more) for number in range(fleet.num_workers)]
    for first in range(min(NUM_PROCESSES, fleet.num_workers)):
        yield WorkerShare(
            first=first,
            slots=tuple(slots[first::NUM_PROCESSES]),
            per_s=fleet.per_s,
            num_running=fleet.num_running,
        )


async def _measured_window(redis: Redis, trainer: Connection, seconds: float) -> FleetCpu:
    before = await _cpu_so_far(redis, trainer)
    await asyncio.sleep(seconds)
    after = await _cpu_so_far(redis, trainer)
    return FleetCpu(
        redis_s=after.redis_s - before.redis_s,
        trainer_s=after.trainer_s - before.trainer_s,
        num_arrived=after.num_arrived - before.num_arrived,
    )


async def _cpu_so_far(redis: Redis, trainer: Connection) -> FleetCpu:
    trainer.send("how much?")
    trainer_s = await _received(trainer)
    used = await redis.info("cpu")
    readers: list[dict[str, int | None]] = await redis.xinfo_groups(keys.stream(RUN_ID))
    return FleetCpu(
        redis_s=float(used["used_cpu_user"]) + float(used["used_cpu_sys"]),
        trainer_s=trainer_s,
        num_arrived=readers[0]["entries-read"] or 0,
    )


async def _received(by: Connection) -> Any:
    return await asyncio.to_thread(by.recv)


def _comparisons(
    many: FleetSize, few: FleetSize, ours: list[FleetCpu], rival: list[FleetCpu]
) -> list[Comparison]:
    figures = {
        "Redis": lambda used: used.redis_s / used.num_arrived,
        "the trainer": lambda used: used.trainer_s / used.num_arrived,
        "both": lambda used: (used.redis_s + used.trainer_s) / used.num_arrived,
    }
    return [
        compared(
            "scaling",
            [[figure(used)] for used in ours],
            [[figure(used)] for used in rival],
            p50,
            rival_name=f"{few.num_workers} workers, {few.num_running:,} episodes",
            unit=f"CPU ms of {who} per rollout, {many}",
            scale=1e3,
        )
        for who, figure in figures.items()
    ]


if __name__ == "__main__":
    sys.exit(main("scaling", __doc__, scaling))
