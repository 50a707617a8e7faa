"""An OpenAI-compatible server in a test: it plays a script for each task, and breaks as often as it is told to."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import web

Fault = Literal["", "429", "500", "cut", "no JSON", "slow"]
Script = Callable[[str], Sequence[str | dict[str, Any]]]
"""The replies of an episode, by its task's text: contents, or whole bodies of answers."""


@dataclass(slots=True)
class ChatServer:
    """What it was asked. `faults` are dealt out in turn, one for each request."""

    script: Script
    faults: Sequence[Fault] = ("",)
    url: str = ""
    num_requests: int = 0
    begun: Counter[str] = field(default_factory=Counter[str])  # episodes, by the task's text
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    told_at: int = 1  # place of the message that has the task's text

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        fault = self.faults[self.num_requests % len(self.faults)]
        self.num_requests += 1
        match fault:
            case "429":
                return web.Response(status=429, headers={"Retry-After": "0"}, text="slow down")
            case "500":
                return web.Response(status=500, text="<html>oops</html>")
            case "no JSON":
                return web.Response(text='{"choices": [{"mess')
            case "slow":
                await asyncio.sleep(1)
            case _:
                pass
        data = json.dumps(self._completion(body["messages"])).encode()
        if fault != "cut":
            return web.Response(body=data, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    def _completion(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        number = sum(message["role"] == "assistant" for message in messages)
        task = messages[self.told_at]["content"]
        self.begun[task] += number == 0
        reply = self.script(task)[number]
        if not isinstance(reply, str):
            return reply
        message = {"role": "assistant", "content": reply}
        return {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 2},
        }


@asynccontextmanager
async def chat_server(
    script: Script, faults: Sequence[Fault] = ("",), *, told_at: int = 1
) -> AsyncIterator[ChatServer]:
    server = ChatServer(script, faults, told_at=told_at)
    application = web.Application(client_max_size=64 * 2**20)
    application.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
