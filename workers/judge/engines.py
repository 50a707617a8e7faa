"""Requests to the engines of a judge, through their own router or to one engine, which has the same paths. A request contains token ids.

Requests of one rollout carry its id as routing key, so that one engine has the common beginning of its prompts in its cache. Requests to
busy or absent engines are repeated for a while; a request that an engine refuses is not.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from pipeline.errors import EngineError, EngineRefused
from pipeline.telemetry import current_traceparent
from workers.policy.sglang import RETRIED_STATUSES, ROUTING_KEY

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 2.0
RETRY_BUDGET_S = 60.0  # time from the first failure of a request

A = TypeVar("A")


class ModelInfo(msgspec.Struct, frozen=True):
    """The fields of /get_model_info that are read. A router passes the request on to one of its engines."""

    is_generation: bool
    served_model_name: str = ""
    model_path: str = ""
    weight_version: str | int | None = None


class JudgeFinish(msgspec.Struct, frozen=True):
    type: str
    message: str | None = None


class JudgeMeta(msgspec.Struct, frozen=True):
    finish_reason: JudgeFinish | None = None
    # Any text is accepted: the engines of a judge serve weights that no run has published.
    weight_version: str | int | None = None
    # One list for each sampled token: log-prob, id and text of each token that was asked about.
    output_token_ids_logprobs: list[list[tuple[float, int, str | None]]] | None = None
    # Log-prob, id and text of each token of the prompt from `logprob_start_len` on; the first has no log-prob, and one that is not
    # finite is null in JSON.
    input_token_logprobs: list[tuple[float | None, int, str | None]] | None = None


class Generated(msgspec.Struct, frozen=True):
    """The fields of a /generate response that are read."""

    meta_info: JudgeMeta
    output_ids: list[int] | None = None
    text: str | None = None


class _Embedding(msgspec.Struct, frozen=True):
    embedding: list[float]


class Embedded(msgspec.Struct, frozen=True):
    """The fields of a /v1/embeddings response that are read; for a reward model, the embedding is its output."""

    data: list[_Embedding]


class _EngineBusy(EngineError):
    """No engine can take the request at this moment."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the engines."""

    path: str
    body: dict[str, Any]
    routing_key: str


class JudgeEngines:
    """The judge's router, or one engine."""

    def __init__(self, session: aiohttp.ClientSession, router_url: str) -> None:
        self._session = session
        self._router_url = router_url

    async def check(self) -> None:
        """Raises EngineError unless the engines answer. Engines and routers both have /health; only a router has /readiness."""
        for path in ("readiness", "health"):
            url = f"{self._router_url}/{path}"
            try:
                async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
                    if response.status == 200:
                        return
                    if response.status != 404:
                        raise EngineError(f"{url}: no engine is ready ({response.status})")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise EngineError(f"{url}: {error or type(error).__name__}") from error
        raise EngineError(f"{self._router_url}: neither a router nor an engine")

    async def info(self) -> ModelInfo:
        """The kind of model that the engines serve. Raises EngineError."""
        url = f"{self._router_url}/get_model_info"
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
                return _decoded(await response.read(), response.status, ModelInfo)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(f"{url}: {type(error).__name__}: {error}") from error

    async def ask(self, call: Call, kind: type[A]) -> A:
        """The answer of an engine. Raises EngineError."""
        wait_s, num_sent, give_up_at = FIRST_WAIT_S, 0, float("inf")
        while True:
            num_sent += 1
            try:
                return await self._send(call, kind, num_sent)
            except _EngineBusy as error:
                now = time.monotonic()
                give_up_at = min(give_up_at, now + RETRY_BUDGET_S)
                if now + wait_s > give_up_at:
                    raise EngineError(f"{error}; gave up after {num_sent} requests") from error
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _send(self, call: Call, kind: type[A], number: int) -> A:
        url = f"{self._router_url}{call.path}"
        headers = {ROUTING_KEY: call.routing_key, "Content-Type": "application/json"}
        if traceparent := current_traceparent():
            headers["traceparent"] = traceparent
        # An engine may still be busy with the previous request; ids are never used twice.
        body = call.body | ({"rid": f"{call.body['rid']}.{number}"} if "rid" in call.body else {})
        try:
            async with self._session.post(url, data=msgspec.json.encode(body), headers=headers) as response:
                data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _EngineBusy(f"{url}: {type(error).__name__}: {error}") from error
        answer = _decoded(data, response.status, kind)
        if isinstance(answer, Generated):
            finish = answer.meta_info.finish_reason
            if finish is not None and finish.type == "abort":
                raise _EngineBusy(f"{url}: the engine aborted the request: {finish.message or 'no reason'}")
        return answer


def _decoded(data: bytes, status: int, kind: type[A]) -> A:
    """The decoded answer. Raises _EngineBusy if another try may help, otherwise EngineError."""
    if status != 200:
        failure = _EngineBusy if status in RETRIED_STATUSES else EngineRefused
        raise failure(f"HTTP {status}: {data[:500].decode(errors='replace')}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineError(f"engine response: {error}") from error


def http_session() -> aiohttp.ClientSession:
    """An async context manager for a session without limits of its own:

    `votes.py` bounds the number of concurrent votes, and their time.
    """
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
