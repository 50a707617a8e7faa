"""Workers without episodes: each claims, renews leases, sends heartbeats and publishes as a real one, on its own connections.

When an episode ends depends on its request's place in the queue, so that episodes end at a given rate with any number of
workers; members of one group end up to a quarter of an episode's time apart. The workers are always full, as in a fleet
that the learner waits for; an idle worker would also block on a list.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import uvloop
from redis.asyncio import Redis

from benchmarks.lean_client import LeanPool
from benchmarks.swe_episode import played
from benchmarks.trainer_side import GROUP_SIZE
from pipeline import census, queue, stream
from pipeline.queue import RENEW_S, Lease
from pipeline.request import Claim

CONCURRENT_FILLS = 200
LOOK_AGAIN_S = 0.2  # when the first request in the queue is still claimed


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """What one process simulates: a worker for each entry of `slots`, of a fleet whose episodes end at `per_s`."""

    first: int  # number of the first worker
    slots: tuple[int, ...]
    per_s: float
    num_running: int  # episodes of the whole fleet


@dataclass(slots=True)
class Simulation:
    per_s: float
    order: Sequence[int]
    """In which requests end that follow each other in the queue, repeated for every len(order) requests."""

    began_at: float | None = None  # on the loop's clock; before that no episode ends
    num_filled: int = 0
    num_lost: int = 0
    filling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENT_FILLS))

    def left_s(self, claim: Claim) -> float:
        if self.began_at is None:
            return float("inf")
        block, place = divmod(claim.request.cursor * GROUP_SIZE + claim.request.member, len(self.order))
        place = block * len(self.order) + self.order[place]
        return self.began_at + (place + 1) / self.per_s - asyncio.get_running_loop().time()


class SimulatedWorker:
    def __init__(self, name: str, slots: int, simulation: Simulation) -> None:
        self._name = name
        self._slots = slots
        self._simulation = simulation
        self._running: dict[str, None] = {}
        self._finished = 0

    async def work(self, url: str) -> None:
        redis, started_at = LeanPool.client(url), time.time()
        async with self._simulation.filling:  # Redis refuses more connecting clients than its backlog
            every_s = await census.beat_worker(redis, self._status(started_at))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat(redis, started_at, every_s))
            for _ in range(self._slots):
                tasks.create_task(self._slot(redis))

    async def _beat(self, redis: Redis, started_at: float, every_s: float) -> None:
        await asyncio.sleep(random.uniform(0, every_s))
        while True:
            every_s = await census.beat_worker(redis, self._status(started_at), every_s=every_s)
            await asyncio.sleep(every_s)

    def _status(self, started_at: float) -> census.WorkerStatus:
        return census.WorkerStatus(
            name=self._name,
            slots=self._slots,
            running=tuple(self._running),
            finished=self._finished,
            failed=0,
            started_at=started_at,
            updated_at=time.time(),
        )

    async def _slot(self, redis: Redis) -> None:
        async with self._simulation.filling:
            claim = await self._take(redis)
        self._simulation.num_filled += 1
        await asyncio.sleep(random.uniform(0, RENEW_S))
        while True:
            await self._play(redis, claim)
            claim = await self._take(redis)

    async def _take(self, redis: Redis) -> Claim:
        while True:
            for claim in await queue.take(redis, self._name, 1):
                assert isinstance(claim, Claim), claim
                self._running[claim.request.id] = None
                return claim
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _play(self, redis: Redis, claim: Claim) -> None:
        request = claim.request
        lease = Lease(
            worker=self._name,
            attempt=claim.attempt,
            claimed_at=claim.claimed_at,
            phase="agent",
            turn=7,
            task_id=request.task.id,
            purpose=request.purpose,
            group_id=request.group_id,
            max_turns=request.limits.turns,
        )
        while (left_s := self._simulation.left_s(claim)) > 0:
            await asyncio.sleep(min(left_s, RENEW_S))
            if left_s > RENEW_S and not await queue.renew(redis, claim, lease):
                self._simulation.num_lost += 1
        verdict = await stream.publish(redis, played(claim))
        self._simulation.num_lost += verdict != "published"
        del self._running[request.id]
        self._finished += 1


def run(parent: Connection, url: str, share: WorkerShare) -> None:
    """The child process: reports when every slot is filled, lets episodes end from the first message on, and at the second
    one reports how many claims it lost.
    """
    uvloop.run(_simulate(parent, url, share))


async def _simulate(parent: Connection, url: str, share: WorkerShare) -> None:
    num_ordered = max(GROUP_SIZE, share.num_running // 4)
    simulation = Simulation(share.per_s, random.Random(0).sample(range(num_ordered), num_ordered))
    workers = [
        SimulatedWorker(f"host-{share.first}/{number:05d}", slots, simulation)
        for number, slots in enumerate(share.slots)
    ]
    tasks = [asyncio.create_task(worker.work(url)) for worker in workers]
    while simulation.num_filled < sum(share.slots):
        done = [task for task in tasks if task.done()]
        for task in done:
            await task
        await asyncio.sleep(0.05)
    parent.send("filled")
    await asyncio.to_thread(parent.recv)
    simulation.began_at = asyncio.get_running_loop().time()
    await asyncio.to_thread(parent.recv)
    parent.send(simulation.num_lost + sum(task.done() for task in tasks))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
