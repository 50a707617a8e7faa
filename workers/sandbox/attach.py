"""The stream to a container's standard input and output, over whatever leads to its engine: a Unix socket, TCP, TLS.

A connection of our own, since asyncio can take none over once TLS is spoken on it: it asks the engine for the stream as HTTP/1.1
upgrades a connection ("Attach to a container" in the Engine API reference), and what follows the answer's headers is the stream.
"""

import asyncio
import json
from urllib.parse import quote

from pipeline.errors import SandboxError
from workers.docker.host import DockerHost

ANSWER_S = 60.0  # a busy engine takes its time, and one that hangs must not hold an episode for ever
FAREWELL_S = 5.0  # for the engine to say goodbye to TLS
LONGEST_COMPLAINT_BYTES = 64 * 1024


async def attach(
    host: DockerHost, name: str, *, read_bytes: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """What container `name` prints, framed, and what it reads. The reader holds up to twice `read_bytes` back.

    Raises SandboxError if the engine cannot be reached, is not trusted, does not trust us, or will not.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await _connected(host, read_bytes)
            try:
                await _upgraded(reader, writer, name)
            except BaseException:
                writer.transport.abort()
                raise
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise SandboxError(f"attaching to {name} at {host.url}: {str(error) or 'no answer'}") from error
    return reader, writer


async def _connected(host: DockerHost, read_bytes: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if host.socket_path:
        return await asyncio.open_unix_connection(host.socket_path, limit=read_bytes)
    name, port = host.name_and_port
    context = host.tls()
    if context is None:
        return await asyncio.open_connection(name, port, limit=read_bytes)
    return await asyncio.open_connection(
        name, port, limit=read_bytes, ssl=context, ssl_shutdown_timeout=FAREWELL_S
    )


async def _upgraded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
    """Raises ValueError with the engine's own words if it will not, EOFError and OSError if it hangs up."""
    path = f"/containers/{quote(name, safe='')}/attach?stdin=1&stdout=1&stderr=1&stream=1"
    headers = ("Host: docker", "Connection: Upgrade", "Upgrade: tcp", "Content-Length: 0")
    writer.write("\r\n".join((f"POST {path} HTTP/1.1", *headers, "", "")).encode())
    await writer.drain()
    answer = await reader.readuntil(b"\r\n\r\n")
    status = answer.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
    if status[1:2] not in (["101"], ["200"]):
        raise ValueError(f"{' '.join(status[1:])}: {await _complaint(reader)}")


async def _complaint(reader: asyncio.StreamReader) -> str:
    """The engine's reason: a JSON object, whole in the first piece or not worth waiting for."""
    body = await reader.read(LONGEST_COMPLAINT_BYTES)
    text = body[body.find(b"{") : body.rfind(b"}") + 1]
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace").strip()
