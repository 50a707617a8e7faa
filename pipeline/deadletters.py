"""Dead letters: requests that are out of tries, with the evidence of every attempt.

Only a person gives a dead-lettered request a fresh budget (`requeue`) or deletes it (`drop`).
"""

import contextlib
import time
from collections.abc import Sequence

from redis.asyncio import Redis

from pipeline import keys, request_store, stream, transitions
from pipeline.errors import Boundary, FailureClass, class_of
from pipeline.kinds import ROLLOUT, AnyKind, H, JobKind, T
from pipeline.message import MalformedMessage, Message, UnixSeconds, decode, encode
from pipeline.redis_calls import Word, chunks, command, script
from pipeline.request import Claim, R
from pipeline.stream import FENCE_S, KEEP_ANSWERED_S, DeathRecord, Verdict
from pipeline.trajectory import Failed

KEEP_DETAIL_CHARS = 20_000  # the end of a failure's log that is kept
UNREADABLE = "unreadable"  # run name under which a request is kept whose run cannot be decoded


class AttemptFailure(Message, frozen=True, kw_only=True):
    """The evidence of one failed attempt."""

    attempt: int
    worker: str
    boundary: Boundary
    message: str
    transient: bool
    failed_at: UnixSeconds
    detail: str = ""  # traceback and the end of the log

    @property
    def kind(self) -> FailureClass:
        return class_of(self.boundary, transient=self.transient)


class DeadLetter(Message, frozen=True, kw_only=True):
    """A request that is out of tries, with the evidence."""

    request_id: str
    task_id: str
    failures: tuple[AttemptFailure, ...]
    died_at: UnixSeconds
    purpose: str = ""  # "" if the request cannot be read, like the group
    group_id: str = ""

    @property
    def kind(self) -> FailureClass:
        """The class of the failure that used up its budget."""
        return self.failures[-1].kind if self.failures else "poison"


class _Addressed(Message, frozen=True, kw_only=True):
    """The part of a request that names its run."""

    run_id: str


def attempt_failure(claim: Claim[R], failed: Failed, *, detail: str = "") -> AttemptFailure:
    """The evidence of a failed attempt, with the end of `detail`."""
    return AttemptFailure(
        attempt=claim.attempt,
        worker=claim.worker,
        boundary=failed.boundary,
        message=failed.message,
        transient=failed.transient,
        failed_at=time.time(),
        detail=detail[-KEEP_DETAIL_CHARS:],
    )


async def failures(redis: Redis, request_id: str, kind: AnyKind = ROLLOUT) -> tuple[AttemptFailure, ...]:
    """The failures of the request so far, oldest first."""
    rows: list[bytes] = await command(redis, "LRANGE", keys.failures(request_id, kind), 0, -1)
    return tuple(_failure(row) for row in rows)


async def dead_letter(
    redis: Redis, result: T, evidence: Sequence[AttemptFailure], kind: JobKind[R, T, H] = ROLLOUT
) -> Verdict:
    """Dead-letter the request of a failed result, and publish the result in the same transaction, so that its group
    can close. `evidence` is of all attempts, this one last.
    """
    request = result.claim.request
    letter = DeadLetter(
        request_id=request.id,
        task_id=request.task_id,
        failures=tuple(evidence),
        died_at=time.time(),
        purpose=request.purpose,
        group_id=request.group_id,
    )
    last = evidence[-1]
    why = f"{letter.kind}: {last.message}"[:300]
    record = DeathRecord(letter=encode(letter), last_failure=encode(last), why=why)
    return await stream.publish(redis, result, death=record, kind=kind)


async def dead_letter_unreadable(
    redis: Redis,
    request_id: str | bytes,
    error: MalformedMessage,
    *,
    run_id: str = "",
    kind: AnyKind = ROLLOUT,
) -> None:
    """Dead-letter a request that no worker can decode, under its run if that is known or can be found out."""
    name = request_id.decode(errors="replace") if isinstance(request_id, bytes) else request_id
    evidence = (_unreadable(error, at=time.time()),)
    letter = DeadLetter(request_id=name, task_id="", failures=evidence, died_at=time.time())
    run_id = run_id or await _run_of(redis, name, kind)
    await command(redis, "SADD", keys.runs(), run_id)
    arguments: list[Word] = [request_id, run_id, encode(letter), str(error)[:300]]
    await script(redis, transitions.DEAD_LETTER_UNREADABLE.of(kind), arguments)


async def listed(redis: Redis, run_id: str, kind: AnyKind = ROLLOUT) -> dict[str, DeadLetter]:
    """Every dead letter of the run. A letter that cannot be decoded is listed as poison with the reason."""
    rows: dict[bytes, bytes] = await command(redis, "HGETALL", keys.dead(run_id, kind))
    return {name.decode(errors="replace"): _letter(name, row) for name, row in rows.items()}


async def find(redis: Redis, run_id: str, request_id: str, kind: AnyKind = ROLLOUT) -> DeadLetter | None:
    row = await command(redis, "HGET", keys.dead(run_id, kind), request_id)
    return None if row is None else _letter(request_id.encode(), row)


async def unanswered(redis: Redis, run_id: str, kind: AnyKind = ROLLOUT) -> list[str]:
    """Dead-lettered requests whose failure was never published, because no worker could decode them."""
    ids: list[bytes] = await command(redis, "HKEYS", keys.dead(run_id, kind))
    names = [raw.decode(errors="replace") for raw in ids]
    found: list[str] = []
    for some in chunks(names):
        published: list[bytes | None] = await redis.mget([keys.published(name, kind) for name in some])
        found += [name for name, entry in zip(some, published, strict=True) if entry is None]
    return found


async def requeue(redis: Redis, run_id: str, request_id: str, kind: JobKind[R, T, H] = ROLLOUT) -> None:
    """Give a dead-lettered request a fresh budget.

    Raises KeyError if it is not dead-lettered, ValueError if the stored request is gone or cannot be decoded.
    """
    if not await command(redis, "HEXISTS", keys.dead(run_id, kind), request_id):
        raise KeyError(request_id)
    request = await request_store.read(redis, request_id, kind)
    if request is None:
        raise ValueError(f"{request_id}: the request itself is gone; only `drop` is possible")
    arguments: list[Word] = [
        *(request_id, run_id, request_store.rank_of(request), request_store.job_of(request, kind)),
        *(request.image, request_store.HINT_S, request.enqueued_at),
    ]
    if not await script(redis, transitions.REQUEUE.of(kind), arguments):
        raise KeyError(request_id)


async def drop(redis: Redis, run_id: str, request_id: str, kind: AnyKind = ROLLOUT) -> None:
    """Delete a dead-lettered request and its evidence. Raises KeyError if it is not dead-lettered."""
    arguments: list[Word] = [run_id, FENCE_S, KEEP_ANSWERED_S, "dead", request_id]
    if not await script(redis, transitions.WITHDRAW.of(kind), arguments):
        raise KeyError(request_id)


async def _run_of(redis: Redis, request_id: str, kind: AnyKind) -> str:
    """The run that the request names, or else the run that lists it as outstanding."""
    with contextlib.suppress(MalformedMessage):
        data = await request_store.read_bytes(redis, request_id, kind)
        if data is not None:
            return decode(data, _Addressed).run_id
    known: set[bytes] = await command(redis, "SMEMBERS", keys.runs())
    for run_id in sorted(raw.decode(errors="replace") for raw in known):
        if await command(redis, "ZSCORE", keys.open_requests(run_id, kind), request_id) is not None:
            return run_id
    return UNREADABLE


def _failure(row: bytes) -> AttemptFailure:
    try:
        return decode(row, AttemptFailure)
    except MalformedMessage as error:
        return _unreadable(error, at=0.0)


def _letter(name: bytes, row: bytes) -> DeadLetter:
    try:
        return decode(row, DeadLetter)
    except MalformedMessage as error:
        evidence = (_unreadable(error, at=0.0),)
        return DeadLetter(
            request_id=name.decode(errors="replace"), task_id="", failures=evidence, died_at=0.0
        )


def _unreadable(error: MalformedMessage, *, at: float) -> AttemptFailure:
    """The evidence that replaces a message that cannot be decoded."""
    return AttemptFailure(
        attempt=0, worker="", boundary="request", message=str(error), transient=False, failed_at=at
    )
