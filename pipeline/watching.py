"""Episodes that a person watches while they are played: their newest turns, as text.

A page that shows such an episode says so every few seconds. The worker learns it when it renews the lease, and then writes the newest turns
under a key that soon expires. An episode that nobody watches writes nothing, and nothing is written while Redis is full. What is shown is
for display only: nothing is trained of it.
"""

from collections.abc import Sequence

from msgspec.structs import replace
from redis.asyncio import Redis

from pipeline import keys
from pipeline.message import MalformedMessage, Message, decode, encode
from pipeline.trajectory import Action, Turn

WATCHED_S = 15.0
"""The time for which an episode counts as watched after a page has said so."""
SHOWN_S = 30.0
"""The time after which written turns expire."""
MAX_TURNS, MAX_CHARS = 100, 20_000
"""Limits of what is written: the newest turns, and the characters of each text."""


class WatchedTurns(Message, frozen=True, kw_only=True):
    attempt: int
    first: int  # the number of the first of `turns`, from 0: earlier ones are left out
    turns: tuple[Turn, ...]  # without tokens


async def watch(redis: Redis, request_id: str) -> None:
    """Says that somebody watches the episode now."""
    await redis.set(keys.watched(request_id), b"", px=int(1000 * WATCHED_S))


async def is_watched(redis: Redis, request_id: str) -> bool:
    return bool(await redis.exists(keys.watched(request_id)))


async def show(redis: Redis, request_id: str, attempt: int, turns: Sequence[Turn]) -> None:
    """Writes the newest turns for whoever watches."""
    first = max(0, len(turns) - MAX_TURNS)
    shown = WatchedTurns(attempt=attempt, first=first, turns=tuple(map(_display, turns[first:])))
    await redis.set(keys.watched_turns(request_id), encode(shown), px=int(1000 * SHOWN_S))


async def shown(redis: Redis, request_id: str) -> WatchedTurns | None:
    """The turns that were written last; None if there are none, or they cannot be decoded."""
    data = await redis.get(keys.watched_turns(request_id))
    try:
        return decode(data, WatchedTurns) if data else None
    except MalformedMessage:
        return None


def _display(turn: Turn) -> Turn:
    """The turn without its tokens, and with the beginnings of its texts."""
    return replace(
        turn,
        **{name: b"" for name in ("fed", "sampled", "logprobs", "digest", "routing")},
        versions=(),
        text=turn.text[:MAX_CHARS],
        told=tuple(replace(message, content=message.content[:MAX_CHARS]) for message in turn.told),
        actions=tuple(map(_shortened, turn.actions)),
    )


def _shortened(action: Action) -> Action:
    observation = action.observation
    if observation is None or len(observation.output) <= MAX_CHARS:
        return action
    dropped = observation.dropped_chars + len(observation.output) - MAX_CHARS
    cut = replace(observation, output=observation.output[:MAX_CHARS], dropped_chars=dropped)
    return replace(action, observation=cut)
