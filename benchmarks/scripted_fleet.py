"""Requests, trajectories and workers without a sandbox or an engine: claims, leases and publications are real, tokens are
made up.

Both benchmarks and tests use it. It is in the benchmarks because those also run where the tests are not installed, and
it needs no torch.
"""

import asyncio
import itertools
import math
import random
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection

import numpy as np
from arq.connections import ArqRedis
from msgspec.structs import replace
from redis.exceptions import RedisError

from pipeline import connection, deadletters, queue, stream
from pipeline.errors import LeaseLost
from pipeline.kinds import ROLLOUT
from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import Claim, EpisodeStatus, Limits, RolloutRequest, Sampling
from pipeline.task import ExitCode, Task
from pipeline.trajectory import (
    FIRST_IN_CONTEXT,
    Failed,
    Reward,
    Submitted,
    Trajectory,
    Turn,
    VersionSpan,
    parents_of,
    reply_digest,
)
from workers.breaker import Breakers
from workers.claim import Claimer, Stage
from workers.process import Taker

VOCAB_SIZE = 512
TYPICAL_TURNS = 5
TYPICAL_FED_TOKENS, TYPICAL_SAMPLED_TOKENS = 120, 60  # of each turn
LOOK_AGAIN_S = 0.02
_numbers = itertools.count()

Verdict = Callable[[RolloutRequest], float | Failed | None]
"""The reward of a request. None: its container vanishes, which is not transient. Or another failure."""

Patches = Callable[[RolloutRequest], bytes]
"""The patch that a request's episode submits."""


def task(name: str, *, problem: str = "p") -> Task:
    return Task(
        id=name,
        repo="r",
        base_commit="",
        image="none",
        workdir="/w",
        problem=problem,
        verdict=ExitCode(eval_script="true"),
    )


def request(run_id: str = "bench") -> RolloutRequest:
    """The next of as many as are wanted, each for a task of its own."""
    number = next(_numbers)
    return RolloutRequest(
        id=f"{run_id}-{number:08d}",
        run_id=run_id,
        purpose="train",
        task=task(f"t{number}", problem="p" * 2000),
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


def alternating(request: RolloutRequest) -> float:
    """Reward 1 for every second member, so that every group has signal."""
    return float(request.member % 2)


def no_patch(request: RolloutRequest) -> bytes:
    return b""


def played(claim: Claim, verdict: float | Failed | None, *, turns: int = 2, patch: bytes = b"") -> Trajectory:
    """A short episode. Its tokens depend on task and member only, so every attempt, run and worker makes the same."""
    vanished = Failed(boundary="sandbox", message="the container vanished", transient=False)
    failed = vanished if verdict is None else verdict if isinstance(verdict, Failed) else None
    reward = None if isinstance(verdict, Failed) else verdict
    return Trajectory(
        claim=claim,
        turns=_turns_of_member(claim.request, turns),
        outcome=failed or Submitted(patch=patch),
        reward=None if reward is None else _reward(reward),
        started_at=claim.claimed_at,
        finished_at=claim.claimed_at,
        traceparent=claim.request.traceparent,
    )


def typical(claim: Claim) -> Trajectory:
    """An episode of 900 tokens, the same for all members but for their patches. Rewards alternate."""
    return Trajectory(
        claim=claim,
        turns=_typical_turns(claim.request.version_at_enqueue),
        # Each patch is different, because equal patches must have equal verdicts.
        outcome=Submitted(patch=b"%d" % claim.request.member),
        reward=_reward(alternating(claim.request)),
        started_at=claim.claimed_at,
        finished_at=time.time(),
    )


def _reward(value: float) -> Reward:
    return Reward(value=value, resolved=value == 1, decided_by="script")


def _turns_of_member(request: RolloutRequest, num_turns: int) -> tuple[Turn, ...]:
    rng = np.random.default_rng(zlib.crc32(f"{request.task.id}/{request.member}".encode()))
    made: list[Turn] = []
    num_kept = 0
    for _ in range(num_turns):
        fed, sampled = rng.integers(3, VOCAB_SIZE, 5), rng.integers(3, VOCAB_SIZE, 4 + request.member)
        made.append(
            Turn(
                kept_tokens=num_kept,
                fed=pack_int32s(fed.tolist()),
                sampled=pack_int32s(sampled.tolist()),
                logprobs=pack_float32s([-6.2] * len(sampled)),
                versions=(VersionSpan(version=request.version_at_enqueue, start=0, end=len(sampled)),),
                stop="stop",
                text="",
            )
        )
        num_kept += len(fed) + len(sampled)
    return with_digests(made)


@cache
def _typical_turns(version: int) -> tuple[Turn, ...]:
    rng = random.Random(7)
    made: list[Turn] = []
    for number in range(TYPICAL_TURNS):
        fed = [rng.randrange(3, VOCAB_SIZE) for _ in range(TYPICAL_FED_TOKENS)]
        sampled = [rng.randrange(3, VOCAB_SIZE) for _ in range(TYPICAL_SAMPLED_TOKENS)]
        made.append(
            Turn(
                kept_tokens=number * (TYPICAL_FED_TOKENS + TYPICAL_SAMPLED_TOKENS),
                fed=pack_int32s(fed),
                sampled=pack_int32s(sampled),
                logprobs=pack_float32s([-rng.random() for _ in sampled]),
                versions=(VersionSpan(version, 0, len(sampled)),),
                stop="stop",
                text="let us see " * 20,
            )
        )
    return with_digests(made)


def with_digests(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """The same, as if an engine had been sent their prompts and had reported their replies."""
    given = tuple(turns)
    made, held = list[Turn](), list[bytes]()
    for turn, parent in zip(given, parents_of(given), strict=True):
        kept = b"" if parent == FIRST_IN_CONTEXT else held[parent][: 4 * turn.kept_tokens]
        prompt = kept + turn.fed
        made.append(replace(turn, digest=reply_digest(prompt, turn.sampled, turn.logprobs)))
        held.append(prompt + turn.sampled)
    return tuple(made)


async def finish(redis: ArqRedis, claim: Claim, verdict: Verdict, patches: Patches = no_patch) -> None:
    """Publish the short episode of a claim, or dead-letter its failure."""
    trajectory = played(claim, verdict(claim.request), patch=patches(claim.request))
    if isinstance(trajectory.outcome, Failed):
        evidence = [deadletters.attempt_failure(claim, trajectory.outcome)]
        await deadletters.dead_letter(redis, trajectory, evidence)
    else:
        await stream.publish(redis, trajectory)


async def answer(redis: ArqRedis, request_id: str, verdict: Verdict = alternating) -> None:
    claim = await queue.claim(redis, request_id, "scripted")
    if isinstance(claim, Claim):
        await finish(redis, claim, verdict)


async def work_off(
    redis: ArqRedis, verdict: Verdict = alternating, patches: Patches = no_patch, *, limit: int | None = None
) -> list[str]:
    """Finish what is queued, one request after the other in the queue's order, until it is empty or `limit` are done.
    Returns the request ids.
    """
    answered: list[str] = []
    while limit is None or len(answered) < limit:
        claims = await queue.take(redis, "scripted", 1)
        if not claims:
            break
        claim = claims[0]
        assert isinstance(claim, Claim)
        await finish(redis, claim, verdict, patches)
        answered.append(claim.request.id)
    return answered


@asynccontextmanager
async def fleet(
    redis_url: str, verdict: Verdict = alternating, patches: Patches = no_patch, *, pace_s: float = 0.0
) -> AsyncIterator[list[str]]:
    """Work beside the body; yields the ids finished so far. Goes on after what a worker survives: a lost lease, a slow Redis.

    With `pace_s` it rests so long after each request, so that a run lasts long enough to be interrupted.
    """
    redis = await connection.connect(redis_url)
    answered: list[str] = []

    async def work() -> None:
        while True:
            with suppress(LeaseLost, RedisError):
                answered.extend(await work_off(redis, verdict, patches, limit=1 if pace_s else None))
            await asyncio.sleep(max(pace_s, LOOK_AGAIN_S))

    worker = asyncio.create_task(work())
    try:
        yield answered
    finally:
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker
        await redis.aclose()


@dataclass(frozen=True, slots=True)
class Durations:
    """How long each member of each group plays: log-normal, and the same whichever worker plays it."""

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
        rng = random.Random(f"{self.seed}/{cursor}/{member}")
        return rng.lognormvariate(math.log(self.median_s), self.sigma)


async def work(url: str, name: str, slots: int, stage: Stage) -> None:
    """The real worker with another stage, until cancelled."""
    redis = await connection.connect(url)
    claimer = Claimer(kind=ROLLOUT, redis=redis, worker=name, stage=stage, breakers=Breakers({}))
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
    """A worker whose episodes only sleep, to be run as a child process. It sends "begun" at its first episode."""
    unsent = ["begun"]

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        if unsent:
            parent.send(unsent.pop())
        await asyncio.sleep(durations.of(claim.request.cursor, claim.request.member))
        return typical(claim)

    asyncio.run(work(url, "bench/process", slots, stage))
