"""A private redis-server on a Unix socket, for tests and benchmarks: no port to compete for, no data of others."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import redis

from infra import processes
from infra.processes import Child

START_S = 60.0
FORGETFUL = {"save": "", "appendonly": "no"}
"""Redis writes nothing to disk."""

DURABLE = {"save": "", "appendonly": "yes", "appendfsync": "always"}
"""Every confirmed write survives a kill."""


@contextmanager
def own_redis(settings: Mapping[str, str] = FORGETFUL) -> Iterator[str]:
    """Yields the URL of a server that runs as long as the body. Raises RuntimeError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="swerve-redis-") as name:
        child = start_in(Path(name), settings)
        try:
            yield url_in(Path(name))
        finally:
            child.stop(grace_s=5)


def start_in(directory: Path, settings: Mapping[str, str]) -> Child:
    """Start a server with data, socket and log in `directory`, also on the data of an earlier one. Returns when it answers.
    Raises RuntimeError if it does not start.
    """
    socket, log = _socket_in(directory), directory / "redis.log"
    socket.unlink(missing_ok=True)
    places = {"port": "0", "unixsocket": str(socket), "dir": str(directory)}
    words = [word for name, value in {**places, **settings}.items() for word in (f"--{name}", value)]
    child = processes.start("redis-server", ["redis-server", *words], log=log)
    with redis.Redis.from_url(url_in(directory)) as client:
        processes.wait_until(lambda: answers(client), child=child, timeout_s=START_S, log=log)
    return child


def url_in(directory: Path) -> str:
    """The URL of the server in `directory`."""
    return f"unix://{_socket_in(directory)}?db=0"


def socket_of(url: str) -> str:
    """The path in a URL of `url_in`, for clients that take no URL."""
    return url.removeprefix("unix://").partition("?")[0]


def answers(client: redis.Redis) -> bool:
    """Whether the server answers. True also for one that demands a password; False while it loads its data."""
    try:
        return bool(client.ping())
    except redis.AuthenticationError:
        return True
    except redis.RedisError:
        return False


def _socket_in(directory: Path) -> Path:
    return directory / "redis.sock"
