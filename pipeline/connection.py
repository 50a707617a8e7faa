"""A connection to Redis, as every process of ours makes it."""

import socket
from typing import Any, cast

from arq.connections import ArqRedis, create_pool
from redis.asyncio import Redis

from pipeline import keys
from pipeline.commands import script
from pipeline.redis_url import connection_settings
from pipeline.request_store import decode_job, encode_job

# A peer that fell silent without a word is given up after half a minute. Not by redis-py's socket_timeout, under which
# a cancellation gets lost now and then (asyncio.wait_for of Python 3.11).
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 15,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 30_000,
}

_ROOM = "#!lua\nreturn 1"  # refused by a Redis that is full, for it does not say that it adds nothing


async def connect(url: str, *, patience_s: int = 30) -> ArqRedis:
    """A pool that speaks to arq's queue and, being a Redis client, to everything else.

    Waits `patience_s` for a Redis that starts. Raises ValueError for a URL that `connection_settings` refuses.
    """
    settings = connection_settings(url)
    settings.conn_timeout = 10
    settings.conn_retries = patience_s
    settings.conn_retry_delay = 1
    pool = await create_pool(
        settings, job_serializer=encode_job, job_deserializer=decode_job, default_queue_name=keys.QUEUE
    )
    if settings.unix_socket_path is None:
        connections = cast(Any, pool.connection_pool)
        connections.connection_kwargs |= {"socket_keepalive": True, "socket_keepalive_options": KEEPALIVE}
        await connections.disconnect()
        connections.reset()  # the one that arq made without them is not to be used again
    return pool


async def check(redis: Redis) -> None:
    """Raises RedisError or OSError unless Redis answers, and has room."""
    await script(redis, _ROOM, [])
