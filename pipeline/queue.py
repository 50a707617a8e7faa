"""Asks: rollout requests out through arq, claimed under a lease, handed back or dead-lettered.

Promises. A request enqueued is answered, withdrawn or dead: never lost (`sweep` finds what Redis itself lost).
One claim is in force at a time: its lease is renewed every RENEW_S and lapses LEASE_S after its worker's last
breath, upon which the next worker takes the request. Whatever the overtaken worker still does is fenced off by
its attempt number. The arq job carries the request's id and a label; the request has a key of its own, so it can be
shown, requeued or kept as evidence at any stage (`request_store.py`, `deadletters.py`). What each call changes is in `transitions.py`.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

from redis.asyncio import Redis

from pipeline import keys, request_store, transitions
from pipeline.commands import Word, chunks, command, script, scripts
from pipeline.deadletters import AttemptFailure, dead_letter_unreadable
from pipeline.message import MalformedMessage, Message, UnixSeconds, decode, encode
from pipeline.request import Claim, RolloutRequest
from pipeline.request_store import milliseconds
from pipeline.stream import FENCE_S, KEEP_ANSWERED_S

LEASE_S = 6.0
RENEW_S = 1.5

Refusal = Literal["gone", "answered", "held"]


class Lease(Message, frozen=True, kw_only=True):
    """Who works on a request, and where in the episode it is. What it is about is in it from its first renewal."""

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
    """A request that was taken and cannot be read; it has been dead-lettered."""

    request_id: str
    reason: str


# Asking


async def enqueue(redis: Redis, request: RolloutRequest) -> None:
    """Owe `request` and queue it; doing so again changes nothing.

    Evaluations go before training: they are few, and the weights wait for them.
    """
    arguments = [
        *(
            request.id,
            request.run_id,
            encode(request),
            request.task.image,
            request_store.HINT_S,
            request.enqueued_at,
        ),
        *(request_store.rank_of(request), request_store.job_of(request)),
    ]
    await script(redis, transitions.ENQUEUE, arguments)


async def sweep(redis: Redis, run_id: str) -> list[str]:
    """Queue again whatever is owed but neither queued, claimed, answered nor dead, and return those ids.

    Safe to call at any time. There is such a request only if Redis lost something, or somebody meddled.
    """
    found: list[str] = []
    for request_id in await _in_limbo(redis, run_id):
        try:
            request = await request_store.read(redis, request_id)
        except MalformedMessage as error:
            await dead_letter_unreadable(redis, request_id, error, run_id=run_id)
            continue
        if request is not None:
            arguments: list[Word] = [request_id, run_id, request_store.rank_of(request), request_store.job_of(request)]
            if await script(redis, transitions.MEND, arguments):
                found.append(request_id)
    return found


async def withdraw(redis: Redis, run_id: str, request_ids: Sequence[str]) -> list[str]:
    """Ask for these no longer, unless they were answered already; returns those that are now asked for by nobody.

    A worker in the middle of one notices at its next breath and stops. Calling it again changes nothing.
    """
    gone: list[str] = []
    for some in chunks(request_ids):
        rows = [(run_id, FENCE_S, KEEP_ANSWERED_S, "any", request_id) for request_id in some]
        answers = await scripts(redis, transitions.WITHDRAW, rows)
        gone += [request_id for request_id, answer in zip(some, answers, strict=True) if answer]
    return gone


async def first_claims(redis: Redis, request_ids: Sequence[str]) -> dict[str, float]:
    """Seconds since each of these was claimed for the first time, on Redis's clock; without those that never were."""
    found: dict[str, float] = {}
    for some in chunks(request_ids):
        ages: list[int | None] = await script(redis, transitions.FIRST_CLAIMS, list(some))
        found |= {one: age / 1000 for one, age in zip(some, ages, strict=True) if age is not None}
    return found


async def open_ids(redis: Redis, run_id: str) -> list[str]:
    """Ids owed to the trainer, oldest first."""
    rows: list[bytes] = await command(redis, "ZRANGE", keys.open_requests(run_id), 0, -1)
    return [row.decode() for row in rows]


async def waiting_images(redis: Redis, *, num_requests: int = 50) -> list[str]:
    """Images of the next `num_requests` that nobody has claimed yet, each once, the first to be claimed first."""
    rows: list[bytes] = await script(redis, transitions.WAITING_IMAGES, [num_requests])
    return list(dict.fromkeys(row.decode() for row in rows))


# Claiming


async def take(redis: Redis, worker: str, count: int) -> list[Claim | Unclaimable]:
    """Claim up to `count` of what is due, in one round trip: what has waited before first, then by age.

    What cannot be read is dead-lettered on the spot.
    """
    rows: list[Any] = await script(redis, transitions.TAKE, [worker, milliseconds(LEASE_S), count])
    found: list[Claim | Unclaimable] = []
    for row in rows:
        try:
            found.append(_claim(row, worker))
        except MalformedMessage as error:
            request_id = row[0].decode(errors="replace")
            await dead_letter_unreadable(redis, row[0], error)
            found.append(Unclaimable(request_id=request_id, reason=str(error)))
    return found


async def wait_for_work(redis: Redis, timeout_s: float) -> None:
    """Return when something may have become claimable, or after `timeout_s`, whole seconds at the least."""
    async with asyncio.timeout(timeout_s + LEASE_S):
        await command(redis, "BLPOP", keys.wake(), timeout_s)


async def claim(redis: Redis, request_id: str, worker: str) -> Claim | Refusal:
    """Take this very request under a lease, or say why not.

    Raises MalformedMessage if the stored request cannot be read.
    """
    answer = await script(redis, transitions.CLAIM, [worker, milliseconds(LEASE_S), request_id])
    return cast(Refusal, answer.decode()) if isinstance(answer, bytes) else _claim(answer, worker)


async def renew(redis: Redis, claim: Claim, lease: Lease) -> bool:
    """Breathe.

    False: the request was withdrawn or another worker holds it now, so stop and publish nothing.
    """
    arguments: list[Word] = [claim.request.id, claim.attempt, encode(lease), milliseconds(LEASE_S)]
    return bool(await script(redis, transitions.RENEW, arguments))


async def return_to_queue(
    redis: Redis, claim: Claim, *, wait_s: float = 0.0, failure: AttemptFailure | None = None, why: str = ""
) -> bool:
    """Let another try be made after `wait_s`. False: fenced off.

    Without `failure` it counts against no budget; `why` is for people.
    """
    arguments: list[Word] = [
        *(claim.request.id, claim.attempt, milliseconds(wait_s)),
        b"" if failure is None else encode(failure),
        *("returned" if failure is None else "failed", claim.worker),
        why if failure is None else f"{failure.boundary}: {failure.message}"[:300],
    ]
    return bool(await script(redis, transitions.RETURN_TO_QUEUE, arguments))


async def release(redis: Redis, claim: Claim) -> None:
    """Let go, so that the next worker need not wait for the lease to lapse."""
    await return_to_queue(redis, claim)


async def rewrite_job(redis: Redis, request: RolloutRequest) -> None:
    """Make arq's part of a queued request anew, should it be missing or not be what it should be."""
    await script(redis, transitions.REWRITE_JOB, [request.id, request_store.job_of(request)])


async def is_leased(redis: Redis, request_id: str, attempt: int) -> bool:
    """Whether that very attempt still breathes; a container of any other attempt is an orphan."""
    lease = await current_lease(redis, request_id)
    return lease is not None and lease.attempt == attempt


async def current_lease(redis: Redis, request_id: str) -> Lease | None:
    """None if nobody holds the request. A lease that cannot be read is nobody's."""
    data = await redis.get(keys.lease(request_id))
    try:
        return decode(data, Lease) if data else None
    except MalformedMessage:
        return None


def _claim(row: list[Any], worker: str) -> Claim:
    """Of the reply of a claiming script. Raises MalformedMessage, also for one that could not be claimed."""
    if len(row) == 2:
        raise MalformedMessage(f"its keys cannot be used: {row[1].decode(errors='replace')}")
    request_id, data, attempt, num_unended, now_ms = row
    return Claim(
        request=request_store.decode_request(data, request_id),
        attempt=attempt,
        worker=worker,
        claimed_at=now_ms / 1000,
        num_unended=num_unended,
    )


async def _in_limbo(redis: Redis, run_id: str) -> Iterable[str]:
    """Owed, and nowhere to be found; dead ones among them at most if they cannot be read."""
    dead: set[bytes] = set(await command(redis, "HKEYS", keys.dead(run_id)))
    found: list[str] = []
    for ids in chunks(await open_ids(redis, run_id)):
        async with redis.pipeline(transaction=False) as pipe:
            pipe.zmscore(keys.QUEUE, list(ids))
            pipe.mget([keys.published(request_id) for request_id in ids])
            scores, published = await pipe.execute()
        rows = zip(ids, scores, published, strict=True)
        found += [
            one for one, score, entry in rows if score is None and entry is None and one.encode() not in dead
        ]
    return found
