"""A worker without a sandbox or an engine: real claims and publications, made-up turns that depend on task
and member only.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import numpy as np
from arq.connections import ArqRedis

from pipeline import keys, queue, stream
from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import Claim, RolloutRequest
from pipeline.task import ExitCode, Task
from pipeline.trajectory import Failed, Reward, Submitted, Trajectory, Turn, VersionSpan

VOCAB_SIZE = 512

Verdict = Callable[[RolloutRequest], float | None]
"""The reward of a request; None: its rollout breaks for good."""


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


def played(claim: Claim, reward: float | None, *, turns: int = 2) -> Trajectory:
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
    broke = Failed(boundary="sandbox", message="the container vanished", transient=False)
    return Trajectory(
        claim=claim,
        turns=tuple(made),
        outcome=broke if reward is None else Submitted(patch=b""),
        reward=None if reward is None else Reward(value=reward, resolved=reward == 1, decided_by="script"),
        started_at=claim.claimed_at,
        finished_at=claim.claimed_at,
        traceparent=request.traceparent,
    )


async def work_off(redis: ArqRedis, verdict: Verdict = alternating, *, limit: int | None = None) -> list[str]:
    """Answer what is queued, one after the other in its order, until nothing is left; returns the request
    ids.
    """
    answered: list[str] = []
    while limit is None or len(answered) < limit:
        ids = await redis.zrange(keys.QUEUE, 0, 0)
        if not ids:
            break
        await answer(redis, ids[0].decode(), verdict)
        answered.append(ids[0].decode())
    return answered


async def answer(redis: ArqRedis, request_id: str, verdict: Verdict = alternating) -> None:
    claim = await queue.claim(redis, request_id, "scripted")
    await redis.zrem(keys.QUEUE, request_id)
    await redis.delete(keys.arq_job(request_id))
    if not isinstance(claim, Claim):
        return
    trajectory = played(claim, verdict(claim.request))
    if isinstance(trajectory.outcome, Failed):
        await queue.record_failure(redis, claim, trajectory.outcome)
        await queue.bury(redis, claim)
    await stream.publish(redis, trajectory)


@asynccontextmanager
async def fleet(redis_url: str, verdict: Verdict = alternating) -> AsyncIterator[list[str]]:
    """Works beside the body; yields the ids answered so far."""
    redis = await queue.connect(redis_url)
    answered: list[str] = []

    async def work() -> None:
        while True:
            answered.extend(await work_off(redis, verdict))
            await asyncio.sleep(0.02)

    worker = asyncio.create_task(work())
    try:
        yield answered
    finally:
        worker.cancel()
        with suppress(asyncio.CancelledError):
            await worker
        await redis.aclose()
