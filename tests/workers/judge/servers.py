"""A server in the place of a judge's router or endpoint, which replies what a test tells it to."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Replier = Callable[[dict[str, Any]], Awaitable[tuple[int, Any]]]
"""Status and body for the body of a request."""


@dataclass(slots=True)
class Server:
    url: str = ""
    ready: bool = True
    info: dict[str, Any] | None = None  # what /get_model_info answers; None: there is no such path
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    num_replied: list[int] = field(default_factory=list[int])  # before each request came


@asynccontextmanager
async def serving_judge(reply: Replier) -> AsyncIterator[Server]:
    server, replied = Server(), 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal replied
        body = json.loads(await request.read())
        server.requests.append(body)
        server.headers.append(dict(request.headers))
        server.num_replied.append(replied)
        status, said = await reply(body)
        replied += 1
        return web.json_response(said, status=status)

    async def readiness(_: web.Request) -> web.Response:
        return web.Response(status=200 if server.ready else 503)

    async def model_info(_: web.Request) -> web.Response:
        return web.Response(status=404) if server.info is None else web.json_response(server.info)

    application = web.Application(client_max_size=64 * 2**20)
    for path in ("/generate", "/v1/embeddings", "/v1/chat/completions"):
        application.router.add_post(path, answer)
    application.router.add_get("/readiness", readiness)
    application.router.add_get("/get_model_info", model_info)
    runner = web.AppRunner(application, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
