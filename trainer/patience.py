"""What to do while Redis is away: ask again. It restarts, loads what it knows, is full, or the network is down."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError
from redis.exceptions import TimeoutError as RedisTimeoutError

log = logging.getLogger("swerve.trainer")

RETRY_S = 1.0
REDIS_AWAY = (RedisConnectionError, RedisTimeoutError, OutOfMemoryError)
"""The last says that Redis is full: it takes nothing in until what it holds is read and acknowledged."""

T = TypeVar("T")


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """`call`, until Redis answers it. Only for calls that may be made twice."""
    while True:
        try:
            return await call()
        except REDIS_AWAY as error:
            log.warning("Redis does not answer (%s); trying again", error)
        await asyncio.sleep(RETRY_S)
