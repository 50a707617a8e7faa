"""Redis connections that cost very little CPU, so that thousands of simulated workers fit on one core.

They have the methods that `pipeline.redis_calls` calls, so the commands are those of real workers, byte for byte. Replies are
returned as Redis sends them.
"""

import asyncio
from collections import deque
from typing import Any, cast

import hiredis
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from infra.redis_server import socket_of

RETRY_S = 0.02


class LeanPool:
    """A pool of as many connections as there are concurrent commands, as with redis-py: each carries one at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._idle: list[LeanClient] = []

    @classmethod
    def client(cls, url: str) -> Redis:
        """Typed as the client that it replaces."""
        return cast(Redis, cls(url))

    async def execute_command(self, *words: Any) -> Any:
        connection = self._idle.pop() if self._idle else await LeanClient.connect(self._url)
        try:
            return await connection.execute_command(*words)
        finally:
            self._idle.append(connection)


class LeanClient(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader()
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, url: str) -> "LeanClient":
        """Waits while Redis's queue of connecting clients is full."""
        while True:
            try:
                _, made = await asyncio.get_running_loop().create_unix_connection(cls, socket_of(url))
                return made
            except BlockingIOError:
                await asyncio.sleep(RETRY_S)

    def execute_command(self, *words: Any) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append(reply)
        assert self._transport is not None
        self._transport.write(hiredis.pack_command(words))
        return reply

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (answer := self._reader.gets()) is not False:
            reply = self._waiting.popleft()
            if reply.done():
                continue
            if isinstance(answer, hiredis.ReplyError):
                kind = NoScriptError if str(answer).startswith("NOSCRIPT") else ResponseError
                reply.set_exception(kind(str(answer)))
            else:
                reply.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        for reply in self._waiting:
            if not reply.done():
                reply.set_exception(ConnectionResetError(str(exc)))
        self._waiting.clear()
