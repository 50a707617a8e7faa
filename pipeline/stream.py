"""The stream of results: a finished trajectory is published by its worker, read by the trainer, and acknowledged.

The stream holds heads in order of arrival; each body has its own key. A request is published once, however
often it was claimed, and never by a worker that was overtaken. An entry is acknowledged only when the step that used it
is in a checkpoint, so a trainer that dies reads it again. The command line reads without touching the trainer's
position. Every function is for one kind of job (`kinds.py`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, cast

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ResponseError

from pipeline import keys, transitions
from pipeline.kinds import ROLLOUT, AnyKind, H, JobKind, T
from pipeline.message import MalformedMessage, decode, decode_body, encode, encode_body
from pipeline.redis_calls import Word, chunks, command, script, scripts
from pipeline.request import R

GROUP = "learner"
CONSUMER = "learner"  # one reader, which finds its unacknowledged entries after a restart
FENCE_S = 30 * 24 * 3600
KEEP_ANSWERED_S = 6 * 3600  # a body stays this long after its acknowledgement, for `show`
KEEP_ANSWERED_BYTES = 512 * 1024**2  # a run keeps at most this many bytes of acknowledged bodies, the newest
KEPT_PART = 8  # at most 1/KEPT_PART of a Redis whose memory is limited goes to such bodies
KEEP_MALFORMED = 1000
FIRST_PAGE = 100  # heads in the first reply: most readers want only the newest few
PAGE = 5000  # heads in each further reply: two megabytes
KEEP_HEADS = 20_000  # acknowledged heads beyond the newest of these are trimmed


class RunForgotten(RedisConnectionError):
    """Redis no longer knows the trainer's consumer group, because it was restarted without its data. The condition ends when `open_reader`
    is called again.
    """


Entry = tuple[bytes, dict[bytes, bytes]]  # id and fields, as Redis has them
Verdict = Literal["published", "fenced", "duplicate", "withdrawn"]


@dataclass(frozen=True, slots=True)
class Delivery(Generic[H]):
    """A head as read from the stream; `entry_id` is what to acknowledge."""

    entry_id: str
    head: H
    read_at: float = field(compare=False)  # Unix s; a delivery that is read again is the same

    @property
    def published_at(self) -> float:
        """The time when the entry was put on the stream (Unix s), on Redis's clock."""
        return int(self.entry_id.partition("-")[0]) / 1000


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An entry whose head cannot be decoded; the trainer sets it aside."""

    entry_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathRecord:
    """The dead letter of a request, encoded, for storage with its failed result; `why` is displayed."""

    letter: bytes
    last_failure: bytes
    why: str


async def publish(
    redis: Redis, result: T, *, death: DeathRecord | None = None, kind: JobKind[R, T, H] = ROLLOUT
) -> Verdict:
    """Put the result on its run's stream, atomically and at most once; with `death` the same transaction moves its
    request to the dead letters.

    Any verdict but "published" means that nothing was changed. The call may be repeated after a broken connection; "duplicate" then means
    that the result had arrived. Raises OutOfMemoryError while Redis is full.
    """
    request, attempt = result.claim.request, result.claim.attempt
    body, head = await asyncio.to_thread(_packed, result, kind)
    arguments: list[Word] = [
        *(request.id, request.run_id, attempt, body, encode(head), FENCE_S),
        *(
            "dead-lettered" if death else "published",
            result.claim.worker,
            death.why if death else head.outcome,
        ),
        *((death.letter, death.last_failure) if death else ("", "")),
    ]
    return cast(Verdict, (await script(redis, transitions.PUBLISH.of(kind), arguments)).decode())


def _packed(result: T, kind: JobKind[R, T, H]) -> tuple[bytes, H]:
    """The encoded body and the head of a result. Call this in a thread, because it may compress and hash a patch of many megabytes."""
    body = encode_body(result)
    return body, kind.head_of(result, len(body))


async def publish_unreadable(redis: Redis, head: H, kind: JobKind[R, T, H] = ROLLOUT) -> None:
    """Put the head of a failure, without a body, on the stream, for a request that was dead-lettered because no worker
    could decode it.
    """
    arguments: list[Word] = [head.request_id, head.run_id, encode(head), FENCE_S]
    await script(redis, transitions.PUBLISH_UNREADABLE.of(kind), arguments)


async def open_reader(redis: Redis, run_id: str, kind: AnyKind = ROLLOUT) -> bool:
    """Makes the trainer's consumer group, once; older entries count as unread. Returns False if the group existed."""
    name = keys.stream(run_id, kind)
    try:
        await redis.xgroup_create(name, GROUP, id="0", mkstream=True)
    except OutOfMemoryError:
        if not await redis.exists(name) or not await redis.xinfo_groups(name):
            raise
        return False
    except ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
        return False
    return True


async def read_unacknowledged(
    redis: Redis, run_id: str, kind: JobKind[R, T, H] = ROLLOUT
) -> list[Delivery[H]]:
    """All heads that were delivered before and not acknowledged, oldest first.

    A restarted trainer begins with these. Raises RunForgotten.
    """
    found: list[Delivery[H]] = []
    name, position = keys.stream(run_id, kind), "0"
    while True:
        entries = await _read_group(redis, name, position, count=500, block_ms=None)
        if not entries:
            return found
        found += await _deliveries(redis, run_id, entries, kind)
        position = entries[-1][0].decode()


async def read_new(
    redis: Redis,
    run_id: str,
    *,
    count: int = 100,
    block_ms: int | None = 1000,
    kind: JobKind[R, T, H] = ROLLOUT,
) -> list[Delivery[H]]:
    """The next heads. Waits up to `block_ms` for the first; None: does not wait. Raises RunForgotten."""
    entries = await _read_group(redis, keys.stream(run_id, kind), ">", count=count, block_ms=block_ms)
    return await _deliveries(redis, run_id, entries, kind)


async def read_body(redis: Redis, request_id: str, kind: JobKind[R, T, H] = ROLLOUT) -> T | None:
    """The whole result; None if it is no longer kept. Raises MalformedMessage."""
    data = await read_packed_body(redis, request_id, kind)
    return None if data is None else decode_body(data, kind.result)


async def read_packed_body(redis: Redis, request_id: str, kind: AnyKind = ROLLOUT) -> bytes | None:
    """The whole result as it was published, for `message.decode_body`; None if it is no longer kept."""
    data: bytes | None = await redis.get(keys.body(request_id, kind))
    return data


async def acknowledge(
    redis: Redis, run_id: str, answered: Sequence[tuple[str, str]], kind: AnyKind = ROLLOUT
) -> None:
    """Acknowledge (entry id, request id) pairs whose steps are in a checkpoint.

    A dead-lettered request keeps its evidence. One that was requeued after this entry stays outstanding.
    """
    keep_bytes = min(KEEP_ANSWERED_BYTES, await max_bytes(redis) // KEPT_PART or KEEP_ANSWERED_BYTES)
    for some in chunks(answered):
        rows = [
            (run_id, GROUP, entry_id, request_id, KEEP_ANSWERED_S, keep_bytes)
            for entry_id, request_id in some
        ]
        await scripts(redis, transitions.ACKNOWLEDGE.of(kind), rows)
    await _trim(redis, keys.stream(run_id, kind))


async def unacknowledged_bytes(redis: Redis, run_id: str, kind: AnyKind = ROLLOUT) -> int:
    """Bytes of the bodies that Redis holds until a checkpoint contains them."""
    return int(await command(redis, "HGET", keys.unacknowledged_bytes(run_id, kind), "") or 0)


async def max_bytes(redis: Redis) -> int:
    """The memory limit of Redis; 0 if it has none."""
    memory: dict[str, int] = await command(redis, "INFO", "memory")
    return memory["maxmemory"]


async def memory_use(redis: Redis) -> tuple[int, int]:
    """The number of bytes that Redis uses, and the number that it may use: its memory limit, or its host's memory if it has none."""
    memory: dict[str, int] = await command(redis, "INFO", "memory")
    return memory["used_memory"], memory["maxmemory"] or memory["total_system_memory"]


async def delivered_at(redis: Redis, run_id: str, entry_id: str, kind: AnyKind = ROLLOUT) -> float | None:
    """The time when the entry was last delivered to the trainer (Unix seconds); None if it never was, or is acknowledged."""
    name = keys.stream(run_id, kind)
    rows: list[dict[str, Any]] = await redis.xpending_range(name, GROUP, entry_id, entry_id, 1)
    return time.time() - rows[0]["time_since_delivered"] / 1000 if rows else None


async def newest_heads(
    redis: Redis, run_id: str, count: int, kind: JobKind[R, T, H] = ROLLOUT
) -> list[Delivery[H]]:
    """The last `count` heads, newest first, without touching the trainer's position."""
    entries: list[Entry] = await redis.xrevrange(keys.stream(run_id, kind), count=count)
    found = [_delivery(*entry, kind) for entry in entries]
    return [delivery for delivery in found if not isinstance(delivery, Unreadable)]


async def heads_backwards(
    redis: Redis, run_id: str, kind: JobKind[R, T, H] = ROLLOUT
) -> AsyncIterator[Delivery[H]]:
    """Every remaining head, newest first, read page by page as the caller iterates."""
    position, page = "+", FIRST_PAGE
    while True:
        entries: list[Entry] = await redis.xrevrange(keys.stream(run_id, kind), max=position, count=page)
        for entry in entries:
            delivery = _delivery(*entry, kind)
            if not isinstance(delivery, Unreadable):
                yield delivery
        if len(entries) < page:
            return
        position, page = f"({entries[-1][0].decode()}", PAGE


async def heads_after(
    redis: Redis, positions: dict[str, str], *, block_ms: int = 1000, kind: JobKind[R, T, H] = ROLLOUT
) -> list[tuple[str, Delivery[H] | Unreadable]]:
    """The entries after each run's entry id, with their run; waits up to `block_ms` for the first. For `tail`."""
    wanted: dict[Any, Any] = {keys.stream(run_id, kind): entry_id for run_id, entry_id in positions.items()}
    answer: list[tuple[bytes, list[Entry]]] = await redis.xread(wanted, block=block_ms)
    runs = {keys.stream(run_id, kind).encode(): run_id for run_id in positions}
    return [(runs[name], _delivery(*entry, kind)) for name, entries in answer for entry in entries]


async def _read_group(
    redis: Redis, name: str, position: str, *, count: int, block_ms: int | None
) -> list[Entry]:
    wanted: dict[Any, Any] = {name: position}
    try:
        answer: list[Any] = await redis.xreadgroup(GROUP, CONSUMER, wanted, count=count, block=block_ms)
    except ResponseError as error:
        if not str(error).startswith("NOGROUP"):
            raise
        raise RunForgotten(f"it was started again without {name}") from error
    return answer[0][1] if answer else []


async def _deliveries(
    redis: Redis, run_id: str, entries: list[Entry], kind: JobKind[R, T, H]
) -> list[Delivery[H]]:
    """Decode the entries. One that cannot be decoded is set aside with the reason and acknowledged, so that it cannot
    block the stream.
    """
    found: list[Delivery[H]] = []
    for entry, fields in entries:
        delivery = _delivery(entry, fields, kind)
        if isinstance(delivery, Unreadable):
            arguments: list[Word] = [run_id, GROUP, entry, delivery.reason, KEEP_MALFORMED]
            await script(redis, transitions.SET_ASIDE.of(kind), arguments)
        else:
            found.append(delivery)
    return found


def _delivery(
    entry: bytes, fields: dict[bytes, bytes] | None, kind: JobKind[R, T, H]
) -> Delivery[H] | Unreadable:
    """The decoded entry. `fields` is None for an entry that was delivered and then trimmed."""
    try:
        head = decode((fields or {}).get(b"head", b""), kind.head)
        return Delivery(entry.decode(), head, read_at=time.time())
    except MalformedMessage as error:
        return Unreadable(entry.decode(), str(error))


async def _trim(redis: Redis, stream: str) -> None:
    """Delete heads older than the newest KEEP_HEADS, if they and all before them are acknowledged."""
    if await redis.xlen(stream) <= KEEP_HEADS * 2:
        return
    kept = await redis.xrevrange(stream, count=KEEP_HEADS)
    pending = cast(dict[str, Any], await redis.xpending(stream, GROUP))
    oldest = kept[-1][0]
    if pending["pending"]:
        oldest = min(oldest, pending["min"], key=_order)
    info = cast(list[dict[str, Any]], await redis.xinfo_groups(stream))
    oldest = min(oldest, info[0]["last-delivered-id"], key=_order)
    await redis.xtrim(stream, minid=oldest, approximate=True)


def _order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.decode().partition("-")
    return int(milliseconds), int(sequence)
