"""Waiting for a Redis that is absent: which of its errors are an outage, and the one loop that retries through it.

An outage passes by itself: Redis is away, starting, full, or temporarily not writable. Any other error of Redis is a bug, in our code or in
the code that wrote the key, and retrying would only hide it.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

log = logging.getLogger("swerve.retry")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

OUTAGES = (RedisConnectionError, RedisTimeoutError, OutOfMemoryError, ReadOnlyError)
"""redis-py's exceptions for outages. A Redis that is full accepts no writes until its answers are acknowledged."""

OUTAGE_PREFIXES = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "UNBLOCKED")
"""Prefixes of error replies for which redis-py has no exception. MISCONF: Redis cannot write to its disk, so it accepts no writes."""

T = TypeVar("T")


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
