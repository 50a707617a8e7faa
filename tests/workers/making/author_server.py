"""An author's endpoint in a test: a real server in a thread of its own, which replies what a script says."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.workers.policy.engines import completed

Script = Callable[[str], str | int]
"""The reply to a prompt, or the status of a refusal."""


@dataclass(slots=True)
class AuthorServer:
    """What it was asked. The script may be changed at any time."""

    script: Script
    url: str = ""
    prompts: list[str] = field(default_factory=list[str])
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    @property
    def options(self) -> list[str]:
        """The options that name it."""
        return ["--author-url", self.url, "--author-model", "tiny"]

    async def answer(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.prompts.append(body["messages"][-1]["content"])
        reply = self.script(self.prompts[-1])
        if isinstance(reply, int):
            return web.Response(status=reply, text=f"no {request.headers.get('Authorization', '')}".strip())
        return web.json_response(completed(reply))


def in_turn(replies: Sequence[str | int]) -> Script:
    """One after the other, the last one again and again."""
    waiting = [*reversed(replies)]
    return lambda _: waiting.pop() if len(waiting) > 1 else waiting[0]


@contextmanager
def author_serving(script: Script) -> Iterator[AuthorServer]:
    server, loop = AuthorServer(script), asyncio.new_event_loop()
    application = web.Application(client_max_size=64 * 2**20)
    application.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1, access_log=None)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    loop.run_until_complete(start())
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    thread = threading.Thread(target=loop.run_forever, name="author server")
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(runner.cleanup())
        loop.close()
