"""Redis commands by name, and Lua by its content.

redis-py types many of its methods as possibly awaitable, or not at all; only this file works around that.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

Word = str | bytes | int | float
T = TypeVar("T")

# Keys in one command, or commands in one round trip: a longer list would block Redis for too long.
CHUNK = 1000

_PUT = """#!lua flags=allow-oom
-- The value is small and replaces the one before, so a full Redis accepts it too.
return redis.call('SET', KEYS[1], ARGV[1])
"""


async def command(redis: Redis, *words: Word) -> Any:
    """Runs one command, spelled as Redis spells it. redis-py parses the reply."""
    client = cast(Any, redis)
    return await client.execute_command(*words)


async def script(redis: Redis, source: str, arguments: Sequence[Word], *, wanted: Sequence[str] = ()) -> Any:
    """Run Lua by its hash; the source is sent only if Redis does not know it."""
    try:
        return await command(redis, "EVALSHA", _sha1(source), len(wanted), *wanted, *arguments)
    except NoScriptError:
        return await command(redis, "EVAL", source, len(wanted), *wanted, *arguments)


async def scripts(redis: Redis, source: str, rows: Iterable[Sequence[Word]]) -> list[Any]:
    """Runs Lua once for each row of arguments, in one round trip. This is not a transaction, and a row may run twice."""
    made = list(rows)
    try:
        return await _scripts(redis, source, made)
    except NoScriptError:  # Redis was restarted in between
        return await _scripts(redis, source, made)


async def _scripts(redis: Redis, source: str, rows: Sequence[Sequence[Word]]) -> list[Any]:
    await command(redis, "SCRIPT LOAD", source)
    async with redis.pipeline(transaction=False) as pipe:
        for row in rows:
            cast(Any, pipe).execute_command("EVALSHA", _sha1(source), 0, *row)
        found: list[Any] = await pipe.execute()
    return found


async def put(redis: Redis, key: str, value: bytes) -> None:
    """SET that also works when Redis is full."""
    await script(redis, _PUT, [value], wanted=[key])


def chunks(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """`items` in pieces of at most CHUNK."""
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]


@cache
def _sha1(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
