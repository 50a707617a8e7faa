"""Asks: rollout requests out through arq, claimed under a lease, handed back or dead-lettered.

Promises. A request enqueued is answered, withdrawn or dead: never lost (`sweep` finds what Redis itself lost).
One claim is in force at a time: its lease is renewed every RENEW_S and lapses LEASE_S after its worker's last
breath, upon which the next worker takes the request. Whatever the overtaken worker still does is fenced off by
its attempt number. The arq job carries the request's id and a label; the request has a key of its own, so it can be
shown, requeued or kept as evidence at any stage. What each call changes is in `transitions.py`.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
from arq.connections import ArqRedis, create_pool
from arq.jobs import serialize_job
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pipeline import keys, stream, transitions
from pipeline.commands import Word, chunks, command, script, scripts
from pipeline.errors import Boundary, FailureClass, class_of
from pipeline.message import MalformedMessage, Message, UnixSeconds, decode, encode
from pipeline.redis_url import connection_settings
from pipeline.request import Claim, RolloutRequest
from pipeline.stream import FENCE_S, KEEP_ANSWERED_S, Burial, Verdict
from pipeline.trajectory import Failed, Trajectory

JOB_NAME = "rollout"
LEASE_S = 6.0
RENEW_S = 1.5
HINT_S = 24 * 3600  # how long it is known, without reading whole requests, which image one wants
# A peer that fell silent without a word is given up after half a minute. Not by redis-py's socket_timeout, under which
# a cancellation gets lost now and then (asyncio.wait_for of Python 3.11).
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 15,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 30_000,
}
KEEP_DETAIL_CHARS = 20_000  # of a failure's log: its end is what tells

UNREADABLE = "unreadable"  # stands for the run of a request that does not even tell its run

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


class Unclaimable(Message, frozen=True, kw_only=True):
    """A request that was taken and cannot be read; it has been dead-lettered."""

    request_id: str
    reason: str


class Label(Message, frozen=True, kw_only=True):
    """What a waiting request is about, without reading it whole: its arq job carries this for people."""

    task_id: str = ""
    purpose: str = ""
    group_id: str = ""


class _Job(msgspec.Struct):
    """What arq puts into a job, in its words."""

    t: int | None  # try
    f: str  # function
    a: list[str]  # arguments: the request's id
    k: dict[str, str]  # a Label
    et: Annotated[int, msgspec.Meta(ge=0, le=10**14)]  # enqueued, Unix milliseconds


class _Addressed(Message, frozen=True, kw_only=True):
    """The part of a request that says where it belongs."""

    run_id: str


def encode_job(job: dict[str, Any]) -> bytes:
    """arq's job dict as msgpack; never pickle."""
    return msgspec.msgpack.encode(job)


def decode_job(data: bytes) -> dict[str, Any]:
    """Inverse of encode_job. Raises MalformedMessage for what arq could not make sense of."""
    return msgspec.structs.asdict(decode(data, _Job))


async def connect(url: str, *, patience_s: int = 30) -> ArqRedis:
    """A pool that speaks to arq's queue and, being a Redis client, to everything else.

    Waits `patience_s` for a Redis that starts. Raises ValueError for a URL that `connection_settings` refuses.
    """
    settings = connection_settings(url)
    settings.conn_timeout = 10
    settings.conn_retries = patience_s
    settings.conn_retry_delay = 1
    pool = await create_pool(
        settings, job_serializer=encode_job, job_deserializer=decode_job, default_queue_name=keys.QUEUE
    )
    if settings.unix_socket_path is None:
        connections = cast(Any, pool.connection_pool)
        connections.connection_kwargs |= {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
        await connections.disconnect()
        connections.reset()  # the one that arq made without them is not to be used again
    return pool


_ROOM = "#!lua\nreturn 1"  # refused by a Redis that is full, for it does not say that it adds nothing


async def check(redis: Redis) -> None:
    """Raises RedisError or OSError unless Redis answers, and has room."""
    await script(redis, _ROOM, [])


# Asking


async def enqueue(redis: Redis, request: RolloutRequest) -> None:
    """Owe `request` and queue it; doing so again changes nothing.

    Evaluations go before training: they are few, and the weights wait for them.
    """
    arguments = [
        *(request.id, request.run_id, encode(request), request.task.image, HINT_S, request.enqueued_at),
        *(_rank(request), _job(request)),
    ]
    await script(redis, transitions.ENQUEUE, arguments)


async def sweep(redis: Redis, run_id: str) -> list[str]:
    """Queue again whatever is owed but neither queued, claimed, answered nor dead, and return those ids.

    Safe to call at any time. There is such a request only if Redis lost something, or somebody meddled.
    """
    found: list[str] = []
    for request_id in await _in_limbo(redis, run_id):
        try:
            request = await stored_request(redis, request_id)
        except MalformedMessage as error:
            await bury_unreadable(redis, request_id, error, run_id=run_id)
            continue
        if request is not None:
            arguments: list[Word] = [request_id, run_id, _rank(request), _job(request)]
            if await script(redis, transitions.MEND, arguments):
                found.append(request_id)
    return found


async def withdraw(redis: Redis, run_id: str, request_ids: Sequence[str]) -> list[str]:
    """Ask for these no longer, unless they were answered already; returns those that are now asked for by nobody.

    A worker in the middle of one notices at its next breath and stops. Calling it again changes nothing.
    """
    return await _withdraw(redis, run_id, request_ids, dead=False)


async def _withdraw(redis: Redis, run_id: str, request_ids: Sequence[str], *, dead: bool) -> list[str]:
    gone: list[str] = []
    for some in chunks(request_ids):
        rows = [(run_id, FENCE_S, KEEP_ANSWERED_S, int(dead), request_id) for request_id in some]
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


async def stored_request(redis: Redis, request_id: str) -> RolloutRequest | None:
    """None if it is gone. Raises MalformedMessage."""
    data = await _stored(redis, request_id)
    return None if data is None else _request(data, request_id.encode())


async def waiting_labels(redis: Redis, request_ids: Sequence[str]) -> list[Label]:
    """What each of these is about; empty for one that is not queued."""
    found: list[Label] = []
    for some in chunks(request_ids):
        rows: list[bytes | None] = await redis.mget([keys.arq_job(request_id) for request_id in some])
        found += [_label(row) for row in rows]
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
    rows: list[Any] = await script(redis, transitions.TAKE, [worker, _milliseconds(LEASE_S), count])
    found: list[Claim | Unclaimable] = []
    for row in rows:
        try:
            found.append(_claim(row, worker))
        except MalformedMessage as error:
            request_id = row[0].decode(errors="replace")
            await bury_unreadable(redis, row[0], error)
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
    answer = await script(redis, transitions.CLAIM, [worker, _milliseconds(LEASE_S), request_id])
    return cast(Refusal, answer.decode()) if isinstance(answer, bytes) else _claim(answer, worker)


async def renew(redis: Redis, claim: Claim, lease: Lease) -> bool:
    """Breathe.

    False: the request was withdrawn or another worker holds it now, so stop and publish nothing.
    """
    arguments: list[Word] = [claim.request.id, claim.attempt, encode(lease), _milliseconds(LEASE_S)]
    return bool(await script(redis, transitions.RENEW, arguments))


async def hand_back(
    redis: Redis, claim: Claim, *, wait_s: float = 0.0, failure: AttemptFailure | None = None, why: str = ""
) -> bool:
    """Let another try be made after `wait_s`. False: fenced off.

    Without `failure` it counts against no budget; `why` is for people.
    """
    arguments: list[Word] = [
        *(claim.request.id, claim.attempt, _milliseconds(wait_s)),
        b"" if failure is None else encode(failure),
        *("handed back" if failure is None else "failed", claim.worker),
        why if failure is None else f"{failure.boundary}: {failure.message}"[:300],
    ]
    return bool(await script(redis, transitions.HAND_BACK, arguments))


async def release(redis: Redis, claim: Claim) -> None:
    """Let go, so that the next worker need not wait for the lease to lapse."""
    await hand_back(redis, claim)


async def rewrite_job(redis: Redis, request: RolloutRequest) -> None:
    """Make arq's part of a queued request anew, should it be missing or not be what it should be."""
    await script(redis, transitions.REWRITE_JOB, [request.id, _job(request)])


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


# Failing


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


async def bury(redis: Redis, trajectory: Trajectory, evidence: Sequence[AttemptFailure]) -> Verdict:
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
    burial = Burial(letter=encode(letter), last_failure=encode(last), why=why)
    return await stream.publish(redis, trajectory, burial=burial)


async def bury_unreadable(
    redis: Redis, request_id: str | bytes, error: MalformedMessage, *, run_id: str = ""
) -> None:
    """Dead-letter a request that no worker can decode; with its run, if that is known or can be made out."""
    name = request_id.decode(errors="replace") if isinstance(request_id, bytes) else request_id
    evidence = (_unreadable(error, at=time.time()),)
    letter = DeadLetter(request_id=name, task_id="", failures=evidence, died_at=time.time())
    run_id = run_id or await _run_of(redis, name)
    await command(redis, "SADD", keys.runs(), run_id)
    arguments: list[Word] = [request_id, run_id, encode(letter), str(error)[:300]]
    await script(redis, transitions.BURY_UNREADABLE, arguments)


async def dead_letters(redis: Redis, run_id: str) -> dict[str, DeadLetter]:
    """Every dead request of the run. A letter that cannot be read is itself poison, and says so."""
    rows: dict[bytes, bytes] = await command(redis, "HGETALL", keys.dead(run_id))
    return {name.decode(errors="replace"): _letter(name, row) for name, row in rows.items()}


async def dead_letter(redis: Redis, run_id: str, request_id: str) -> DeadLetter | None:
    row = await command(redis, "HGET", keys.dead(run_id), request_id)
    return None if row is None else _letter(request_id.encode(), row)


async def requeue(redis: Redis, run_id: str, request_id: str) -> None:
    """Give a dead request a fresh budget.

    Raises KeyError if it is not among the dead, ValueError if its request cannot be had.
    """
    if not await command(redis, "HEXISTS", keys.dead(run_id), request_id):
        raise KeyError(request_id)
    request = await stored_request(redis, request_id)
    if request is None:
        raise ValueError(f"{request_id}: the request itself is gone; only `drop` is possible")
    arguments = [
        *(request_id, run_id, _rank(request), _job(request)),
        *(request.task.image, HINT_S, request.enqueued_at),
    ]
    if not await script(redis, transitions.REQUEUE, arguments):
        raise KeyError(request_id)


async def drop(redis: Redis, run_id: str, request_id: str) -> None:
    """Forget a dead request and its evidence. Raises KeyError if it is not among the dead."""
    if not await _withdraw(redis, run_id, [request_id], dead=True):
        raise KeyError(request_id)


async def unanswered_dead(redis: Redis, run_id: str) -> list[str]:
    """Dead requests whose failure was never published, for no worker could read them."""
    ids: list[bytes] = await command(redis, "HKEYS", keys.dead(run_id))
    names = [raw.decode(errors="replace") for raw in ids]
    found: list[str] = []
    for some in chunks(names):
        published: list[bytes | None] = await redis.mget([keys.published(name) for name in some])
        found += [name for name, entry in zip(some, published, strict=True) if entry is None]
    return found


async def _stored(redis: Redis, request_id: str) -> bytes | None:
    """Raises MalformedMessage for a key of another type: somebody else's."""
    try:
        return await redis.get(keys.request(request_id))
    except ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        raise MalformedMessage(f"not a RolloutRequest: {error}") from error


async def _run_of(redis: Redis, request_id: str) -> str:
    """By its own words, or else by who is owed an answer."""
    with contextlib.suppress(MalformedMessage):
        data = await _stored(redis, request_id)
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


def _request(data: bytes, request_id: bytes) -> RolloutRequest:
    """The request stored under an id. Raises MalformedMessage, also for one that says it is another."""
    request = decode(data, RolloutRequest)
    if request.id.encode(errors="replace") != request_id:
        raise MalformedMessage(f"not the RolloutRequest it is stored as: it says it is {request.id!r}")
    return request


def _claim(row: list[Any], worker: str) -> Claim:
    """Of the reply of a claiming script. Raises MalformedMessage, also for one that could not be claimed."""
    if len(row) == 2:
        raise MalformedMessage(f"its keys cannot be used: {row[1].decode(errors='replace')}")
    request_id, data, attempt, num_unended, now_ms = row
    return Claim(
        request=_request(data, request_id),
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


def _rank(request: RolloutRequest) -> int:
    """Its place among those that nobody has claimed yet."""
    times = 2 if request.purpose == "eval" else 1
    return _milliseconds(request.group_asked_at or request.enqueued_at) - times * transitions.ROTATED_MS


def _job(request: RolloutRequest) -> bytes:
    about = Label(task_id=request.task.id, purpose=request.purpose, group_id=request.group_id)
    enqueued_ms, label = _milliseconds(request.enqueued_at), msgspec.structs.asdict(about)
    return serialize_job(JOB_NAME, (request.id,), label, None, enqueued_ms, serializer=encode_job)


def _label(row: bytes | None) -> Label:
    try:
        return msgspec.convert(decode_job(row)["k"], Label) if row else Label()
    except MalformedMessage:
        return Label()


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
