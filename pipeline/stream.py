"""Answers: finished trajectories, in the order they arrived.

Workers publish, the learner reads and acknowledges, the command line only looks. The stream holds heads; a
body stays under its own key. One request is published once, however often it was claimed, and never by a
worker that has been overtaken. An entry is acknowledged only when the step that used it is in a checkpoint,
so a trainer that dies reads it again.
"""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError, ResponseError

from pipeline import keys, transitions
from pipeline.commands import Word, chunks, command, script, scripts
from pipeline.message import MalformedMessage, decode, decode_body, encode, encode_body
from pipeline.trajectory import Trajectory, TrajectoryHead, head_of

GROUP = "learner"
CONSUMER = "learner"  # one reader, which finds its unacknowledged entries after a restart
FENCE_S = 30 * 24 * 3600
KEEP_ANSWERED_S = 6 * 3600  # bodies stay this long after their acknowledgement, for `show`
KEEP_ANSWERED_BYTES = 512 * 1024**2  # or until so many bytes of younger ones are there, per run
KEEP_MALFORMED = 1000
KEPT_PART = 8  # of a Redis with a bound, kept bodies of a run take at most this part
FIRST_PAGE = 100  # most look at the newest few
PAGE = 5000  # heads in one reply: two megabytes
KEEP_HEADS = 20_000  # acknowledged heads beyond the newest of these are trimmed

Entry = tuple[bytes, dict[bytes, bytes]]  # id and fields, as Redis has them
Verdict = Literal["published", "fenced", "duplicate", "withdrawn"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A head as read from the stream; `entry_id` is what to acknowledge."""

    entry_id: str
    head: TrajectoryHead


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An entry that is no head; the learner sets it aside."""

    entry_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathRecord:
    """The dead letter of a request, encoded, to be stored with its failed trajectory; `why` is for people."""

    letter: bytes
    last_failure: bytes
    why: str


async def publish(redis: Redis, trajectory: Trajectory, *, death: DeathRecord | None = None) -> Verdict:
    """Put the finished trajectory on its run's stream, atomically and at most once; with `death` the
    same transaction moves its request to the dead letters.

    Anything but "published" left no trace. May be called again after a broken connection: then "duplicate" says
    that it had arrived. Raises OutOfMemoryError while Redis is full.
    """
    request, attempt = trajectory.claim.request, trajectory.claim.attempt
    body = encode_body(trajectory)
    head = head_of(trajectory, body_bytes=len(body))
    arguments: list[Word] = [
        *(request.id, request.run_id, attempt, body, encode(head), FENCE_S),
        *(
            "dead-lettered" if death else "published",
            trajectory.claim.worker,
            death.why if death else head.outcome,
        ),
        *((death.letter, death.last_failure) if death else ("", "")),
    ]
    return cast(Verdict, (await script(redis, transitions.PUBLISH, arguments)).decode())


async def publish_unreadable(redis: Redis, head: TrajectoryHead) -> None:
    """Put a failed head without a body on the stream, for a request that is dead because nobody can read it."""
    arguments: list[Word] = [head.request_id, head.run_id, encode(head), FENCE_S]
    await script(redis, transitions.PUBLISH_UNREADABLE, arguments)


async def open_reader(redis: Redis, run_id: str) -> None:
    """Make the learner's group, once; entries from before it count as unread."""
    try:
        await redis.xgroup_create(keys.stream(run_id), GROUP, id="0", mkstream=True)
    except OutOfMemoryError:
        if not await redis.exists(keys.stream(run_id)) or not await redis.xinfo_groups(keys.stream(run_id)):
            raise
    except ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise


async def read_unacknowledged(redis: Redis, run_id: str) -> list[Delivery]:
    """Everything delivered before and not acknowledged, oldest first: what a restarted learner owes."""
    found: list[Delivery] = []
    position = "0"
    while True:
        entries = await _read_group(redis, run_id, position, count=500, block_ms=None)
        if not entries:
            return found
        found += await _deliveries(redis, run_id, entries)
        position = entries[-1][0].decode()


async def read_new(
    redis: Redis, run_id: str, *, count: int = 100, block_ms: int | None = 1000
) -> list[Delivery]:
    """The next heads, waiting up to `block_ms` for the first; None: not waiting."""
    return await _deliveries(
        redis, run_id, await _read_group(redis, run_id, ">", count=count, block_ms=block_ms)
    )


async def read_body(redis: Redis, request_id: str) -> Trajectory | None:
    """The whole trajectory, while it is kept. Raises MalformedMessage."""
    data = await redis.get(keys.body(request_id))
    return None if data is None else decode_body(data, Trajectory)


async def acknowledge(redis: Redis, run_id: str, answered: Sequence[tuple[str, str]]) -> None:
    """Settle (entry id, request id) pairs: their steps are in a checkpoint.

    A dead request keeps its evidence. One that was requeued after this answer is owed still.
    """
    keep_bytes = min(KEEP_ANSWERED_BYTES, await max_bytes(redis) // KEPT_PART or KEEP_ANSWERED_BYTES)
    for some in chunks(answered):
        rows = [
            (run_id, GROUP, entry_id, request_id, KEEP_ANSWERED_S, keep_bytes)
            for entry_id, request_id in some
        ]
        await scripts(redis, transitions.ACKNOWLEDGE, rows)
    await _trim(redis, run_id)


async def unacknowledged_bytes(redis: Redis, run_id: str) -> int:
    """Bytes of all bodies that Redis holds for the learner until a checkpoint contains them."""
    return int(await command(redis, "HGET", keys.unacknowledged_bytes(run_id), "") or 0)


async def max_bytes(redis: Redis) -> int:
    """What Redis may hold of everything, 0 if there is no bound."""
    memory: dict[str, int] = await command(redis, "INFO", "memory")
    return memory["maxmemory"]


async def delivered_at(redis: Redis, run_id: str, entry_id: str) -> float | None:
    """When the learner was last given the entry (Unix s); None if it was not yet, or has acknowledged it."""
    rows: list[dict[str, Any]] = await redis.xpending_range(keys.stream(run_id), GROUP, entry_id, entry_id, 1)
    return time.time() - rows[0]["time_since_delivered"] / 1000 if rows else None


async def newest_heads(redis: Redis, run_id: str, count: int) -> list[Delivery]:
    """The last `count` heads, newest first, without touching the learner's position."""
    entries: list[Entry] = await redis.xrevrange(keys.stream(run_id), count=count)
    return [delivery for entry in entries if isinstance(delivery := _delivery(*entry), Delivery)]


async def heads_backwards(redis: Redis, run_id: str) -> AsyncIterator[Delivery]:
    """Every head that is still there, newest first, read page by page as far as one wants to go."""
    position, page = "+", FIRST_PAGE
    while True:
        entries: list[Entry] = await redis.xrevrange(keys.stream(run_id), max=position, count=page)
        for entry in entries:
            delivery = _delivery(*entry)
            if isinstance(delivery, Delivery):
                yield delivery
        if len(entries) < page:
            return
        position, page = f"({entries[-1][0].decode()}", PAGE


async def heads_after(
    redis: Redis, positions: dict[str, str], *, block_ms: int = 1000
) -> list[tuple[str, Delivery | Unreadable]]:
    """What is younger than each run's entry id, with its run; waits up to `block_ms` for the first.

    For `tail`.
    """
    wanted: dict[Any, Any] = {keys.stream(run_id): entry_id for run_id, entry_id in positions.items()}
    answer: list[tuple[bytes, list[Entry]]] = await redis.xread(wanted, block=block_ms)
    runs = {keys.stream(run_id).encode(): run_id for run_id in positions}
    return [(runs[name], _delivery(*entry)) for name, entries in answer for entry in entries]


async def _read_group(
    redis: Redis, run_id: str, position: str, *, count: int, block_ms: int | None
) -> list[Entry]:
    wanted: dict[Any, Any] = {keys.stream(run_id): position}
    answer: list[Any] = await redis.xreadgroup(GROUP, CONSUMER, wanted, count=count, block=block_ms)
    return answer[0][1] if answer else []


async def _deliveries(redis: Redis, run_id: str, entries: list[Entry]) -> list[Delivery]:
    """Decode.

    What cannot be read is set aside with the reason and acknowledged, so that it cannot block the stream.
    """
    found: list[Delivery] = []
    for entry, fields in entries:
        delivery = _delivery(entry, fields)
        if isinstance(delivery, Delivery):
            found.append(delivery)
            continue
        await script(redis, transitions.SET_ASIDE, [run_id, GROUP, entry, delivery.reason, KEEP_MALFORMED])
    return found


def _delivery(entry: bytes, fields: dict[bytes, bytes] | None) -> Delivery | Unreadable:
    """`fields` is None for an entry that was delivered and then trimmed."""
    try:
        return Delivery(entry.decode(), decode((fields or {}).get(b"head", b""), TrajectoryHead))
    except MalformedMessage as error:
        return Unreadable(entry.decode(), str(error))


async def _trim(redis: Redis, run_id: str) -> None:
    """Drop heads older than the newest KEEP_HEADS, if they and all before them are acknowledged."""
    stream = keys.stream(run_id)
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
