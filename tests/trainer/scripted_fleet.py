"""A worker without a sandbox or an engine: real claims and publications, made-up turns that depend on task
and member only.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import numpy as np
from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import connection, deadletters, queue, stream
from pipeline.errors import LeaseLost
from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import Claim, RolloutRequest
from pipeline.task import ExitCode, Task
from pipeline.trajectory import Failed, Reward, Submitted, Trajectory, Turn, VersionSpan

VOCAB_SIZE = 512

Verdict = Callable[[RolloutRequest], float | Failed | None]
"""The reward of a request; None: its container vanishes for good; or another way to break."""

Patches = Callable[[RolloutRequest], bytes]
"""The patch that a request ends with."""


def task(name: str) -> Task:
    return Task(
        id=name,
        repo="r",
        base_commit="",
        image="none",
        workdir="/w",
        problem="p",
        verdict=ExitCode(eval_script="true"),
    )


def alternating(request: RolloutRequest) -> float:
    """Every group has signal."""
    return float(request.member % 2)


def no_patch(request: RolloutRequest) -> bytes:
    return b""


def played(claim: Claim, verdict: float | Failed | None, *, turns: int = 2, patch: bytes = b"") -> Trajectory:
    """The same tokens for the same task and member, whichever try, run or worker it is."""
    request = claim.request
    random = np.random.default_rng(zlib.crc32(f"{request.task.id}/{request.member}".encode()))
    made: list[Turn] = []
    held = 0
    for _ in range(turns):
        fed, sampled = random.integers(3, VOCAB_SIZE, 5), random.integers(3, VOCAB_SIZE, 4 + request.member)
        made.append(
            Turn(
                kept_tokens=held,
                fed=pack_int32s(fed.tolist()),
                sampled=pack_int32s(sampled.tolist()),
                logprobs=pack_float32s([-6.2] * len(sampled)),
                versions=(VersionSpan(version=request.version_at_enqueue, start=0, end=len(sampled)),),
                stop="stop",
                text="",
            )
        )
        held += len(fed) + len(sampled)
    vanished = Failed(boundary="sandbox", message="the container vanished", transient=False)
    broke = vanished if verdict is None else verdict if isinstance(verdict, Failed) else None
    reward = None if isinstance(verdict, Failed) else verdict
    return Trajectory(
        claim=claim,
        turns=tuple(made),
        outcome=broke or Submitted(patch=patch),
        reward=None if reward is None else Reward(value=reward, resolved=reward == 1, decided_by="script"),
        started_at=claim.claimed_at,
        finished_at=claim.claimed_at,
        traceparent=request.traceparent,
    )


async def work_off(
    redis: ArqRedis, verdict: Verdict = alternating, patches: Patches = no_patch, *, limit: int | None = None
) -> list[str]:
    """Answer what is queued, one after the other in its order, until nothing is left; returns the request
    ids.
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


async def answer(redis: ArqRedis, request_id: str, verdict: Verdict = alternating) -> None:
    claim = await queue.claim(redis, request_id, "scripted")
    if isinstance(claim, Claim):
        await finish(redis, claim, verdict)


async def finish(redis: ArqRedis, claim: Claim, verdict: Verdict, patches: Patches = no_patch) -> None:
    trajectory = played(claim, verdict(claim.request), patch=patches(claim.request))
    if isinstance(trajectory.outcome, Failed):
        await deadletters.dead_letter(redis, trajectory, [deadletters.attempt_failure(claim, trajectory.outcome)])
    else:
        await stream.publish(redis, trajectory)


@asynccontextmanager
async def fleet(
    redis_url: str, verdict: Verdict = alternating, patches: Patches = no_patch
) -> AsyncIterator[list[str]]:
    """Works beside the body; yields the ids answered so far. Outlives what a worker does: a lost lease, a Redis that is slow."""
    redis = await connection.connect(redis_url)
    answered: list[str] = []

    async def work() -> None:
        while True:
            with suppress(LeaseLost, RedisError):
                answered.extend(await work_off(redis, verdict, patches))
            await asyncio.sleep(0.02)

    worker = asyncio.create_task(work())
    try:
        yield answered
    finally:
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker
        await redis.aclose()
