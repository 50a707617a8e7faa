"""Who is alive, and how much there is of everything: counts for people, and for the trainer's own display."""

import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from pipeline import keys, queue, stream, weights
from pipeline.commands import command
from pipeline.message import MalformedMessage, Message, decode, encode
from pipeline.trajectory import TrajectoryHead

STATUS_EXPIRES_S = 15.0
_FORGET_WORKER_S = 3600.0


class RunStatus(Message, frozen=True, kw_only=True):
    """What the trainer is doing, in its own words; it expires when the trainer does."""

    run_id: str
    phase: str  # e.g. "waiting for trajectories", "optimizer step", "publishing weights", "evaluating"
    detail: str = ""  # e.g. "29 of 48 trajectories of step 7"
    step: int = 0
    num_steps: int = 0
    version: int = 0
    admission: str = ""  # why no request is enqueued at the moment, or how many more may be
    updated_at: float = 0.0


class WorkerStatus(Message, frozen=True, kw_only=True):
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
class Queued:
    request_id: str
    due_at: float  # Unix seconds; ahead while a failed try waits for the next, years back for evaluations


@dataclass(frozen=True, slots=True)
class RunCensus:
    """Counts of one run.

    `unread` heads were not yet delivered to the learner; `unacknowledged` were, but are in no checkpoint yet.
    """

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
    lags: tuple[int, ...]  # in versions, of training trajectories that arrived since the newest version
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
    found: set[bytes] = await command(redis, "SMEMBERS", keys.runs())
    return sorted(raw.decode() for raw in found)


async def live_workers(redis: Redis) -> list[WorkerStatus]:
    """Workers that beat within STATUS_EXPIRES_S, by name."""
    names = list(await _heard(redis))
    rows: list[bytes | None] = await redis.mget([keys.worker(name) for name in names]) if names else []
    return sorted((decode(row, WorkerStatus) for row in rows if row), key=lambda status: status.name)


async def silent_workers(redis: Redis) -> dict[str, float]:
    """When workers that fell silent within the last hour, without a goodbye, were last heard (Unix s)."""
    alive = {status.name for status in await live_workers(redis)}
    return {name: at for name, at in (await _heard(redis)).items() if name not in alive}


async def _heard(redis: Redis) -> dict[str, float]:
    await redis.zremrangebyscore(keys.workers(), 0, time.time() - _FORGET_WORKER_S)
    rows: list[bytes] = await command(redis, "ZRANGE", keys.workers(), 0, -1, "WITHSCORES")
    return {name.decode(): float(at) for name, at in zip(rows[::2], rows[1::2], strict=True)}


async def run_census(redis: Redis, run_id: str, *, recent: int = 200) -> RunCensus:
    """Count everything of one run; the newest `recent` heads are looked at for lags and outcomes."""
    raw = await redis.get(keys.run_status(run_id))
    owed = await open_requests(redis, run_id)
    unread, unacknowledged = await _stream_depths(redis, run_id)
    heads = [delivery.head for delivery in await stream.newest_heads(redis, run_id, recent)]
    learned = await weights.newest_version(redis, run_id)
    return RunCensus(
        run_id=run_id,
        status=decode(raw, RunStatus) if raw else None,
        queued=sum(isinstance(found, Queued) for found in owed),
        claimed=tuple(found for found in owed if isinstance(found, Claimed)),
        unread=unread,
        unacknowledged=unacknowledged,
        dead=await command(redis, "HLEN", keys.dead(run_id)),
        malformed=await command(redis, "LLEN", keys.malformed(run_id)),
        learned=learned,
        served=await weights.served_weights(redis, run_id),
        lags=tuple(_lags(heads, learned)) if learned else (),
        outcomes=dict(Counter(head.outcome for head in heads)),
    )


def _lags(heads: list[TrajectoryHead], learned: weights.WeightVersion) -> Iterator[int]:
    """Of what arrived since the newest version: older arrivals were mostly trained by versions before it."""
    for head in heads:
        if (
            head.purpose == "train"
            and head.version_first is not None
            and head.finished_at >= learned.published_at
        ):
            yield max(0, learned.version - head.version_first)


async def open_requests(redis: Redis, run_id: str) -> list[Claimed | Queued]:
    """What is owed and not yet answered, oldest first."""
    ids = await queue.open_ids(redis, run_id)
    async with redis.pipeline(transaction=False) as pipe:
        for request_id in ids:
            pipe.get(keys.lease(request_id))
            pipe.zscore(keys.QUEUE, request_id)
            pipe.exists(keys.published(request_id))
        rows: list[Any] = await pipe.execute()
    found: list[Claimed | Queued] = []
    for request_id, lease, score, published in zip(ids, rows[::3], rows[1::3], rows[2::3], strict=True):
        if published:
            continue
        claimed = await _claimed(redis, request_id, lease) if lease else None
        if claimed is not None:
            found.append(claimed)
        elif score is not None:
            found.append(Queued(request_id=request_id, due_at=score / 1000))
    return found


async def _claimed(redis: Redis, request_id: str, lease: bytes) -> Claimed | None:
    """None if it was withdrawn meanwhile, or if it is one that its worker is about to bury as unreadable."""
    try:
        request = await queue.stored_request(redis, request_id)
    except MalformedMessage:
        return None
    if request is None:
        return None
    return Claimed(
        request_id=request_id,
        task_id=request.task.id,
        purpose=request.purpose,
        lease=decode(lease, queue.Lease),
        max_turns=request.limits.turns,
    )


async def _stream_depths(redis: Redis, run_id: str) -> tuple[int, int]:
    """Entries not yet delivered to the learner, and those delivered but not acknowledged."""
    name = keys.stream(run_id)
    if not await redis.exists(name):
        return 0, 0
    groups: list[dict[str, Any]] = await redis.xinfo_groups(name)
    if not groups:
        return await command(redis, "XLEN", name), 0
    unread = groups[0].get("lag")
    if unread is None:  # Redis lost count over a deletion
        after = f"({groups[0]['last-delivered-id'].decode()}"
        unread = len(await command(redis, "XRANGE", name, after, "+"))
    return unread, groups[0]["pending"]


async def fleet_id(redis: Redis) -> str:
    """The name that everything on this Redis shares; made by whoever asks first."""
    await redis.set(keys.fleet(), secrets.token_hex(6), nx=True)
    name = await redis.get(keys.fleet())
    assert name is not None
    return name.decode()
