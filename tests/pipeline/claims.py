"""Requests in the queue and claims on them, as tests of the queue need them."""

import time

from arq.connections import ArqRedis

from pipeline import deadletters, keys, queue, stream
from pipeline.request import Claim, RolloutRequest
from pipeline.trajectory import Failed
from tests.pipeline import samples

BROKEN = Failed(boundary="sandbox", message="container vanished", transient=True)


async def claimed(pool: ArqRedis, request_id: str, worker: str = "host/1") -> Claim:
    claim = await queue.claim(pool, request_id, worker)
    assert isinstance(claim, Claim)
    return claim


async def enqueued(pool: ArqRedis, **fields: object) -> RolloutRequest:
    request = samples.request(**fields)
    await queue.enqueue(pool, request)
    return request


async def taken(pool: ArqRedis, worker: str = "host/1", **fields: object) -> Claim:
    """A claim on a new request that arq has handed out, as it would be in a worker."""
    request = await enqueued(pool, **fields)
    return await claimed(pool, request.id, worker)


async def lapse(pool: ArqRedis, claim: Claim) -> None:
    """The worker dies and time passes: its lease is gone, and it is due again."""
    await pool.delete(keys.lease(claim.request.id))
    # Whole milliseconds, as Redis counts them: a part of one would be due in the next.
    await pool.zadd(keys.queue(), {claim.request.id: int(time.time() * 1000)})


async def dead_lettered(pool: ArqRedis) -> Claim:
    claim = await taken(pool)
    failed = samples.trajectory(claim, turns=(), outcome=BROKEN, reward=None)
    evidence = [deadletters.attempt_failure(claim, BROKEN, detail="Traceback")]
    assert await deadletters.dead_letter(pool, failed, evidence) == "published"
    return claim


async def queued_ids(pool: ArqRedis) -> set[str]:
    return {raw.decode() for raw in await pool.zrange(keys.queue(), 0, -1)}


async def acknowledge_all(pool: ArqRedis) -> None:
    await stream.open_reader(pool, samples.RUN)
    read = [
        *await stream.read_unacknowledged(pool, samples.RUN),
        *await stream.read_new(pool, samples.RUN, block_ms=1),
    ]
    await stream.acknowledge(pool, samples.RUN, [(one.entry_id, one.head.request_id) for one in read])
