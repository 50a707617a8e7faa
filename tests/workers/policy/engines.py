"""Servers in an engine's place: one passes everything on and listens, one answers what it is told to."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web


@dataclass(slots=True)
class Wire:
    """What went over it, in order."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    replies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@asynccontextmanager
async def tapped(router_url: str) -> AsyncIterator[Wire]:
    """A wire that passes everything on to a real router and back, unchanged."""
    wire = Wire()
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            data = await request.read()
            wire.requests.append(json.loads(data))
            wire.headers.append(dict(request.headers))
            headers = {name: request.headers[name] for name in ("Content-Type", "X-SMG-Routing-Key")}
            async with session.post(f"{router_url}/generate", data=data, headers=headers) as answer:
                body = await answer.read()
            wire.replies.append(json.loads(body))
            kept = {name: value for name, value in answer.headers.items() if name.lower().startswith("x-")}
            return web.Response(
                status=answer.status, body=body, headers=kept, content_type="application/json"
            )

        async with _served(forward, wire):
            yield wire


@dataclass(slots=True)
class Canned:
    """An answer: a status and a body, which may be cut off in its middle, or never come."""

    body: Any = None
    status: int = 200
    cut_off: bool = False
    never: bool = False
    headers: dict[str, str] = field(default_factory=dict[str, str])


@asynccontextmanager
async def playing(answers: Sequence[Canned]) -> AsyncIterator[Wire]:
    """A wire that gives `answers` one after the other, the last one again and again."""
    wire = Wire()

    async def answer(request: web.Request) -> web.StreamResponse:
        canned = answers[min(len(wire.requests), len(answers) - 1)]
        wire.requests.append(json.loads(await request.read()))
        wire.headers.append(dict(request.headers))
        if canned.never:
            await asyncio.Event().wait()
        body = canned.body if isinstance(canned.body, bytes) else json.dumps(canned.body).encode()
        if not canned.cut_off:
            return web.Response(status=canned.status, body=body, headers=canned.headers)
        response = web.StreamResponse(headers={"Content-Length": str(len(body) + 1)})
        await response.prepare(request)
        await response.write(body)
        assert request.transport is not None
        request.transport.close()
        return response

    async with _served(answer, wire):
        yield wire


@asynccontextmanager
async def _served(handler: Any, wire: Wire) -> AsyncIterator[None]:
    application = web.Application(client_max_size=64 * 2**20)
    application.router.add_post("/generate", handler)
    application.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    wire.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield
    finally:
        await runner.cleanup()


def completed(content: str | None, *, finish: str = "stop", **message: Any) -> dict[str, Any]:
    """A body of /v1/chat/completions."""
    said = {"role": "assistant", "content": content} | message
    return {
        "id": "chat-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": said, "finish_reason": finish}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }


def generated(ids: Sequence[int], *, finish: str = "length", **meta: Any) -> dict[str, Any]:
    """A /generate body as SGLang 0.5.21 forms it."""
    return {
        "output_ids": list(ids),
        "meta_info": {
            "id": "rid",
            "finish_reason": {"type": finish},
            "prompt_tokens": 3,
            "completion_tokens": len(ids),
            "weight_version": "run-1@5",
            "weight_versions": [{"version": "run-1@5", "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        | meta,
    }
