"""TCP ports on this machine: whether one is free, and if not, which process listens on it."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
LAST_PORT = 65535
LISTENING = "0A"  # number of the state in /proc/net/tcp
MAX_COMMAND_CHARS = 80


def next_free(port: int) -> int:
    """The first port from this one on that is free on 127.0.0.1. Raises ValueError if there is none among a hundred."""
    for candidate in range(port, min(port + 100, LAST_PORT + 1)):
        with suppress(ValueError):
            check_free(candidate, needed_by="", fix="")
            return candidate
    raise ValueError(f"no port from {port} on is free")


def check_free(port: int, *, host: str = "127.0.0.1", needed_by: str, fix: str) -> None:
    """Raises ValueError if `needed_by` cannot listen on this port; the message names the process that does, and contains `fix`."""
    if not 0 < port <= LAST_PORT:
        raise ValueError(f"{needed_by}: port {port} is not between 1 and {LAST_PORT}; {fix}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # servers do so too
            listener.bind(address)
            listener.listen()
    except socket.gaierror as error:
        raise ValueError(f"{needed_by}: {host} is not an address: {error.strerror}; {fix}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"{needed_by}: port {port} is in use by {holder(port)}; {fix}") from error
        raise ValueError(f"{needed_by}: cannot listen on {host}:{port}: {error.strerror}; {fix}") from error


def holder(port: int) -> str:
    """The description of the process that listens on `port`."""
    inodes = set(_listening_inodes(port))
    for directory in PROC.iterdir():
        if directory.name.isdigit() and inodes & _socket_inodes(directory):
            return f"process {directory.name} ({_command(directory)})"
    return "a process that only its user or root can see"


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("net/tcp", "net/tcp6"):
        with suppress(FileNotFoundError):  # the kernel may lack IPv6
            for line in (PROC / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _socket_inodes(process: Path) -> set[str]:
    """The inodes of the process's sockets; empty for a process that has ended, or that we may not inspect."""
    found: set[str] = set()
    with suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    return found


def _command(process: Path) -> str:
    with suppress(OSError):
        words = " ".join((process / "cmdline").read_text().replace("\0", " ").split())
        return words if len(words) <= MAX_COMMAND_CHARS else words[: MAX_COMMAND_CHARS - 1] + "…"
    return "it has just ended"
