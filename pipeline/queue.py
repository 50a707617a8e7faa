"""The queue: requests are enqueued by the trainer and claimed by workers, each under a lease.

Promises. A request that was enqueued ends answered, withdrawn or dead-lettered and is never lost (`sweep` finds what Redis itself lost).
One claim of a request is in force at a time: its worker renews the lease every RENEW_S, and LEASE_S after the last renewal the lease
expires and the next worker takes the request. Later changes by the overtaken worker are refused because of its attempt number.

The arq job holds only the request's id and a label; the request has a key of its own, so it can be shown, requeued or
kept as evidence at any stage (`request_store.py`, `deadletters.py`). What each call changes in Redis is in
`transitions.py`. Every function is for one kind of job (`kinds.py`).
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

from redis.asyncio import Redis

from pipeline import keys, request_store, transitions
from pipeline.deadletters import AttemptFailure, dead_letter_unreadable
from pipeline.kinds import ROLLOUT, AnyKind, H, JobKind, T
from pipeline.message import MalformedMessage, Message, UnixSeconds, decode, encode
from pipeline.redis_calls import Word, chunks, command, script, scripts
from pipeline.request import Claim, R
from pipeline.request_store import milliseconds
from pipeline.stream import FENCE_S, KEEP_ANSWERED_S

LEASE_S = 6.0
RENEW_S = 1.5

Refusal = Literal["gone", "answered", "held"]


class Lease(Message, frozen=True, kw_only=True):
    """A claim that is in force: the worker that holds it, and its progress in the episode.

    The fields about the request are empty until the first renewal.
    """

    worker: str
    attempt: int
    claimed_at: UnixSeconds
    phase: str = "opening"  # opening, agent, grading, publishing
    turn: int = 0
    container: str = ""
    task_id: str = ""
    purpose: str = ""
    group_id: str = ""
    max_turns: int = 0


class Unclaimable(Message, frozen=True, kw_only=True):
    """A request that was taken and cannot be decoded; it has been dead-lettered."""

    request_id: str
    reason: str


# Enqueuing


async def enqueue(redis: Redis, request: R, kind: JobKind[R, T, H] = ROLLOUT) -> None:
    """Put `request` on the queue and among the outstanding requests of its run. Repeating it changes nothing.

    Evaluations go before training: they are few, and the weights wait for them.
    """
    arguments: list[Word] = [
        *(
            request.id,
            request.run_id,
            encode(request),
            request.image,
            request_store.HINT_S,
            request.enqueued_at,
        ),
        *(request_store.rank_of(request), request_store.job_of(request, kind)),
    ]
    await script(redis, transitions.ENQUEUE.of(kind), arguments)


async def sweep(redis: Redis, run_id: str, kind: AnyKind = ROLLOUT) -> list[str]:
    """Re-enqueue outstanding requests that are neither queued, claimed, published nor dead-lettered; returns their ids.

    Safe to call at any time. There is such a request only if Redis lost something, or somebody changed its keys.
    """
    found: list[str] = []
    for request_id in await _lost_ids(redis, run_id, kind):
        try:
            request = await request_store.read(redis, request_id, kind)
        except MalformedMessage as error:
            await dead_letter_unreadable(redis, request_id, error, run_id=run_id, kind=kind)
            continue
        if request is not None:
            rank, job = request_store.rank_of(request), request_store.job_of(request, kind)
            if await script(redis, transitions.RE_ENQUEUE.of(kind), [request_id, run_id, rank, job]):
                found.append(request_id)
    return found


async def withdraw(
    redis: Redis, run_id: str, request_ids: Sequence[str], kind: AnyKind = ROLLOUT
) -> list[str]:
    """Cancels these requests, except those already answered; returns the ids of the cancelled ones.

    A worker that runs one notices at its next renewal and stops. Repeating it changes nothing.
    """
    gone: list[str] = []
    for some in chunks(request_ids):
        rows = [(run_id, FENCE_S, KEEP_ANSWERED_S, "any", request_id) for request_id in some]
        answers = await scripts(redis, transitions.WITHDRAW.of(kind), rows)
        gone += [request_id for request_id, answer in zip(some, answers, strict=True) if answer]
    return gone


async def first_claims(redis: Redis, request_ids: Sequence[str], kind: AnyKind = ROLLOUT) -> dict[str, float]:
    """Seconds since the first claim of each of these requests, on Redis's clock; without requests that were never claimed."""
    found: dict[str, float] = {}
    for some in chunks(request_ids):
        ages: list[int | None] = await script(redis, transitions.FIRST_CLAIMS.of(kind), list(some))
        found |= {one: age / 1000 for one, age in zip(some, ages, strict=True) if age is not None}
    return found


async def open_ids(redis: Redis, run_id: str, kind: AnyKind = ROLLOUT) -> list[str]:
    """Ids of the run's outstanding requests, oldest first."""
    rows: list[bytes] = await command(redis, "ZRANGE", keys.open_requests(run_id, kind), 0, -1)
    return [row.decode() for row in rows]


async def waiting_images(redis: Redis, *, num_requests: int = 50, kind: AnyKind = ROLLOUT) -> list[str]:
    """Images of the next `num_requests` requests that were never claimed, each once, in the order of the queue."""
    rows: list[bytes] = await script(redis, transitions.WAITING_IMAGES.of(kind), [num_requests])
    return list(dict.fromkeys(row.decode() for row in rows))


# Claiming


async def take(
    redis: Redis, worker: str, count: int, kind: JobKind[R, T, H] = ROLLOUT
) -> list[Claim[R] | Unclaimable]:
    """Claim up to `count` due requests in one round trip: first those that were claimed before, then the oldest.

    A request that cannot be decoded is dead-lettered at once.
    """
    rows: list[Any] = await script(redis, transitions.TAKE.of(kind), [worker, milliseconds(LEASE_S), count])
    found: list[Claim[R] | Unclaimable] = []
    for row in rows:
        try:
            found.append(_claim(row, worker, kind))
        except MalformedMessage as error:
            request_id = row[0].decode(errors="replace")
            await dead_letter_unreadable(redis, row[0], error, kind=kind)
            found.append(Unclaimable(request_id=request_id, reason=str(error)))
    return found


async def wait_for_work(redis: Redis, timeout_s: float, kind: AnyKind = ROLLOUT) -> None:
    """Returns when something may have become claimable, or after `timeout_s`, at most a second or so late."""
    async with asyncio.timeout(timeout_s + LEASE_S):
        await command(redis, "BLPOP", keys.wake(kind), timeout_s)


async def claim(
    redis: Redis, request_id: str, worker: str, kind: JobKind[R, T, H] = ROLLOUT
) -> Claim[R] | Refusal:
    """Claims the request with this id, or returns the reason of the refusal.

    Raises MalformedMessage if the stored request cannot be decoded.
    """
    answer = await script(redis, transitions.CLAIM.of(kind), [worker, milliseconds(LEASE_S), request_id])
    return cast(Refusal, answer.decode()) if isinstance(answer, bytes) else _claim(answer, worker, kind)


async def renew(redis: Redis, claim: Claim[R], lease: Lease, kind: JobKind[R, T, H] = ROLLOUT) -> bool:
    """Renews the lease.

    Returns False if it was lost because the request was withdrawn or another worker has it: then stop and publish nothing.
    """
    arguments: list[Word] = [claim.request.id, claim.attempt, encode(lease), milliseconds(LEASE_S)]
    return bool(await script(redis, transitions.RENEW.of(kind), arguments))


async def return_to_queue(
    redis: Redis,
    claim: Claim[R],
    *,
    wait_s: float = 0.0,
    failure: AttemptFailure | None = None,
    why: str = "",
    kind: JobKind[R, T, H] = ROLLOUT,
) -> bool:
    """Gives the claimed request back, to be claimed again after `wait_s`. Returns False if the lease was lost.

    With `failure` the attempt counts against its budget; without, it counts against none, and `why` is displayed.
    """
    arguments: list[Word] = [
        *(claim.request.id, claim.attempt, milliseconds(wait_s)),
        b"" if failure is None else encode(failure),
        *("returned" if failure is None else "failed", claim.worker),
        why if failure is None else f"{failure.boundary}: {failure.message}"[:300],
    ]
    return bool(await script(redis, transitions.RETURN_TO_QUEUE.of(kind), arguments))


async def rewrite_job(redis: Redis, request: R, kind: JobKind[R, T, H] = ROLLOUT) -> None:
    """Write arq's part of a queued request again, where it is missing or damaged."""
    arguments: list[Word] = [request.id, request_store.job_of(request, kind)]
    await script(redis, transitions.REWRITE_JOB.of(kind), arguments)


async def is_leased(redis: Redis, request_id: str, attempt: int, kind: AnyKind = ROLLOUT) -> bool:
    """Whether this attempt holds the lease; a container of any other attempt is an orphan."""
    lease = await current_lease(redis, request_id, kind)
    return lease is not None and lease.attempt == attempt


async def current_lease(redis: Redis, request_id: str, kind: AnyKind = ROLLOUT) -> Lease | None:
    """The lease of the request; None if nobody has claimed it. A lease that cannot be decoded counts as none."""
    data = await redis.get(keys.lease(request_id, kind))
    try:
        return decode(data, Lease) if data else None
    except MalformedMessage:
        return None


def _claim(row: list[Any], worker: str, kind: JobKind[R, T, H]) -> Claim[R]:
    """The claim in the reply of a claiming script. Raises MalformedMessage, also for a request that could not be claimed."""
    if len(row) == 2:
        raise MalformedMessage(f"its keys cannot be used: {row[1].decode(errors='replace')}")
    request_id, data, attempt, num_unended, now_ms = row
    return Claim(
        request=request_store.decode_request(data, request_id, kind),
        attempt=attempt,
        worker=worker,
        claimed_at=now_ms / 1000,
        num_unended=num_unended,
    )


async def _lost_ids(redis: Redis, run_id: str, kind: AnyKind) -> Iterable[str]:
    """Outstanding requests that are not queued, published or dead. Not atomic: a claimed one may be among them, which RE_ENQUEUE skips."""
    dead: set[bytes] = set(await command(redis, "HKEYS", keys.dead(run_id, kind)))
    found: list[str] = []
    for ids in chunks(await open_ids(redis, run_id, kind)):
        async with redis.pipeline(transaction=False) as pipe:
            pipe.zmscore(keys.queue(kind), list(ids))
            pipe.mget([keys.published(request_id, kind) for request_id in ids])
            scores, published = await pipe.execute()
        rows = zip(ids, scores, published, strict=True)
        found += [
            one for one, score, entry in rows if score is None and entry is None and one.encode() not in dead
        ]
    return found
