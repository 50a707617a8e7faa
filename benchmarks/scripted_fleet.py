"""Requests and trajectories without a sandbox or an engine, and a real worker whose episodes only sleep.

The claims, leases and publications are real. Tokens are made up, and are the same for all.
"""

import asyncio
import itertools
import math
import random
import time
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection

from pipeline import connection
from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import Claim, Limits, RolloutRequest, Sampling
from pipeline.task import ExitCode, Task
from pipeline.trajectory import Reward, Submitted, Trajectory, Turn, VersionSpan
from workers.breaker import Breakers
from workers.claim import Claimer, Progress, Stage
from workers.taker import Taker

VOCAB_SIZE = 256
NUM_TURNS = 5
FED_TOKENS, SAMPLED_TOKENS = 120, 60  # of each turn
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Durations:
    """How long each member of each group plays, log-normal: the same whoever plays it."""

    median_s: float
    p99_over_median: float
    seed: int = 0

    @property
    def sigma(self) -> float:
        return math.log(self.p99_over_median) / 2.3263 if self.p99_over_median > 1 else 0.0

    @property
    def mean_s(self) -> float:
        return self.median_s * math.exp(self.sigma**2 / 2)

    def of(self, cursor: int, member: int) -> float:
        drawn = random.Random(f"{self.seed}/{cursor}/{member}")
        return drawn.lognormvariate(math.log(self.median_s), self.sigma)


def task(name: str) -> Task:
    return Task(
        id=name,
        repo="r",
        base_commit="",
        image="none",
        workdir="/w",
        problem="p" * 2000,
        verdict=ExitCode(eval_script="true"),
    )


def request(run_id: str = "bench") -> RolloutRequest:
    number = next(_numbers)
    return RolloutRequest(
        id=f"{run_id}-{number:08d}",
        run_id=run_id,
        purpose="train",
        task=task(f"t{number}"),
        group_id="g00000000",
        member=number,
        group_size=1,
        version_at_enqueue=0,
        sampling=Sampling(),
        limits=Limits(),
        agent_config="",
        tokenizer="",
        enqueued_at=time.time(),
    )


def played(claim: Claim) -> Trajectory:
    """Rewards alternate within a group, so that every group has something to teach."""
    reward = float(claim.request.member % 2)
    return Trajectory(
        claim=claim,
        turns=_turns(claim.request.version_at_enqueue),
        outcome=Submitted(patch=b"%d" % claim.request.member),  # one patch, one verdict
        reward=Reward(value=reward, resolved=reward == 1.0, decided_by="script"),
        started_at=claim.claimed_at,
        finished_at=time.time(),
    )


@cache
def _turns(version: int) -> tuple[Turn, ...]:
    drawn = random.Random(7)
    made: list[Turn] = []
    for number in range(NUM_TURNS):
        fed = [drawn.randrange(3, VOCAB_SIZE) for _ in range(FED_TOKENS)]
        sampled = [drawn.randrange(3, VOCAB_SIZE) for _ in range(SAMPLED_TOKENS)]
        made.append(
            Turn(
                kept_tokens=number * (FED_TOKENS + SAMPLED_TOKENS),
                fed=pack_int32s(fed),
                sampled=pack_int32s(sampled),
                logprobs=pack_float32s([-drawn.random() for _ in sampled]),
                versions=(VersionSpan(version, 0, len(sampled)),),
                stop="stop",
                text="let us see " * 20,
            )
        )
    return tuple(made)


async def work(url: str, name: str, slots: int, stage: Stage) -> None:
    """A worker until cancelled: the product's own, but for the stage."""
    redis = await connection.connect(url)
    claimer = Claimer(redis=redis, worker=name, stage=stage, breakers=Breakers({}))
    taker = Taker(claimer, slots=slots)
    running = asyncio.create_task(taker.async_run())
    try:
        await asyncio.shield(running)
    finally:
        taker.stop()
        await asyncio.wait({running})
        await taker.drain(0)
        await redis.aclose()


def work_in_process(parent: Connection, url: str, slots: int, durations: Durations) -> None:
    """A worker to be run as a child; it says when its first episode begins."""
    unsaid = ["begun"]

    async def stage(claim: Claim, progress: Progress) -> Trajectory:
        if unsaid:
            parent.send(unsaid.pop())
        await asyncio.sleep(durations.of(claim.request.cursor, claim.request.member))
        return played(claim)

    asyncio.run(work(url, "bench/process", slots, stage))
