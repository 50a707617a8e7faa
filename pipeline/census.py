"""Who is alive and what there is of everything: read-only counts for `python -m pipeline status` and for the trainer's own display."""

import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import cast

from redis.asyncio import Redis

from pipeline import keys, queue, stream, weights
from pipeline.message import Message, decode, encode

STATUS_EXPIRES_S = 15.0
_FORGET_WORKER_S = 3600.0


class RunStatus(Message, kw_only=True):
    """What the trainer is doing, in its own words; it expires when the trainer does."""

    run_id: str
    phase: str  # e.g. "waiting for trajectories", "optimizer step", "publishing weights", "evaluating"
    detail: str = ""  # e.g. "29 of 48 trajectories of step 7"
    step: int = 0
    num_steps: int = 0
    version: int = 0
    admission: str = ""  # why no request is enqueued at the moment, or how many more may be
    updated_at: float = 0.0


class WorkerStatus(Message, kw_only=True):
    """What one worker process is doing."""

    name: str
    slots: int
    running: tuple[str, ...]  # request ids
    finished: int  # trajectories published since its start
    failed: int
    started_at: float
    updated_at: float
    paused: str = ""  # why it claims nothing


@dataclass(frozen=True, slots=True)
class Claimed:
    request_id: str
    task_id: str
    purpose: str
    lease: queue.Lease
    max_turns: int


@dataclass(frozen=True, slots=True)
class RunCensus:
    """Counts of one run. `unread` heads were not yet delivered to the learner; `unacknowledged` were, but are in no checkpoint yet."""

    run_id: str
    status: RunStatus | None  # None: no trainer alive
    queued: int
    claimed: tuple[Claimed, ...]
    unread: int
    unacknowledged: int
    dead: int
    malformed: int
    learned: weights.WeightVersion | None
    served: weights.ServedWeights | None
    lags: tuple[int, ...]  # versions between the newest and each recent trajectory's first
    outcomes: dict[str, int] = field(default_factory=dict[str, int])  # of recent heads


async def beat_run(redis: Redis, status: RunStatus) -> None:
    """Say what the trainer is doing; expires unless repeated."""
    async with redis.pipeline(transaction=True) as pipe:
        pipe.sadd(keys.runs(), status.run_id)
        pipe.set(keys.run_status(status.run_id), encode(status), ex=int(STATUS_EXPIRES_S))
        await pipe.execute()


async def beat_worker(redis: Redis, status: WorkerStatus) -> None:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.set(keys.worker(status.name), encode(status), ex=int(STATUS_EXPIRES_S))
        pipe.zadd(keys.workers(), {status.name: status.updated_at})
        await pipe.execute()


async def forget_worker(redis: Redis, name: str) -> None:
    """A worker that ends in good order leaves no trace."""
    await redis.delete(keys.worker(name))
    await redis.zrem(keys.workers(), name)


async def run_ids(redis: Redis) -> list[str]:
    found = cast(set[bytes], await redis.smembers(keys.runs()))  # pyright: ignore[reportGeneralTypeIssues, reportUnknownMemberType]
    return sorted(raw.decode() for raw in found)


async def live_workers(redis: Redis) -> list[WorkerStatus]:
    """Workers that beat within STATUS_EXPIRES_S, by name."""
    await redis.zremrangebyscore(keys.workers(), 0, time.time() - _FORGET_WORKER_S)
    names = [raw.decode() for raw in await redis.zrange(keys.workers(), 0, -1)]
    if not names:
        return []
    rows = await redis.mget([keys.worker(name) for name in names])
    return sorted((decode(row, WorkerStatus) for row in rows if row), key=lambda status: status.name)


async def run_census(redis: Redis, run_id: str, *, recent: int = 200) -> RunCensus:
    """Count everything of one run; `recent` heads are looked at for lags and outcomes."""
    raw = await redis.get(keys.run_status(run_id))
    claimed, queued = await _claimed_and_queued(redis, run_id)
    unread, unacknowledged = await _stream_depths(redis, run_id)
    heads = [delivery.head for delivery in await stream.newest_heads(redis, run_id, recent)]
    learned = await weights.newest_version(redis, run_id)
    newest = learned.version if learned else 0
    return RunCensus(
        run_id=run_id,
        status=decode(raw, RunStatus) if raw else None,
        queued=queued,
        claimed=claimed,
        unread=unread,
        unacknowledged=unacknowledged,
        dead=cast(int, await redis.hlen(keys.dead(run_id))),  # pyright: ignore[reportGeneralTypeIssues, reportUnknownMemberType]
        malformed=cast(int, await redis.llen(keys.malformed(run_id))),  # pyright: ignore[reportGeneralTypeIssues, reportUnknownMemberType]
        learned=learned,
        served=await weights.served_weights(redis, run_id),
        lags=tuple(max(0, newest - head.version_first) for head in heads if head.version_first is not None),
        outcomes=dict(Counter(head.outcome for head in heads)),
    )


async def _claimed_and_queued(redis: Redis, run_id: str) -> tuple[tuple[Claimed, ...], int]:
    ids = await queue.open_ids(redis, run_id)
    async with redis.pipeline(transaction=False) as pipe:
        for request_id in ids:
            pipe.get(keys.lease(request_id))
            pipe.zscore(keys.QUEUE, request_id)
        rows = await pipe.execute()
    claimed: list[Claimed] = []
    queued = 0
    for request_id, lease, score in zip(ids, rows[::2], rows[1::2], strict=True):
        request = await queue.stored_request(redis, request_id) if lease else None
        if lease and request is not None:
            claimed.append(
                Claimed(
                    request_id=request_id,
                    task_id=request.task.id,
                    purpose=request.purpose,
                    lease=decode(lease, queue.Lease),
                    max_turns=request.limits.turns,
                )
            )
        elif score is not None:
            queued += 1
    return tuple(claimed), queued


async def _stream_depths(redis: Redis, run_id: str) -> tuple[int, int]:
    if not await redis.exists(keys.stream(run_id)):
        return 0, 0
    groups = cast(list[dict[str, object]], await redis.xinfo_groups(keys.stream(run_id)))
    if not groups:
        return cast(int, await redis.xlen(keys.stream(run_id))), 0
    return cast(int, groups[0].get("lag") or 0), cast(int, groups[0]["pending"])


async def fleet_id(redis: Redis) -> str:
    """The name that everything on this Redis shares; made by whoever asks first."""
    await redis.set(keys.fleet(), secrets.token_hex(6), nx=True)
    name = await redis.get(keys.fleet())
    assert name is not None
    return name.decode()
