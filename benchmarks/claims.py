"""How soon a request is claimed, how soon the claim of a killed worker is taken over, and whether workers of very different
sizes are all kept busy: ours against arq with its defaults, on the same Redis.

arq's takeover is read, not waited for: no worker may take the job of a killed one until its key expires, which takes five
minutes with the default time limit of a job. `python -m benchmarks.claims [--json] [--short]`
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from arq.connections import ArqRedis, RedisSettings, create_pool
from arq.constants import in_progress_key_prefix
from arq.worker import Worker, func

from benchmarks import scripted_fleet
from benchmarks.child_process import child
from benchmarks.report import Comparison, compared, main, p50, p95, shuffled
from benchmarks.scripted_fleet import Durations
from infra.redis_server import own_redis, socket_of
from pipeline import connection, queue
from pipeline.request import Claim, EpisodeStatus
from pipeline.trajectory import Trajectory

RIVAL = "arq's defaults"
JOB = "job"
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class ClaimsPlan:
    num_rounds: int
    num_claims: int  # of each, in a round
    num_takeovers: int
    sizes: tuple[tuple[int, ...], ...]
    episode_s: float
    window_s: float


LONG = ClaimsPlan(10, 10, num_takeovers=5, sizes=((1, 8, 64), (1, 8, 160)), episode_s=2.0, window_s=10.0)
SHORT = ClaimsPlan(1, 4, num_takeovers=1, sizes=((1, 8, 64),), episode_s=0.5, window_s=1.5)


async def claims(short: bool) -> list[Comparison]:
    plan = SHORT if short else LONG
    found: list[Comparison] = []
    with own_redis() as url:
        found += await latencies(url, plan)
        found.append(await takeovers(url, plan))
    for sizes in plan.sizes:
        with own_redis() as url:
            found += await shares(url, sizes, plan)
    return found


async def latencies(url: str, plan: ClaimsPlan) -> list[Comparison]:
    """Seconds from the call that enqueues to the first line of the stage, one request at a time to an idle worker."""
    begun: asyncio.Queue[float] = asyncio.Queue()

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        begun.put_nowait(time.perf_counter())
        return scripted_fleet.typical(claim)

    async def job(ctx: dict[str, Any]) -> None:
        begun.put_nowait(time.perf_counter())

    waits: dict[str, list[list[float]]] = {"ours": [], RIVAL: []}
    async with _beside(scripted_fleet.work(url, "bench/1", 4, stage)), _arq(url, job) as arq:
        redis = await connection.connect(url)
        for _ in range(plan.num_rounds):
            for name in shuffled(waits):
                waits[name].append([])
                for _ in range(plan.num_claims):
                    # Enqueue at a random point between two polls of arq.
                    await asyncio.sleep(random.uniform(0.05, 0.6))
                    request, asked = scripted_fleet.request(), time.perf_counter()
                    if name == RIVAL:
                        await arq.enqueue_job(JOB)
                    else:
                        await queue.enqueue(redis, request)
                    waits[name][-1].append(await asyncio.wait_for(begun.get(), PATIENCE_S) - asked)
        await redis.aclose()
    return [
        compared(
            "claims",
            waits["ours"],
            waits[RIVAL],
            statistic,
            rival_name=RIVAL,
            unit=f"ms from enqueue to stage, {word}",
            scale=1e3,
        )
        for word, statistic in (("p50", p50), ("p95", p95))
    ]


async def takeovers(url: str, plan: ClaimsPlan) -> Comparison:
    """Seconds from a SIGKILL to the next worker's stage; for arq, the remaining life of its key."""
    ours = [await _our_takeover(url) for _ in range(plan.num_takeovers)]
    theirs = [await _arq_takeover(url)]
    return compared(
        "claims",
        [ours],
        [theirs],
        max,
        rival_name=f"{RIVAL} (remaining life of its in-progress key)",
        unit="s from SIGKILL to the next worker's stage, longest",
    )


async def _our_takeover(url: str) -> float:
    begun: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        begun.set_result(time.perf_counter())
        return scripted_fleet.typical(claim)

    redis = await connection.connect(url)
    with child(scripted_fleet.work_in_process, url, 1, Durations(1000.0, 1.0)) as (victim, messages):
        await queue.enqueue(redis, scripted_fleet.request())
        await asyncio.to_thread(messages.recv)
        async with _beside(scripted_fleet.work(url, "bench/successor", 4, stage)):
            # Kill at a random point between two renewals of the lease.
            await asyncio.sleep(random.uniform(2.0, 4.0))
            victim.kill()
            killed = time.perf_counter()
            await asyncio.wait_for(begun, PATIENCE_S)
    await redis.aclose()
    return begun.result() - killed


async def _arq_takeover(url: str) -> float:
    redis = await create_pool(RedisSettings(unix_socket_path=socket_of(url)))
    job = await redis.enqueue_job(JOB)
    assert job is not None
    key = in_progress_key_prefix + job.job_id
    with child(_arq_victim, url):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                left_ms = await redis.pttl(key)
                if left_ms > 0:
                    break
                await asyncio.sleep(0.05)
    await redis.flushdb()
    await redis.aclose()
    return left_ms / 1000


async def _sleep_long(ctx: dict[str, Any]) -> None:
    await asyncio.sleep(1000)


def _arq_victim(_: Connection, url: str) -> None:
    _arq_worker(url, _sleep_long).run()


class BusyTime:
    """How long the slots of each of several workers were taken, since the last `restart`."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._taken = dict.fromkeys(sizes, 0)
        self.restart()

    def restart(self) -> None:
        self._since = time.perf_counter()
        self._until = dict.fromkeys(self._taken, self._since)
        self._slot_s = dict.fromkeys(self._taken, 0.0)

    async def episode(self, slots: int, seconds: float) -> None:
        """Take a slot of the worker with `slots` slots."""
        self._change(slots, 1)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._change(slots, -1)

    def share(self, slots: int) -> float:
        self._change(slots, 0)
        return self._slot_s[slots] / slots / (self._until[slots] - self._since)

    def _change(self, slots: int, by: int) -> None:
        now = time.perf_counter()
        self._slot_s[slots] += self._taken[slots] * (now - self._until[slots])
        self._until[slots] = now
        self._taken[slots] += by


async def shares(url: str, sizes: Sequence[int], plan: ClaimsPlan) -> list[Comparison]:
    """The share of its slots' time that each of several workers is busy, with more work than they can do."""
    sides = [("ours", _our_share), (RIVAL, _arq_share)]
    found = {name: await measure(url, sizes, plan) for name, measure in shuffled(sides)}
    others = "+".join(map(str, sizes))
    return [
        Comparison(
            name="claims",
            ours=found["ours"][slots],
            rival=found[RIVAL][slots],
            rival_name=RIVAL,
            unit=f"share of time busy, the worker with {slots} slots of {others}, "
            f"episodes of {plan.episode_s:g} s",
        )
        for slots in sizes
    ]


async def _our_share(url: str, sizes: Sequence[int], plan: ClaimsPlan) -> dict[int, float]:
    busy = BusyTime(sizes)

    def stage_of(slots: int) -> Any:
        async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
            await busy.episode(slots, _length(plan))
            return scripted_fleet.typical(claim)

        return stage

    redis = await connection.connect(url)
    for _ in range(_num_needed(sizes, plan)):
        await queue.enqueue(redis, scripted_fleet.request())
    await redis.aclose()
    workers = [scripted_fleet.work(url, f"bench/{slots}", slots, stage_of(slots)) for slots in sizes]
    return await _shares_of(busy, workers, sizes, plan)


async def _arq_share(url: str, sizes: Sequence[int], plan: ClaimsPlan) -> dict[int, float]:
    busy = BusyTime(sizes)

    async def episode(ctx: dict[str, Any]) -> None:
        await busy.episode(ctx["slots"], _length(plan))

    redis = await create_pool(RedisSettings(unix_socket_path=socket_of(url)))
    for _ in range(_num_needed(sizes, plan)):
        await redis.enqueue_job(JOB)
    await redis.aclose()
    workers = [_arq_worker(url, episode, max_jobs=slots, ctx={"slots": slots}) for slots in sizes]
    try:
        return await _shares_of(busy, [worker.async_run() for worker in workers], sizes, plan)
    finally:
        for worker in workers:
            await _closed(worker)


async def _shares_of(
    busy: BusyTime, workers: Sequence[Any], sizes: Sequence[int], plan: ClaimsPlan
) -> dict[int, float]:
    tasks = [asyncio.create_task(worker) for worker in workers]
    await asyncio.sleep(1.0)
    busy.restart()
    await asyncio.sleep(plan.window_s)
    running = {slots: busy.share(slots) for slots in sizes}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return running


def _length(plan: ClaimsPlan) -> float:
    return random.uniform(0.5, 1.5) * plan.episode_s


def _num_needed(sizes: Sequence[int], plan: ClaimsPlan) -> int:
    """More than can be done before the end of the window."""
    return int(sum(sizes) * (2 + (2 + plan.window_s) / plan.episode_s))


@asynccontextmanager
async def _beside(work: Any) -> AsyncGenerator[None, None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def _arq(url: str, job: Any) -> AsyncGenerator[ArqRedis, None]:
    """A worker of arq beside the body, and a pool to enqueue to it."""
    worker = _arq_worker(url, job)
    pool = await create_pool(RedisSettings(unix_socket_path=socket_of(url)))
    async with _beside(worker.async_run()):
        yield pool
    await _closed(worker)
    await pool.aclose()


async def _closed(worker: Worker) -> None:
    """arq cancels its jobs, and that cancellation reaches `close` too."""
    with suppress(asyncio.CancelledError):
        await worker.close()


def _arq_worker(url: str, job: Any, **settings: Any) -> Worker:
    return Worker(
        [func(job, name=JOB)],
        redis_settings=RedisSettings(unix_socket_path=socket_of(url)),
        handle_signals=False,
        **settings,
    )


if __name__ == "__main__":
    sys.exit(main("claims", __doc__, claims))
