"""The connection to Redis that every process of ours makes, or the reason why there is none.

`connect` raises RedisUnavailable and nothing else. Its text is one line that says what is wrong and what to set or
start; it never holds the password. Programs print it and exit with the status of `commandline.status_of`.

One URL holds all settings, so that it fits into an environment variable and on a command line:

    redis://[user:password@]host:port/db        unix:///path.sock?db=0
    rediss://[user:password@]host:port/db?ssl_ca_certs=CA&ssl_certfile=CERTIFICATE&ssl_keyfile=KEY

The parameters have redis-py's names, and their values are files in PEM. Without `ssl_ca_certs` the system's
authorities are trusted. The certificate of the server must name the host, unless `ssl_check_hostname=false`. User and
password are percent-encoded where they hold characters that a URL reserves.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from arq.connections import ArqRedis, RedisSettings
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from pipeline import keys, redis_calls
from pipeline.commandline import NotAnswering
from pipeline.redis_calls import command, script
from pipeline.request_store import decode_job, encode_job

FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
CHECK_HOSTNAME = "ssl_check_hostname"


def connection_settings(url: str) -> RedisSettings:
    """The settings with which arq connects to `url`. Raises ValueError for a string that is not a Redis URL, and for TLS parameters that
    cannot work; the message never holds the password.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError(
            f"Redis URL with scheme {parts.scheme!r}: it must begin with redis://, rediss:// or unix://"
        )
    if _place(parts) is None:
        raise ValueError(
            f"Redis URL {masked(url)} cannot be read: percent-encode the characters / # ? of the password"
        )
    try:
        settings = RedisSettings.from_dsn(url)
    except ValueError as error:
        raise ValueError(f"Redis URL {masked(url)}: the database must be a whole number") from error
    settings.username = None if parts.username is None else unquote(parts.username)
    settings.password = None if parts.password is None else unquote(parts.password)
    parameters = dict(parse_qsl(parts.query, keep_blank_values=True))
    parameters.pop("db", None)
    place = f"Redis URL {masked(url)}"
    unknown = sorted({*parameters} - {*FILES, CHECK_HOSTNAME})
    if unknown:
        known = ", ".join(("db", *FILES, CHECK_HOSTNAME))
        raise ValueError(f"{place}: unknown parameter {unknown[0]!r}; known are {known}")
    if parameters and parts.scheme != "rediss":
        raise ValueError(f"{place}: {min(parameters)} is of use with rediss:// only")
    _apply_tls(settings, parameters, place)
    return settings


def masked(url: str) -> str:
    """`url` for messages: without its password and its parameters."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        place = _place(parts)
        return f"{parts.scheme}://{'***' if place is None else place}"
    named = parts.username is not None and parts.password is not None
    login = f"{parts.username}:***" if named else "***"  # a lone user name is a password without its colon
    return f"{parts.scheme}://{login}@{_place(parts) or '***'}"


def _place(parts: SplitResult) -> str | None:
    """Host, port and path; None if the URL does not separate them from an unencoded password."""
    try:
        _ = parts.port
    except ValueError:
        return None
    after = f"{parts.path}{parts.fragment}{'' if '=' in parts.query else parts.query}"
    if parts.scheme != "unix" and "@" in after:
        return None
    return f"{parts.netloc.rpartition('@')[2]}{parts.path}"


def _apply_tls(settings: RedisSettings, parameters: Mapping[str, str], place: str) -> None:
    """Raises ValueError naming the parameter that cannot work."""
    for name in FILES:
        if name in parameters and not Path(parameters[name]).is_file():
            raise ValueError(f"{place}: {name}={parameters[name]!r} is not a file; give a file in PEM format")
    if ("ssl_certfile" in parameters) != ("ssl_keyfile" in parameters):
        raise ValueError(f"{place}: ssl_certfile and ssl_keyfile go together; give both or neither")
    checked = parameters.get(CHECK_HOSTNAME, "true")
    if checked not in ("true", "false"):
        raise ValueError(f"{place}: {CHECK_HOSTNAME}={checked!r}; give true or false")
    settings.ssl_ca_certs = parameters.get("ssl_ca_certs")
    settings.ssl_certfile = parameters.get("ssl_certfile")
    settings.ssl_keyfile = parameters.get("ssl_keyfile")
    settings.ssl_check_hostname = settings.ssl and checked == "true"


log = logging.getLogger("swerve.redis")

ANSWER_S = 10.0  # limit for Redis to answer one attempt to connect
IMPATIENT_ANSWER_S = 2.0  # the same limit for commands whose user waits for the answer
PAUSE_S = 1.0  # pause between two attempts

# A peer that vanished without closing is given up after half a minute. redis-py's socket_timeout is not used, because it
# sometimes loses a cancellation (asyncio.wait_for of Python 3.11).
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 15,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 30_000,
}

# A Redis that is full refuses this script, because the script has neither of the flags `no-writes` and `allow-oom`.
_ROOM = "#!lua\nreturn 1"

_PROBE = "#!lua flags=no-writes,allow-oom\nreturn redis.call('EXISTS', KEYS[1])"
"""The least privileged command that we need: it uses scripts and the keys `swerve:*`."""


class RedisUnavailable(ValueError):
    """There is no connection to Redis; the message says why, and what to do about it."""


class RedisUnreachable(RedisUnavailable, NotAnswering):
    """Redis does not answer, or not yet: the same URL may work later."""


async def connect(url: str, *, patience_s: float = 30) -> ArqRedis:
    """A connection pool for arq's queue and, because it is a Redis client, for everything else.

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
    """The error to raise instead of one of Redis or of the connection to it, with its meaning for the user of `url`."""
    if isinstance(error.__cause__, RedisError):  # redis-py wraps the errors of a Unix socket like this
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
    if isinstance(error, RedisError) and not redis_calls.is_outage(error):
        return RedisUnavailable(
            f"{place} refuses the connection ({said}): correct it, or set SWERVE_REDIS_URL"
        )
    return RedisUnreachable(f"{place} does not answer ({said}): start it, or set SWERVE_REDIS_URL")


async def check(redis: Redis) -> None:
    """Raises RedisError or OSError unless Redis answers, and has room."""
    await script(redis, _ROOM, [])


async def forgets(redis: Redis) -> str:
    """The reason why this Redis would lose its data at a restart, and what to do about it, in one sentence; empty if it would not."""
    persistence: dict[str, Any] = await command(redis, "INFO", "persistence")
    # Managed services that leave this out keep their data by other means.
    if persistence.get("aof_enabled", 1):
        return ""
    return (
        "Redis keeps no append-only file: when it restarts, the queue and the trajectories that no checkpoint holds are lost, "
        "and their episodes are played again; start it with `appendonly yes`"
    )


async def _failure(redis: Redis, url: str, answer_s: float) -> RedisUnavailable | None:
    """The reason why there is no connection; None if Redis answers and accepts the login."""
    try:
        async with asyncio.timeout(answer_s):
            await script(redis, _PROBE, [], wanted=[keys.fleet()])
    except (RedisError, OSError, TimeoutError) as error:
        failure = unavailable(url, error)
        failure.__cause__ = error
        return failure
    return None


def _client(url: str, answer_s: float) -> ArqRedis:
    """Makes a client that is not connected yet. Raises ValueError for a URL that cannot work."""
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
