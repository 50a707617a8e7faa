"""A server in front of a real engine that passes everything on, but for one thing that it breaks."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

Answer = dict[str, Any]


def _with_another_token_fed(body: Answer) -> None:
    """As an engine that puts a beginning-of-text token before every prompt."""
    body["input_ids"] = [1, *body["input_ids"]]


def _at_another_temperature(body: Answer) -> None:
    """As an engine that reports log-probs before the temperature is applied."""
    sampling = body["sampling_params"]
    if sampling["temperature"] not in (0.0, 1.0):
        sampling["temperature"] = 1.0


def _without_stop_token(reply: Answer) -> None:
    """As an engine that trims what ended the reply."""
    if reply["meta_info"]["finish_reason"]["type"] == "stop":
        reply["output_ids"].pop()
        reply["meta_info"]["output_token_logprobs"].pop()


def _with_newest_weights_only(reply: Answer) -> None:
    """As an engine that says which weights it has, and not which drew each token."""
    meta = reply["meta_info"]
    newest = meta["weight_versions"][-1]["version"]
    meta["weight_versions"] = [{"version": newest, "start": 0, "end": len(reply["output_ids"])}]


def _with_rounded_logprobs(reply: Answer) -> None:
    meta = reply["meta_info"]
    meta["output_token_logprobs"] = [[round(p, 1), *rest] for p, *rest in meta["output_token_logprobs"]]


CHANGED_REQUESTS: dict[str, Callable[[Answer], None]] = {
    "feeds another token": _with_another_token_fed,
    "ignores the temperature": _at_another_temperature,
}
CHANGED_REPLIES: dict[str, Callable[[Answer], None]] = {
    "trims the stop token": _without_stop_token,
    "names the newest weights only": _with_newest_weights_only,
    "rounds log-probs": _with_rounded_logprobs,
}
SWALLOWED_CALLS = {"ignores pauses": "pause_generation", "ignores aborts": "abort_request"}
"""Answered with success, and not passed on."""
DEAF = "goes on after a client hung up"
MIXED = "gives a request another's reply"
FAULTS = (*CHANGED_REQUESTS, *CHANGED_REPLIES, *SWALLOWED_CALLS, DEAF, MIXED)


@asynccontextmanager
async def broken_engine(engine_url: str, fault: str) -> AsyncGenerator[str]:
    """The URL of the engine with this fault."""
    waiting: list[asyncio.Future[bytes]] = []
    background: set[asyncio.Task[tuple[int, bytes]]] = set()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(request: web.Request, data: bytes) -> tuple[int, bytes]:
            url = f"{engine_url}{request.path_qs}"
            headers = {"Content-Type": "application/json"}
            async with http.request(request.method, url, data=data or None, headers=headers) as answer:
                return answer.status, await answer.read()

        async def generate(request: web.Request) -> web.Response:
            body = json.loads(await request.read())
            if fault in CHANGED_REQUESTS:
                CHANGED_REQUESTS[fault](body)
            asked = asyncio.create_task(ask(request, json.dumps(body).encode()))
            background.add(asked)
            status, data = await (asyncio.shield(asked) if fault == DEAF else asked)
            if fault in CHANGED_REPLIES and status == 200:
                reply = json.loads(data)
                CHANGED_REPLIES[fault](reply)
                data = json.dumps(reply).encode()
            if fault == MIXED:
                data = await swapped(data)
            return web.Response(status=status, body=data, content_type="application/json")

        async def swapped(data: bytes) -> bytes:
            """The reply of whoever comes soon after; `data` itself if nobody else waits for a reply."""
            if waiting:
                other = waiting.pop()
                if not other.done():
                    other.set_result(data)
            mine: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            waiting.append(mine)
            while not mine.done() and not all(asked.done() for asked in background):
                await asyncio.wait({mine}, timeout=0.05)
            return mine.result() if mine.done() else data

        async def others(request: web.Request) -> web.Response:
            if SWALLOWED_CALLS.get(fault) == request.path.lstrip("/"):
                return web.json_response({"status": "ok"})
            status, data = await ask(request, await request.read())
            return web.Response(status=status, body=data, content_type="application/json")

        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", generate)
        app.router.add_route("*", "/{tail:.*}", others)
        async with _listening(app) as url:
            yield url
            await asyncio.gather(*background, return_exceptions=True)


@asynccontextmanager
async def _listening(app: web.Application) -> AsyncGenerator[str]:
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield str(site.name)
    finally:
        await runner.cleanup()
