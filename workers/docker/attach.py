"""The stream to a container's standard input and output, over a Unix socket, TCP or TLS.

It is a connection of its own, because asyncio cannot take over a socket on which TLS is spoken already. It requests the stream by an
HTTP/1.1 upgrade ("Attach to a container" in the Engine API reference); what follows the response's headers is the stream.
"""

import asyncio
import json
from urllib.parse import quote

from workers.docker.errors import sandbox_error, translated
from workers.docker.host import DockerHost

ANSWER_S = 60.0  # a busy Docker host takes its time, but one that hangs must not hold an episode for ever
TLS_CLOSE_S = 5.0  # for the Docker host to end TLS in good order
LONGEST_REFUSAL_BYTES = 64 * 1024

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def attach(host: DockerHost, name: str, *, read_bytes: int) -> Streams:
    """What container `name` prints, in Docker's frames, and what it reads. The reader buffers up to twice `read_bytes`.

    Raises SandboxError if the Docker host cannot be reached, is not trusted, does not trust us, or refuses.
    """
    with translated(f"attaching to {name} at {host.url}", sandbox_error):
        async with asyncio.timeout(ANSWER_S):
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
    """Raises ConnectionError with the Docker host's reason if it refuses, EOFError or OSError if it hangs up."""
    path = f"/containers/{quote(name, safe='')}/attach?stdin=1&stdout=1&stderr=1&stream=1"
    headers = ("Host: docker", "Connection: Upgrade", "Upgrade: tcp", "Content-Length: 0")
    writer.write("\r\n".join((f"POST {path} HTTP/1.1", *headers, "", "")).encode())
    await writer.drain()
    answer = await reader.readuntil(b"\r\n\r\n")
    status = answer.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    if status[1:2] not in (["101"], ["200"]):
        raise ConnectionError(f"{' '.join(status[1:])}: {await _reason(reader)}")


async def _reason(reader: asyncio.StreamReader) -> str:
    """Why the Docker host refused: the message of a JSON object, if the first piece holds it whole."""
    body = await reader.read(LONGEST_REFUSAL_BYTES)
    text = body[body.find(b"{") : body.rfind(b"}") + 1]
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace").strip()
