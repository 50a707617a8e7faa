"""The client for a Docker host's API, the stream to a container, and the translation of the errors of docker-py, requests and sockets.

The client connects to that host and nowhere else: its certificates are those of the DockerHost, whatever REQUESTS_CA_BUNDLE says, and it
uses no proxy of the environment, because a container's attached stream could not pass one. Each error becomes a DockerFailure, from which
the caller makes its own error: `sandbox_error` here, `ImageError` in workers/images.

The stream to a container's standard input and output is a connection of its own, over a Unix socket, TCP or TLS, because asyncio cannot
take over a socket on which TLS is already spoken. It is requested by an HTTP/1.1 upgrade ("Attach to a container" in the Engine API
reference); the bytes after the response's headers are the stream.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import docker
import requests
import urllib3
from docker import errors as docker_errors
from docker.constants import DEFAULT_DOCKER_API_VERSION
from docker.errors import DockerException
from docker.tls import TLSConfig

from pipeline.errors import ImageMissing, SandboxError
from workers.docker.host import AUTHORITY, CERTIFICATE, KEY, DockerHost

LIBRARY_ERRORS = (
    docker_errors.DockerException,
    docker_errors.StreamParseError,
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    OSError,
    EOFError,
    asyncio.LimitOverrunError,
)


@dataclass(frozen=True, slots=True)
class DockerFailure:
    """A call to a Docker host that failed."""

    doing: str  # the operation, e.g. "starting swerve-agent-1f"
    reason: str  # the Docker host's own message, if there is one
    status: int | None = None  # HTTP status, if it answered
    image_missing: bool = False

    def __str__(self) -> str:
        return f"{self.doing}: {self.reason}"


@contextlib.contextmanager
def translated(doing: str, into: Callable[[DockerFailure], Exception]) -> Generator[None]:
    """Raises `into(failure)` instead of any library's error that leaves the block."""
    try:
        yield
    except LIBRARY_ERRORS as error:
        raise into(_failure(doing, error)) from error


def sandbox_error(failure: DockerFailure) -> SandboxError:
    """The error for a call made on behalf of a sandbox."""
    return ImageMissing(str(failure)) if failure.image_missing else SandboxError(str(failure))


def _failure(doing: str, error: BaseException) -> DockerFailure:
    if isinstance(error, docker_errors.APIError):
        return DockerFailure(
            doing,
            str(error.explanation or error),
            status=error.status_code,
            image_missing=isinstance(error, docker_errors.ImageNotFound),
        )
    return DockerFailure(doing, str(error) or f"no answer ({type(error).__name__})")


Client = Any  # docker.APIClient, which has no types

ANSWER_S = 14  # a Docker host that works reports its version within this time, however busy it is


def docker_client(host: DockerHost, *, timeout_s: int, num_connections: int) -> Client:
    """A client that has agreed on an API version with the Docker host; `timeout_s` limits each call.

    Raises the errors of docker-py and requests if the Docker host does not answer.
    """
    _refuse_if_nobody_listens(host)
    folder = host.certificates
    client: Client = docker.APIClient(
        base_url=host.url,
        tls=TLSConfig(
            client_cert=(str(folder / CERTIFICATE), str(folder / KEY)),
            ca_cert=str(folder / AUTHORITY),
            verify=host.verify,
        )
        if folder is not None
        else False,
        version=DEFAULT_DOCKER_API_VERSION,  # replaced below, once the client ignores the environment
        timeout=ANSWER_S,
        max_pool_size=num_connections,
    )
    client.trust_env = False
    try:
        client._version = client._retrieve_server_version()
    except BaseException:
        client.close()
        raise
    client.timeout = timeout_s
    return client


def _refuse_if_nobody_listens(host: DockerHost) -> None:
    """Tries the address before docker-py does, because docker-py hides the reason in its message, and leaks a Unix socket that it could
    not connect.
    """
    try:
        if host.socket_path:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(ANSWER_S)
                probe.connect(host.socket_path)
        else:
            socket.create_connection(host.name_and_port, timeout=ANSWER_S).close()
    except OSError as error:
        raise DockerException(f"nobody listens at {host.url}: {error}") from error


ATTACH_S = 60.0  # a busy Docker host takes its time, but one that hangs must not hold an episode without end
TLS_CLOSE_S = 5.0  # time limit for a clean TLS shutdown by the Docker host
LONGEST_REFUSAL_BYTES = 64 * 1024

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def attach(host: DockerHost, name: str, *, read_bytes: int) -> Streams:
    """The streams of container `name`: its output, in Docker's frames, and its input. The reader buffers up to twice `read_bytes`.

    Raises SandboxError if the Docker host cannot be reached, is not trusted, does not trust us, or refuses.
    """
    with translated(f"attaching to {name} at {host.url}", sandbox_error):
        async with asyncio.timeout(ATTACH_S):
            reader, writer = await _connected(host, read_bytes)
            try:
                await _upgrade(reader, writer, name)
            except BaseException:
                writer.transport.abort()
                raise
    return reader, writer


async def _connected(host: DockerHost, read_bytes: int) -> Streams:
    if host.socket_path:
        return await asyncio.open_unix_connection(host.socket_path, limit=read_bytes)
    name, port = host.name_and_port
    context = host.tls()
    if context is None:
        return await asyncio.open_connection(name, port, limit=read_bytes)
    return await asyncio.open_connection(
        name, port, limit=read_bytes, ssl=context, ssl_shutdown_timeout=TLS_CLOSE_S
    )


async def _upgrade(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
    """Upgrades the connection. Raises ConnectionError with the Docker host's reason if it refuses, EOFError or OSError if it hangs up."""
    path = f"/containers/{quote(name, safe='')}/attach?stdin=1&stdout=1&stderr=1&stream=1"
    headers = ("Host: docker", "Connection: Upgrade", "Upgrade: tcp", "Content-Length: 0")
    writer.write("\r\n".join((f"POST {path} HTTP/1.1", *headers, "", "")).encode())
    await writer.drain()
    answer = await reader.readuntil(b"\r\n\r\n")
    status = answer.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    if status[1:2] not in (["101"], ["200"]):
        raise ConnectionError(f"{' '.join(status[1:])}: {await _reason(reader)}")


async def _reason(reader: asyncio.StreamReader) -> str:
    """The Docker host's reason for a refusal: the message in a JSON object, if the first piece contains the whole object."""
    body = await reader.read(LONGEST_REFUSAL_BYTES)
    text = body[body.find(b"{") : body.rfind(b"}") + 1]
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace").strip()
