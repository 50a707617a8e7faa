"""This machine's Docker host at another address: a port of a relay that can go and come back, and that may insist on TLS."""

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from tests.conftest import free_ports
from workers.docker.host import DockerHost
from workers.settings import docker_host

MAKE_CERTIFICATES = Path(__file__).parents[3] / "infra/cluster/make_certificates.sh"
PIECE_BYTES = 65536


class Relay:
    """Made by `relay`."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._is_gone = False
        self._tasks: set[asyncio.Task[None]] = set()
        (self.port,) = free_ports(1)

    @property
    def host(self) -> DockerHost:
        return DockerHost(f"tcp://localhost:{self.port}")

    async def come(self) -> None:
        """Always at the same port."""
        self._is_gone = False
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls)

    async def go(self) -> None:
        """Nobody listens any more, and all who were connected are cut off."""
        assert self._server is not None
        self._is_gone = True
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, ends = asyncio.current_task(), [writer]
        assert task is not None
        self._tasks.add(task)
        try:
            if self._is_gone:  # it went after the connection was made, and before this task began
                return
            docker_reader, docker_writer = await asyncio.open_unix_connection(docker_host().socket_path)
            ends.append(docker_writer)
            await asyncio.gather(_copy(reader, docker_writer), _copy(docker_reader, writer))
        except (OSError, asyncio.CancelledError):  # a cut: whoever serves a stream must not end by an error
            pass
        finally:
            for one in ends:
                one.transport.abort()
            self._tasks.discard(task)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(PIECE_BYTES):
        sink.write(data)
        await sink.drain()
    if sink.can_write_eof():
        sink.write_eof()
    else:
        sink.close()


@contextlib.asynccontextmanager
async def relay(tls: ssl.SSLContext | None = None) -> AsyncIterator[Relay]:
    one = Relay(tls)
    await one.come()
    yield one
    await one.go()


def make_certificates(out: Path, *flags: str) -> None:
    command = ["bash", str(MAKE_CERTIFICATES), "--out", str(out), *flags]
    subprocess.run(command, capture_output=True, check=True)


def server_context(folder: Path) -> ssl.SSLContext:
    """Of a server that insists on a certificate of its own authority, as dockerd --tlsverify does."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    return context
