"""What to do while Redis is away: ask again. It restarts, loads what it knows, is full, or the network is down."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import RedisError

from pipeline import outage

log = logging.getLogger("swerve.trainer")

RETRY_S = 1.0

T = TypeVar("T")


async def insist(call: Callable[[], Awaitable[T]]) -> T:
    """`call`, until Redis answers it. Only for calls that may be made twice."""
    while True:
        try:
            return await call()
        except RedisError as error:
            if not outage.passes(error):
                raise
            log.warning("Redis does not answer (%s); trying again", error)
        await asyncio.sleep(RETRY_S)
