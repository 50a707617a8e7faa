"""What happened to a request, in order: written by the scripts of `transitions.py` in the same breath as the change
itself, so it costs no round trip and cannot say what did not happen.
"""

from redis.asyncio import Redis

from pipeline import keys
from pipeline.commands import command
from pipeline.message import MalformedMessage, Message, UnixSeconds, decode


class Event(Message, frozen=True, array_like=True):
    """One change of state."""

    at: UnixSeconds  # on Redis's clock
    what: str  # "enqueued", "claimed", "failed", "returned", "published", "dead-lettered", "acknowledged", ...
    attempt: int = 0  # 0: no worker's doing
    worker: str = ""
    detail: str = ""


async def events(redis: Redis, request_id: str) -> list[Event]:
    """The request's life, oldest first; what cannot be read says so."""
    found: list[Event] = []
    rows: list[bytes] = await command(redis, "LRANGE", keys.events(request_id), 0, -1)
    for row in rows:
        try:
            found.append(decode(row, Event))
        except MalformedMessage as error:
            found.append(Event(0.0, "unreadable", detail=str(error)))
    return found
