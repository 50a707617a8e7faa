"""The events of a request, in order. The script of `transitions.py` that makes a change also records the event, so an
event costs no round trip and is never recorded for a change that did not happen.
"""

from redis.asyncio import Redis

from pipeline import keys
from pipeline.commands import command
from pipeline.kinds import ROLLOUT, AnyKind
from pipeline.message import MalformedMessage, Message, UnixSeconds, decode


class Event(Message, frozen=True, array_like=True):
    """One change of state."""

    at: UnixSeconds  # on Redis's clock
    # "enqueued", "claimed", "failed", "returned", "published", "dead-lettered", "acknowledged", "withdrawn", "requeued",
    # "re-enqueued"; from the command line also "read"
    what: str
    attempt: int = 0  # 0: not the act of a worker
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
