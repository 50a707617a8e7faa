"""Runs, workers and requests in the states that the command line shows."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from arq.connections import ArqRedis
from msgspec.structs import replace

from pipeline import census, deadletters, keys, queue, stream
from pipeline.message import encode
from pipeline.request import Claim
from pipeline.trajectory import Failed, head_of
from tests.pipeline import samples

BROKEN = Failed(boundary="sandbox", message="container vanished", transient=True)
RunCommand = Callable[..., Awaitable[tuple[int, str, str]]]
"""Runs one command line; returns its exit status, stdout and stderr."""


async def taken(pool: ArqRedis, **fields: Any) -> Claim:
    request = samples.request(**fields)
    await queue.enqueue(pool, request)
    claim = await queue.claim(pool, request.id, "host/1")
    assert isinstance(claim, Claim)
    return claim


async def answered(pool: ArqRedis, **fields: Any) -> str:
    claim = await taken(pool)
    assert await stream.publish(pool, samples.trajectory(claim, **fields)) == "published"
    return claim.request.id


async def dead_lettered(pool: ArqRedis, failed: Failed = BROKEN, **fields: Any) -> str:
    claim = await taken(pool, **fields)
    evidence = [deadletters.attempt_failure(claim, failed, detail="Traceback: boom")]
    await deadletters.dead_letter(
        pool, samples.trajectory(claim, turns=(), outcome=failed, reward=None), evidence
    )
    return claim.request.id


async def trainer_lives(pool: ArqRedis, **fields: Any) -> None:
    """A heartbeat of the run's trainer."""
    given: dict[str, Any] = {
        **{"run_id": samples.RUN, "phase": "waiting", "detail": "2 of 8"},
        **{"step": 3, "num_steps": 9},
    }
    await census.beat_run(pool, census.RunStatus(**(given | fields)))


async def silent(pool: ArqRedis, run_id: str, seconds: float) -> None:
    """So much time passes after the last heartbeat of the run's trainer."""
    left_s = census.KEEP_RUN_STATUS_S - seconds
    await pool.pexpire(keys.run_status(run_id), int(left_s * 1000))


async def arrived(pool: ArqRedis, number: int, **fields: Any) -> None:
    """So many heads that the trainer has not read."""
    claim = Claim(request=samples.request(), attempt=1, worker="host/1", claimed_at=time.time())
    head = replace(head_of(samples.trajectory(claim), body_bytes=1), **fields)
    for _ in range(number):
        await pool.xadd(keys.stream(samples.RUN), {"head": encode(head)})


async def worker_lives(pool: ArqRedis, name: str = "host/1", **fields: str) -> None:
    now = time.time()
    status = census.WorkerStatus(
        name=name, slots=4, running=(), finished=7, failed=1, started_at=now, updated_at=now, **fields
    )
    await census.beat_worker(pool, status)


async def known_run(pool: ArqRedis) -> None:
    """A run that began and whose trainer is gone."""
    await trainer_lives(pool)
    await pool.delete(keys.run_status(samples.RUN))
