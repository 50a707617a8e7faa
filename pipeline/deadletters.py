"""Requests that nobody will try again unless a person says so: their evidence, and what a person can do."""

import contextlib
import time
from collections.abc import Sequence

from redis.asyncio import Redis

from pipeline import keys, request_store, stream, transitions
from pipeline.commands import Word, chunks, command, script
from pipeline.errors import Boundary, FailureClass, class_of
from pipeline.message import MalformedMessage, Message, UnixSeconds, decode, encode
from pipeline.request import Claim
from pipeline.stream import FENCE_S, KEEP_ANSWERED_S, DeathRecord, Verdict
from pipeline.trajectory import Failed, Trajectory

KEEP_DETAIL_CHARS = 20_000  # of a failure's log: its end is what tells
UNREADABLE = "unreadable"  # stands for the run of a request that does not even tell its run


class AttemptFailure(Message, frozen=True, kw_only=True):
    """Evidence of one failed try."""

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
    """A request nobody will try again unless a person says so."""

    request_id: str
    task_id: str
    failures: tuple[AttemptFailure, ...]
    died_at: UnixSeconds
    purpose: str = ""  # as the group: "" if the request cannot be read
    group_id: str = ""

    @property
    def kind(self) -> FailureClass:
        """Of the failure that was one too many."""
        return self.failures[-1].kind if self.failures else "poison"


class _Addressed(Message, frozen=True, kw_only=True):
    """The part of a request that says where it belongs."""

    run_id: str


def attempt_failure(claim: Claim, failed: Failed, *, detail: str = "") -> AttemptFailure:
    """The evidence of a failed try; of a long `detail` its end."""
    return AttemptFailure(
        attempt=claim.attempt,
        worker=claim.worker,
        boundary=failed.boundary,
        message=failed.message,
        transient=failed.transient,
        failed_at=time.time(),
        detail=detail[-KEEP_DETAIL_CHARS:],
    )


async def failures(redis: Redis, request_id: str) -> tuple[AttemptFailure, ...]:
    """Of the tries so far, oldest first."""
    rows: list[bytes] = await command(redis, "LRANGE", keys.failures(request_id), 0, -1)
    return tuple(_failure(row) for row in rows)


async def dead_letter(redis: Redis, trajectory: Trajectory, evidence: Sequence[AttemptFailure]) -> Verdict:
    """Dead-letter the request of a failed trajectory, and publish the trajectory with it, so that its group can
    close. `evidence` is of all its tries, this one last.
    """
    request = trajectory.claim.request
    letter = DeadLetter(
        request_id=request.id,
        task_id=request.task.id,
        failures=tuple(evidence),
        died_at=time.time(),
        purpose=request.purpose,
        group_id=request.group_id,
    )
    last = evidence[-1]
    why = f"{letter.kind}: {last.message}"[:300]
    record = DeathRecord(letter=encode(letter), last_failure=encode(last), why=why)
    return await stream.publish(redis, trajectory, death=record)


async def dead_letter_unreadable(
    redis: Redis, request_id: str | bytes, error: MalformedMessage, *, run_id: str = ""
) -> None:
    """Dead-letter a request that no worker can decode; with its run, if that is known or can be made out."""
    name = request_id.decode(errors="replace") if isinstance(request_id, bytes) else request_id
    evidence = (_unreadable(error, at=time.time()),)
    letter = DeadLetter(request_id=name, task_id="", failures=evidence, died_at=time.time())
    run_id = run_id or await _run_of(redis, name)
    await command(redis, "SADD", keys.runs(), run_id)
    arguments: list[Word] = [request_id, run_id, encode(letter), str(error)[:300]]
    await script(redis, transitions.DEAD_LETTER_UNREADABLE, arguments)


async def listed(redis: Redis, run_id: str) -> dict[str, DeadLetter]:
    """Every dead request of the run. A letter that cannot be read is itself poison, and says so."""
    rows: dict[bytes, bytes] = await command(redis, "HGETALL", keys.dead(run_id))
    return {name.decode(errors="replace"): _letter(name, row) for name, row in rows.items()}


async def find(redis: Redis, run_id: str, request_id: str) -> DeadLetter | None:
    row = await command(redis, "HGET", keys.dead(run_id), request_id)
    return None if row is None else _letter(request_id.encode(), row)


async def unanswered(redis: Redis, run_id: str) -> list[str]:
    """Dead requests whose failure was never published, for no worker could read them."""
    ids: list[bytes] = await command(redis, "HKEYS", keys.dead(run_id))
    names = [raw.decode(errors="replace") for raw in ids]
    found: list[str] = []
    for some in chunks(names):
        published: list[bytes | None] = await redis.mget([keys.published(name) for name in some])
        found += [name for name, entry in zip(some, published, strict=True) if entry is None]
    return found


async def requeue(redis: Redis, run_id: str, request_id: str) -> None:
    """Give a dead request a fresh budget.

    Raises KeyError if it is not among the dead, ValueError if its request cannot be had.
    """
    if not await command(redis, "HEXISTS", keys.dead(run_id), request_id):
        raise KeyError(request_id)
    request = await request_store.read(redis, request_id)
    if request is None:
        raise ValueError(f"{request_id}: the request itself is gone; only `drop` is possible")
    arguments = [
        *(request_id, run_id, request_store.rank_of(request), request_store.job_of(request)),
        *(request.task.image, request_store.HINT_S, request.enqueued_at),
    ]
    if not await script(redis, transitions.REQUEUE, arguments):
        raise KeyError(request_id)


async def drop(redis: Redis, run_id: str, request_id: str) -> None:
    """Forget a dead request and its evidence. Raises KeyError if it is not among the dead."""
    arguments: list[Word] = [run_id, FENCE_S, KEEP_ANSWERED_S, "dead", request_id]
    if not await script(redis, transitions.WITHDRAW, arguments):
        raise KeyError(request_id)


async def _run_of(redis: Redis, request_id: str) -> str:
    """By its own words, or else by who is owed an answer."""
    with contextlib.suppress(MalformedMessage):
        data = await request_store.read_bytes(redis, request_id)
        if data is not None:
            return decode(data, _Addressed).run_id
    known: set[bytes] = await command(redis, "SMEMBERS", keys.runs())
    for run_id in sorted(raw.decode(errors="replace") for raw in known):
        if await command(redis, "ZSCORE", keys.open_requests(run_id), request_id) is not None:
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
    """What stands for a message that says nothing itself."""
    return AttemptFailure(
        attempt=0, worker="", boundary="request", message=str(error), transient=False, failed_at=at
    )
