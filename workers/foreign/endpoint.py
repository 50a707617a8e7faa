"""The HTTP server that acts as an agent program's model, for one episode: chat completions, Responses and Messages.

It serves the connections for which `protocol_factory` is called, and belongs to one episode, so it needs no key. A streaming program gets
headers and a comment at once and a comment every few seconds, then its reply at once, so it never gets half a reply. A reply counts as
delivered once the connection has accepted its last byte.
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import web

from workers.foreign.conversations import Node
from workers.foreign.dialect import Asked, Dialect, session_of
from workers.foreign.dialects.chat import ChatDialect
from workers.foreign.dialects.messages import MessagesDialect
from workers.foreign.dialects.responses import ResponsesDialect
from workers.foreign.episode import AgentEpisode, Pending, RequestAbandoned
from workers.foreign.fields import RequestRefused, printed, read_json

MOST_BODY_BYTES = 32 * 2**20
MOST_READ_BYTES = 2 * MOST_BODY_BYTES  # bytes of bodies that arrive at the same time
KEEP_ALIVE_S = 5.0
IDLE_S = 86_400.0  # a connection stays open while a command of the program runs
CLOSE_S = 0.1
DIALECTS: tuple[Dialect, ...] = (ChatDialect(), ResponsesDialect(), MessagesDialect())

_KEEP_ALIVE = b": the reply is under way\n\n"
_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AgentEndpoint:
    """The server of one episode. It is an async context manager, inside which `protocol_factory` makes the protocols of connections."""

    def __init__(self, episode: AgentEpisode, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self._episode = episode
        self._keep_alive_s = keep_alive_s
        self._read_bytes = 0  # bytes of bodies that are arriving
        self._closed = asyncio.Event()
        # aiohttp remembers the handlers of 1,024 servers that have a middleware, and with them their episodes. So this server has none.
        app = web.Application()
        app.router.add_route("*", "/", self._guarded(_hello))
        app.router.add_get("/v1/models", self._guarded(_models))
        app.router.add_get("/v1/models/{name}", self._guarded(_model))
        for dialect in DIALECTS:
            app.router.add_post(f"/v1/{dialect.path}", self._guarded(self._replies(dialect)))
        for path, dialect in (
            ("messages/count_tokens", DIALECTS[2]),
            ("responses/input_tokens", DIALECTS[1]),
        ):
            app.router.add_post(f"/v1/{path}", self._guarded(self._counts(dialect, "input_tokens")))
        app.router.add_route("*", "/{path:.*}", self._guarded(_nothing))
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=IDLE_S, shutdown_timeout=CLOSE_S)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        await self._episode.close()
        await self._runner.cleanup()

    @property
    def protocol_factory(self) -> Callable[[], asyncio.Protocol]:
        """A protocol for each connection, over any transport."""
        server = self._runner.server
        assert server is not None, "AgentEndpoint is used outside its `async with`"
        return server

    def _guarded(self, handler: Handler) -> Handler:
        """The handler, which answers refusals, and holds the connection open if our own code failed."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, handler)

        return guarded

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        task = asyncio.ensure_future(self._handled(request, handler))
        await asyncio.wait({task})
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, RequestRefused):
            self._episode.refused(error)
            return _json(_dialect_of(request).refusal(error), status=400)
        if isinstance(error, web.HTTPException):
            return _json({"error": {"message": error.reason, "type": "not_found"}}, status=error.status)
        if isinstance(error, ConnectionError | RequestAbandoned):
            return _without_answer(request)
        self._episode.broken(error)
        await self._closed.wait()
        return _without_answer(request)

    async def _handled(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._episode.count_request()
        return await handler(request)

    def _replies(self, dialect: Dialect) -> Handler:
        async def reply(request: web.Request) -> web.StreamResponse:
            body = await self._body(request)
            asked = dialect.read(read_json(body))
            pending = await self._episode.ask(
                asked,
                dialect,
                body,
                session=session_of(request.headers),
                is_connected=lambda: _is_connected(request),
            )
            deliver = self._stream if asked.streams else self._whole
            return await deliver(request, dialect, asked, pending)

        return reply

    def _counts(self, dialect: Dialect, name: str) -> Handler:
        async def count(request: web.Request) -> web.StreamResponse:
            asked = dialect.read(read_json(await self._body(request)))
            session, _ = session_of(request.headers)
            return _json({name: await self._episode.prompt_tokens(asked, session)})

        return count

    async def _body(self, request: web.Request) -> bytes:
        """The body.

        Raises RequestRefused for one that is too long or in an unknown encoding, and ConnectionError for one that ends early.
        """
        parts, num_bytes = list[bytes](), 0
        try:
            async for part in request.content.iter_any():
                parts.append(part)
                num_bytes += len(part)
                self._read_bytes += len(part)
                self._episode.count_bytes(len(part))
                if num_bytes > MOST_BODY_BYTES:
                    raise RequestRefused(f"the request is longer than {MOST_BODY_BYTES} bytes")
                if self._read_bytes > MOST_READ_BYTES:
                    raise RequestRefused("too many long requests at one time")
        except web.RequestPayloadError as error:
            raise RequestRefused("the body cannot be decoded as its headers say") from error
        finally:
            self._read_bytes -= num_bytes
        return b"".join(parts)

    async def _whole(
        self, request: web.Request, dialect: Dialect, asked: Asked, pending: Pending
    ) -> web.StreamResponse:
        await asyncio.wait({pending.task})
        response = _json(dialect.whole(self._episode.answer(self._reply(pending)), asked))
        _hold_nothing_back(request)
        await response.prepare(request)
        await response.write_eof()
        self._taken(request, pending)
        return response

    async def _stream(
        self, request: web.Request, dialect: Dialect, asked: Asked, pending: Pending
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=_STREAM)
        _hold_nothing_back(request)
        await response.prepare(request)
        await response.write(_KEEP_ALIVE)
        while not (await asyncio.wait({pending.task}, timeout=self._keep_alive_s))[0]:
            await response.write(_KEEP_ALIVE)
        try:
            answer = self._episode.answer(self._reply(pending))
        except RequestRefused as refused:
            self._episode.refused(refused)
            await response.write(dialect.refusal_event(refused))
            await response.write_eof()
            return response
        await response.write_eof(b"".join(dialect.events(answer, asked)))
        self._taken(request, pending)
        return response

    def _reply(self, pending: Pending) -> Node:
        """The finished reply. Raises EpisodeOver if the episode is over, ContextFull if a server reports that the conversation is too long,
        EpisodeBroken if something failed.
        """
        if pending.task.cancelled() or not isinstance(pending.task.exception(), RequestRefused | None):
            self._episode.check_over()
        return pending.task.result()

    def _taken(self, request: web.Request, pending: Pending) -> None:
        """Marks the reply as delivered after the last byte was written.

        Nothing is buffered, so the connection has accepted it if it still exists.
        """
        if _is_connected(request):
            self._episode.delivered(pending)


def _is_connected(request: web.Request) -> bool:
    transport = request.transport
    return transport is not None and not transport.is_closing()


def _hold_nothing_back(request: web.Request) -> None:
    """Makes each write return only when the connection has accepted all of it."""
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=0)


def _without_answer(request: web.Request) -> web.StreamResponse:
    """Ends a request without an answer: its connection is closed."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


def _dialect_of(request: web.Request) -> Dialect:
    found = (one for one in DIALECTS if request.path.startswith(f"/v1/{one.path}"))
    return next(found, DIALECTS[0])


def _json(body: object, *, status: int = 200) -> web.Response:
    return web.Response(status=status, body=printed(body).encode(), content_type="application/json")


async def _hello(request: web.Request) -> web.StreamResponse:
    return _json({"object": "swerve"})


async def _nothing(request: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound


async def _models(request: web.Request) -> web.StreamResponse:
    model = _described("policy")
    ends = {"first_id": model["id"], "last_id": model["id"], "has_more": False}
    return _json({"object": "list", "data": [model], **ends})


async def _model(request: web.Request) -> web.StreamResponse:
    return _json(_described(request.match_info["name"]))


def _described(name: str) -> dict[str, object]:
    """The description of a model, with the fields of both OpenAI and Anthropic."""
    epoch = "1970-01-01T00:00:00Z"
    openai = {"object": "model", "created": 0, "owned_by": "swerve"}
    return {"id": name, **openai, "type": "model", "display_name": name, "created_at": epoch}
