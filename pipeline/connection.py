"""A connection to Redis, as every process of ours makes it, and why there is none.

`connect` raises RedisUnavailable and nothing else. Its text is one line that says what is wrong and what to set or
start; it never holds the password. Programs print it and exit with status 2.
"""

import asyncio
import logging
import socket
import time
from typing import Any

from arq.connections import ArqRedis
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from pipeline import keys, retry
from pipeline.commands import script
from pipeline.redis_url import connection_settings, masked
from pipeline.request_store import decode_job, encode_job

log = logging.getLogger("swerve.redis")

ANSWER_S = 10.0  # within which Redis must answer one attempt to connect
IMPATIENT_ANSWER_S = 2.0  # the same for a caller that has no patience: a person waits
PAUSE_S = 1.0  # between two attempts

# A peer that vanished without closing is given up after half a minute. Not by redis-py's socket_timeout, under which
# a cancellation gets lost now and then (asyncio.wait_for of Python 3.11).
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 15,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 30_000,
}

_ROOM = "#!lua\nreturn 1"  # a Redis that is full refuses this script, because it does not say that it adds nothing

_PROBE = "#!lua flags=no-writes,allow-oom\nreturn redis.call('EXISTS', KEYS[1])"
"""What the least privileged command of ours needs: scripts, and the keys `swerve:*`."""


class RedisUnavailable(ValueError):
    """There is no connection to Redis; the text says why, and what to do about it."""


class RedisUnreachable(RedisUnavailable):
    """Redis does not answer, or not yet: the same URL may work later."""


async def connect(url: str, *, patience_s: float = 30) -> ArqRedis:
    """A pool that speaks to arq's queue and, being a Redis client, to everything else.

    Waits `patience_s` for a Redis that starts. Raises RedisUnavailable; at once if Redis refuses the login, or if
    the URL cannot work.
    """
    answer_s = ANSWER_S if patience_s else IMPATIENT_ANSWER_S
    try:
        redis = _client(url, answer_s)
    except ValueError as error:
        raise RedisUnavailable(str(error)) from error
    give_up_at = time.monotonic() + patience_s
    try:
        while (failure := await _failure(redis, url, answer_s)) is not None:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0 or not isinstance(failure, RedisUnreachable):
                raise failure
            log.warning("%s; trying for %.0f s more", failure, left_s)
            await asyncio.sleep(PAUSE_S)
    except BaseException:
        await redis.aclose()
        raise
    return redis


def unavailable(url: str, error: Exception) -> RedisUnavailable:
    """What an error of Redis or of the connection to it means for the user of `url`."""
    if isinstance(error.__cause__, RedisError):  # as redis-py wraps what a Unix socket refuses
        error = error.__cause__
    place = f"Redis at {masked(url)}"
    said = str(error) or type(error).__name__
    if isinstance(error, AuthenticationError):
        wrong = "wants a password" if "required" in said else "refuses the password"
        return RedisUnavailable(
            f"{place} {wrong} ({said}): set SWERVE_REDIS_URL to redis://[USER:]PASSWORD@HOST:PORT/DB"
        )
    if isinstance(error, NoPermissionError):
        return RedisUnavailable(
            f"{place} does not permit this user enough ({said}): grant all commands on the keys swerve:* and arq:*"
        )
    if isinstance(error, RedisError) and not retry.is_outage(error):
        return RedisUnavailable(
            f"{place} refuses the connection ({said}): correct it, or set SWERVE_REDIS_URL"
        )
    return RedisUnreachable(f"{place} does not answer ({said}): start it, or set SWERVE_REDIS_URL")


async def check(redis: Redis) -> None:
    """Raises RedisError or OSError unless Redis answers, and has room."""
    await script(redis, _ROOM, [])


async def _failure(redis: Redis, url: str, answer_s: float) -> RedisUnavailable | None:
    """None if Redis answers and lets us in."""
    try:
        async with asyncio.timeout(answer_s):
            await script(redis, _PROBE, [], wanted=[keys.fleet()])
    except (RedisError, OSError, TimeoutError) as error:
        failure = unavailable(url, error)
        failure.__cause__ = error
        return failure
    return None


def _client(url: str, answer_s: float) -> ArqRedis:
    """Not connected yet. Raises ValueError for a URL that cannot work."""
    settings = connection_settings(url)
    place: dict[str, Any] = {"unix_socket_path": settings.unix_socket_path}
    if settings.unix_socket_path is None:
        place = {
            "host": settings.host,
            "port": settings.port,
            "socket_keepalive": True,
            "socket_keepalive_options": KEEPALIVE,
            "ssl": settings.ssl,
            "ssl_keyfile": settings.ssl_keyfile,
            "ssl_certfile": settings.ssl_certfile,
            "ssl_ca_certs": settings.ssl_ca_certs,
            "ssl_check_hostname": settings.ssl_check_hostname,
        }
    return ArqRedis(
        **place,
        db=settings.database,
        username=settings.username,
        password=settings.password,
        socket_connect_timeout=answer_s,
        job_serializer=encode_job,
        job_deserializer=decode_job,
        default_queue_name=keys.queue(),
    )
