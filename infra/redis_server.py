"""A redis-server of one's own on a Unix socket, for tests and benchmarks: no port to race for, nobody else's data near."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from infra import processes
from infra.processes import Child

START_S = 20.0
FORGETFUL = {"save": "", "appendonly": "no"}
"""Nothing on disk."""

DURABLE = {"save": "", "appendonly": "yes", "appendfsync": "always"}
"""Every write that it has confirmed survives its death."""


@contextmanager
def own_redis(settings: Mapping[str, str] = FORGETFUL) -> Iterator[str]:
    """The URL of a server that lives as long as the body. Raises RuntimeError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="swerve-redis-") as name:
        child = start_in(Path(name), settings)
        try:
            yield url_in(Path(name))
        finally:
            child.stop(grace_s=5)


def start_in(directory: Path, settings: Mapping[str, str]) -> Child:
    """A server that answers; data, socket and log are in ``directory``, where an earlier one may have left its own. Raises
    RuntimeError if it does not start.
    """
    socket, log = _socket_in(directory), directory / "redis.log"
    socket.unlink(missing_ok=True)
    places = {"port": "0", "unixsocket": str(socket), "dir": str(directory)}
    words = [word for name, value in {**places, **settings}.items() for word in (f"--{name}", value)]
    child = processes.start("redis-server", ["redis-server", *words], log=log)
    processes.wait_until(socket.exists, child=child, timeout_s=START_S, log=log)
    return child


def url_in(directory: Path) -> str:
    """Of the server in ``directory``."""
    return f"unix://{_socket_in(directory)}?db=0"


def socket_of(url: str) -> str:
    """The path in a URL of ours, for clients that take no URL."""
    return url.removeprefix("unix://").partition("?")[0]


def _socket_in(directory: Path) -> Path:
    return directory / "redis.sock"
