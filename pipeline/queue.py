"""Asks: rollout requests out through arq, claimed under a lease, handed back or dead-lettered.

Promises. A request enqueued is answered, withdrawn or dead: never lost (`sweep` finds what a crash left
between the chairs). One claim is in force at a time: its lease is renewed every RENEW_S and lapses LEASE_S
after its worker's last breath, upon which arq hands the request to the next worker. Whatever the overtaken
worker still does is fenced off by its attempt number (here and in `stream.publish`). The arq job carries only
the request's id; the request has a key of its own, so it can be shown, requeued or kept as evidence at any
stage.
"""

import time
from datetime import UTC, datetime
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import msgspec
from arq.connections import ArqRedis, RedisSettings, create_pool
from redis.asyncio import Redis

from pipeline import keys
from pipeline.commands import command, script
from pipeline.message import MalformedMessage, Message, decode, encode
from pipeline.request import Claim, RolloutRequest
from pipeline.stream import FENCE_S, KEEP_ANSWERED_S
from pipeline.trajectory import Failed

JOB_NAME = "rollout"
LEASE_S = 6.0
RENEW_S = 1.5
JOB_EXPIRES_S = 365 * 24 * 3600.0  # arq forgets queued jobs after a day unless told otherwise

UNREADABLE = "unreadable"  # stands for the run of a request that does not even tell its run

Refusal = Literal["gone", "answered", "held"]


class Lease(Message, frozen=True, kw_only=True):
    """Who works on a request, and where in the episode it is."""

    worker: str
    attempt: int
    claimed_at: float
    phase: str = "opening"  # opening, agent, grading, publishing
    turn: int = 0
    container: str = ""


class AttemptFailure(Message, frozen=True, kw_only=True):
    """Evidence of one failed try."""

    attempt: int
    worker: str
    boundary: str
    message: str
    transient: bool
    failed_at: float
    detail: str = ""  # traceback or log tail


class DeadLetter(Message, frozen=True, kw_only=True):
    """A request nobody will try again unless a person says so."""

    request_id: str
    task_id: str
    failures: tuple[AttemptFailure, ...]
    died_at: float


class _Addressed(Message, frozen=True, kw_only=True):
    """The part of a request that says where it belongs."""

    run_id: str


def encode_job(job: dict[str, Any]) -> bytes:
    """arq's job dict as msgpack; never pickle."""
    return msgspec.msgpack.encode(job)


def decode_job(data: bytes) -> dict[str, Any]:
    return msgspec.msgpack.decode(data, type=dict[str, Any])


async def connect(url: str, *, patience_s: int = 30) -> ArqRedis:
    """A pool that speaks to arq's queue and, being a Redis client, to everything else.



    Waits `patience_s` for a Redis that starts. Raises ValueError for what is no Redis URL.
    """
    if urlsplit(url).scheme not in ("redis", "rediss", "unix"):
        raise ValueError(f"Redis URL {url!r}: it must begin with redis://, rediss:// or unix://")
    settings = RedisSettings.from_dsn(url)
    settings.conn_timeout = 10
    settings.conn_retries = patience_s
    settings.conn_retry_delay = 1
    return await create_pool(
        settings, job_serializer=encode_job, job_deserializer=decode_job, default_queue_name=keys.QUEUE
    )


async def enqueue(pool: ArqRedis, request: RolloutRequest) -> None:
    """Owe `request` and queue it.

    Evaluations go before training: they are few, and the weights wait for them.
    """
    async with pool.pipeline(transaction=True) as pipe:
        pipe.set(keys.request(request.id), encode(request))
        pipe.zadd(keys.open_requests(request.run_id), {request.id: request.enqueued_at})
        await pipe.execute()
    await _queue(pool, request)


async def _queue(pool: ArqRedis, request: RolloutRequest) -> None:
    due_at = request.enqueued_at - (10 * 365 * 24 * 3600.0 if request.purpose == "eval" else 0.0)
    await pool.enqueue_job(
        JOB_NAME,
        request.id,
        _job_id=request.id,
        _queue_name=keys.QUEUE,
        _defer_until=datetime.fromtimestamp(due_at, UTC),
        _expires=JOB_EXPIRES_S,
    )


_CLAIM = """
-- KEYS: request, published, lease, attempt, arq in-progress; ARGV: lease milliseconds
local request = redis.call('GET', KEYS[1])
if not request then return 'gone' end
if redis.call('EXISTS', KEYS[2]) == 1 then return 'answered' end
if redis.call('EXISTS', KEYS[3]) == 1 then return 'held' end
local attempt = redis.call('INCR', KEYS[4])
redis.call('SET', KEYS[3], '', 'PX', ARGV[1])
redis.call('PEXPIRE', KEYS[5], ARGV[1])
return {request, attempt}
"""

_RENEW = """
-- KEYS: request, attempt, lease, arq in-progress; ARGV: my attempt, lease bytes, lease milliseconds
if redis.call('GET', KEYS[2]) ~= ARGV[1] or redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[4], '1', 'PX', ARGV[3])
return 1
"""

_RELEASE = """
-- KEYS: attempt, lease; ARGV: my attempt
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[2]) end
return 0
"""

_BURY = """
-- KEYS: attempt, dead, open; ARGV: my attempt, request id, letter. An overtaken worker's is refused.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
return 1
"""


async def claim(redis: Redis, request_id: str, worker: str) -> Claim | Refusal:
    """Take the request under a lease, or say why not.

    Raises MalformedMessage if the stored request cannot be read.
    """
    answer = await script(
        redis,
        _CLAIM,
        [
            keys.request(request_id),
            keys.published(request_id),
            keys.lease(request_id),
            keys.attempt(request_id),
            keys.arq_in_progress(request_id),
        ],
        [_milliseconds(LEASE_S)],
    )
    if isinstance(answer, bytes):
        return cast(Refusal, answer.decode())
    data, attempt = answer
    claimed_at = time.time()
    mine = Claim(request=decode(data, RolloutRequest), attempt=attempt, worker=worker, claimed_at=claimed_at)
    await renew(redis, mine, Lease(worker=worker, attempt=attempt, claimed_at=claimed_at))
    return mine


async def renew(redis: Redis, claim: Claim, lease: Lease) -> bool:
    """Breathe.

    False: the request was withdrawn or another worker holds it now, so stop and publish nothing.
    """
    request_id = claim.request.id
    wanted = [
        keys.request(request_id),
        keys.attempt(request_id),
        keys.lease(request_id),
        keys.arq_in_progress(request_id),
    ]
    return bool(await script(redis, _RENEW, wanted, [claim.attempt, encode(lease), _milliseconds(LEASE_S)]))


async def release(redis: Redis, claim: Claim) -> None:
    """Let go, so that the next worker need not wait for the lease to lapse."""
    await script(
        redis, _RELEASE, [keys.attempt(claim.request.id), keys.lease(claim.request.id)], [claim.attempt]
    )


async def is_leased(redis: Redis, request_id: str, attempt: int) -> bool:
    """Whether that very attempt still breathes; a container of any other attempt is an orphan."""
    data = await redis.get(keys.lease(request_id))
    current = await redis.get(keys.attempt(request_id))
    return bool(data is not None and current is not None and int(current) == attempt)


async def current_lease(redis: Redis, request_id: str) -> Lease | None:
    data = await redis.get(keys.lease(request_id))
    return decode(data, Lease) if data else None


async def record_failure(redis: Redis, claim: Claim, failed: Failed, *, detail: str = "") -> int:
    """Keep the evidence of a failed try; returns how many tries have failed so far."""
    failure = AttemptFailure(
        attempt=claim.attempt,
        worker=claim.worker,
        boundary=failed.boundary,
        message=failed.message,
        transient=failed.transient,
        failed_at=time.time(),
        detail=detail[-20_000:],
    )
    return await command(redis, "RPUSH", keys.failures(claim.request.id), encode(failure))


async def failures(redis: Redis, request_id: str) -> tuple[AttemptFailure, ...]:
    rows: list[bytes] = await command(redis, "LRANGE", keys.failures(request_id), 0, -1)
    return tuple(decode(row, AttemptFailure) for row in rows)


async def bury(redis: Redis, claim: Claim) -> bool:
    """Dead-letter the request with all its evidence. False: fenced off.

    Its failed trajectory is still published, so its group can close.
    """
    request = claim.request
    letter = DeadLetter(
        request_id=request.id,
        task_id=request.task.id,
        failures=await failures(redis, request.id),
        died_at=time.time(),
    )
    wanted = [keys.attempt(request.id), keys.dead(request.run_id)]
    return bool(await script(redis, _BURY, wanted, [claim.attempt, request.id, encode(letter)]))


async def bury_unreadable(redis: Redis, request_id: str, error: MalformedMessage) -> None:
    """Dead-letter a request that no worker can decode; with its run, if at least that can be made out."""
    failure = AttemptFailure(
        attempt=0, worker="", boundary="request", message=str(error), transient=False, failed_at=time.time()
    )
    letter = DeadLetter(request_id=request_id, task_id="", failures=(failure,), died_at=time.time())
    data = await redis.get(keys.request(request_id))
    try:
        run_id = UNREADABLE if data is None else decode(data, _Addressed).run_id
    except MalformedMessage:
        run_id = UNREADABLE
    await command(redis, "SADD", keys.runs(), run_id)
    await command(redis, "HSET", keys.dead(run_id), request_id, encode(letter))


async def dead_letters(redis: Redis, run_id: str) -> dict[str, DeadLetter]:
    rows: dict[bytes, bytes] = await command(redis, "HGETALL", keys.dead(run_id))
    return {request_id.decode(): decode(row, DeadLetter) for request_id, row in rows.items()}


async def stored_request(redis: Redis, request_id: str) -> RolloutRequest | None:
    data = await redis.get(keys.request(request_id))
    return None if data is None else decode(data, RolloutRequest)


async def open_ids(redis: Redis, run_id: str) -> list[str]:
    """Ids owed to the trainer, oldest first."""
    rows: list[bytes] = await command(redis, "ZRANGE", keys.open_requests(run_id), 0, -1)
    return [row.decode() for row in rows]


async def sweep(pool: ArqRedis, run_id: str) -> list[str]:
    """Queue again whatever is owed but neither queued, answered nor dead, and return those ids.

    Safe to call at any time.

    Such a request exists after a crash between owing and queueing, or after an overtaken worker woke up and
    arq removed the job under the hands of its successor (the successor's own claim is found by its lease).
    """
    found: list[str] = []
    buried = await dead_letters(pool, run_id)
    for request_id in await open_ids(pool, run_id):
        async with pool.pipeline(transaction=True) as pipe:
            pipe.zscore(keys.QUEUE, request_id)
            pipe.exists(keys.lease(request_id), keys.published(request_id))
            score, spoken_for = await pipe.execute()
        if score is not None or spoken_for or request_id in buried:
            continue
        try:
            request = await stored_request(pool, request_id)
        except MalformedMessage as error:
            await bury_unreadable(pool, request_id, error)
            continue
        if request is not None:
            await pool.delete(keys.arq_job(request_id))
            await _queue(pool, request)
            found.append(request_id)
    return found


async def withdraw(pool: ArqRedis, run_id: str, request_ids: list[str]) -> None:
    """Ask for these no longer. A worker in the middle of one notices at its next breath and stops."""
    for request_id in request_ids:
        async with pool.pipeline(transaction=True) as pipe:
            pipe.delete(keys.request(request_id), keys.arq_job(request_id), keys.failures(request_id))
            pipe.expire(keys.attempt(request_id), FENCE_S)  # an overtaken worker may still breathe
            pipe.expire(keys.body(request_id), KEEP_ANSWERED_S)
            pipe.zrem(keys.QUEUE, request_id)
            pipe.zrem(keys.open_requests(run_id), request_id)
            await pipe.execute()


async def requeue(pool: ArqRedis, run_id: str, request_id: str) -> None:
    """Give a dead request a fresh budget.

    Raises KeyError if it is not among the dead, ValueError if its request cannot be had.
    """
    if not await command(pool, "HEXISTS", keys.dead(run_id), request_id):
        raise KeyError(request_id)
    request = await stored_request(pool, request_id)
    if request is None:
        raise ValueError(f"{request_id}: the request itself is gone; only `drop` is possible")
    async with pool.pipeline(transaction=True) as pipe:
        pipe.hdel(keys.dead(run_id), request_id)
        pipe.incr(keys.attempt(request_id))  # a worker that buried it and has not yet published is fenced off
        pipe.delete(
            keys.published(request_id),
            keys.failures(request_id),
            keys.body(request_id),
            keys.arq_job(request_id),
        )
        pipe.persist(keys.request(request_id))
        pipe.persist(keys.attempt(request_id))
        pipe.zadd(keys.open_requests(run_id), {request_id: request.enqueued_at})
        await pipe.execute()
    await _queue(pool, request)


async def drop(pool: ArqRedis, run_id: str, request_id: str) -> None:
    """Forget a dead request and its evidence. Raises KeyError if it is not among the dead."""
    if not await command(pool, "HDEL", keys.dead(run_id), request_id):
        raise KeyError(request_id)
    await withdraw(pool, run_id, [request_id])


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
