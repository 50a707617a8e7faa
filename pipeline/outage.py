"""Which of Redis's refusals pass by themselves: it is away, starts, is full, or may not write for now.

Whoever meets one of these asks again. Any other error of Redis is a bug, ours or of whoever wrote that key, and asking
again would only hide it.
"""

import contextlib
from collections.abc import Generator

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

PASSING = (RedisConnectionError, RedisTimeoutError, OutOfMemoryError, ReadOnlyError)
"""By redis-py's class. A Redis that is full takes nothing in until what it holds is acknowledged."""

WORDS = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "UNBLOCKED")
"""With which Redis begins an answer that redis-py has no class for. MISCONF: its disk is full, so it takes no writes."""


def passes(error: BaseException) -> bool:
    """Whether the same question may be answered a little later."""
    if isinstance(error, ResponseError) and str(error).startswith(WORDS):
        return True
    return isinstance(error, PASSING)


@contextlib.contextmanager
def endured() -> Generator[None]:
    """Lets an outage end what stands inside, in silence: for what is said again anyway."""
    try:
        yield
    except RedisError as error:
        if not passes(error):
            raise
