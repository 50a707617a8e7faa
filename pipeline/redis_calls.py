"""Calls to Redis: commands by name, Lua by its content, and the wait for a Redis that is absent.

redis-py types many of its methods as possibly awaitable, or not at all; only this file works around that.

An outage passes by itself: Redis is away, starting, full, or temporarily not writable. Any other error of Redis is a bug, in our code or in
the code that wrote the key, and retrying would only hide it. One loop retries through outages, and all callers use it.
"""

import asyncio
import contextlib
import hashlib
import logging
import random
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

Word = str | bytes | int | float
T = TypeVar("T")

# Keys in one command, or commands in one round trip: a longer list would block Redis for too long.
CHUNK = 1000

_PUT = """#!lua flags=allow-oom
-- The value is small and replaces the one before, so a full Redis accepts it too.
return redis.call('SET', KEYS[1], ARGV[1])
"""

log = logging.getLogger("swerve.retry")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

OUTAGES = (RedisConnectionError, RedisTimeoutError, OutOfMemoryError, ReadOnlyError)
"""redis-py's exceptions for outages. A Redis that is full accepts no writes until its answers are acknowledged."""

OUTAGE_PREFIXES = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "UNBLOCKED")
"""Prefixes of error replies for which redis-py has no exception. MISCONF: Redis cannot write to its disk, so it accepts no writes."""


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


def is_outage(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    if isinstance(error, ResponseError) and str(error).startswith(OUTAGE_PREFIXES):
        return True
    return isinstance(error, OUTAGES)


@contextlib.contextmanager
def tolerating_outage() -> Generator[None]:
    """Leaves the block silently if an outage ends it. It is for calls that are repeated periodically anyway."""
    try:
        yield
    except RedisError as error:
        if not is_outage(error):
            raise


async def until_answered(call: Callable[[], Awaitable[T]], *, longest_pause_s: float = LONGEST_PAUSE_S) -> T:
    """Await `call()` until Redis answers; `call` must be safe to repeat. Errors that are not an outage are raised.

    Pauses double from FIRST_PAUSE_S to `longest_pause_s`, with jitter, so that a fleet does not return all at once.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except RedisError as error:
            if not is_outage(error):
                raise
            log.warning("Redis does not answer (%s); retrying in %.1f s", error, pause_s)
        await asyncio.sleep(jittered(pause_s))
        pause_s = min(2 * pause_s, longest_pause_s)


def jittered(seconds: float) -> float:
    """A random time between half and one and a half times `seconds`, so that processes that failed together do not retry together."""
    return seconds * random.uniform(0.5, 1.5)
