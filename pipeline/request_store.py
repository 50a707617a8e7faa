"""A request as it is stored: whole under a key of its own, as the arq job that queues it with a label for people, and its events in order.

The script of `transitions.py` that makes a change also records the event, so an event costs no round trip and is never recorded for a
change that did not happen.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from arq.jobs import serialize_job
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from pipeline import keys, transitions
from pipeline.kinds import ROLLOUT, AnyKind, H, JobKind, T
from pipeline.message import MalformedMessage, Message, UnixSeconds, decode
from pipeline.redis_calls import chunks, command
from pipeline.request import JobRequest, R

HINT_S = 24 * 3600  # how long the image of a request can be read without reading the whole request


class Label(Message, frozen=True, kw_only=True):
    """The subject of a waiting request. Its arq job carries this, so that a list of requests need not read them whole."""

    task_id: str = ""
    purpose: str = ""
    group_id: str = ""


class _Job(msgspec.Struct):
    """arq's job, with arq's field names."""

    t: int | None  # number of the try
    f: str  # name of the function
    a: list[str]  # arguments: the request's id
    k: dict[str, str]  # a Label
    et: Annotated[int, msgspec.Meta(ge=0, le=10**14)]  # when it was enqueued, Unix milliseconds


def encode_job(job: dict[str, Any]) -> bytes:
    """arq's job dict as msgpack, never as pickle."""
    return msgspec.msgpack.encode(job)


def decode_job(data: bytes) -> dict[str, Any]:
    """Inverse of encode_job. Raises MalformedMessage for a job that arq could not use."""
    return msgspec.structs.asdict(decode(data, _Job))


async def read(redis: Redis, request_id: str, kind: JobKind[R, T, H] = ROLLOUT) -> R | None:
    """The request; None if it is gone. Raises MalformedMessage."""
    data = await read_bytes(redis, request_id, kind)
    return None if data is None else decode_request(data, request_id.encode(), kind)


async def read_bytes(redis: Redis, request_id: str, kind: AnyKind = ROLLOUT) -> bytes | None:
    """The encoded request; None if it is gone. Raises MalformedMessage for a key of another type."""
    try:
        return await redis.get(keys.request(request_id, kind))
    except ResponseError as error:
        if not str(error).startswith("WRONGTYPE"):
            raise
        raise MalformedMessage(f"not a {kind.request.__name__}: {error}") from error


async def labels(redis: Redis, request_ids: Sequence[str]) -> list[Label]:
    """The label of each of these requests; an empty one for a request that is not queued."""
    found: list[Label] = []
    for some in chunks(request_ids):
        rows: list[bytes | None] = await redis.mget([keys.arq_job(request_id) for request_id in some])
        found += [_label(row) for row in rows]
    return found


def decode_request(data: bytes, request_id: bytes, kind: JobKind[R, T, H] = ROLLOUT) -> R:
    """The request stored under an id. Raises MalformedMessage, also for one whose own id differs."""
    request = decode(data, kind.request)
    if request.id.encode(errors="replace") != request_id:
        raise MalformedMessage(
            f"not the {kind.request.__name__} it is stored as: its own id is {request.id!r}"
        )
    return request


def rank_of(request: JobRequest) -> int:
    """Its score among the requests that were never claimed, in milliseconds; the lowest is claimed first."""
    times = 2 if request.purpose == "eval" else 1
    return milliseconds(request.group_asked_at or request.enqueued_at) - times * transitions.ROTATED_MS


def job_of(request: R, kind: JobKind[R, T, H] = ROLLOUT) -> bytes:
    """The arq job of the request."""
    about = Label(task_id=request.task_id, purpose=request.purpose, group_id=request.group_id)
    enqueued_ms, label = milliseconds(request.enqueued_at), msgspec.structs.asdict(about)
    return serialize_job(kind.name, (request.id,), label, None, enqueued_ms, serializer=encode_job)


def milliseconds(seconds: float) -> int:
    """Whole milliseconds, Redis's unit of time."""
    return int(seconds * 1000)


def _label(row: bytes | None) -> Label:
    try:
        return msgspec.convert(decode_job(row)["k"], Label) if row else Label()
    except MalformedMessage:
        return Label()


class Event(Message, frozen=True, array_like=True):
    """One change of state of a request."""

    at: UnixSeconds  # time of Redis's clock
    # "enqueued", "claimed", "failed", "returned", "published", "dead-lettered", "acknowledged", "withdrawn", "requeued",
    # "re-enqueued"; from the command line also "read"
    what: str
    attempt: int = 0  # 0: the event is not an act of a worker
    worker: str = ""
    detail: str = ""


async def events(redis: Redis, request_id: str, kind: AnyKind = ROLLOUT) -> list[Event]:
    """The request's events, oldest first; one that cannot be decoded is listed as "unreadable"."""
    found: list[Event] = []
    rows: list[bytes] = await command(redis, "LRANGE", keys.events(request_id, kind), 0, -1)
    for row in rows:
        try:
            found.append(decode(row, Event))
        except MalformedMessage as error:
            found.append(Event(0.0, "unreadable", detail=str(error)))
    return found
