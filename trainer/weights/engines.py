"""The trainer's access to the engines: their control endpoints, and the router's list of engines that get requests.

SGLang's router forwards sampling only, so the trainer pauses, updates and queries each engine at its own address. Every
call that moves no weights has a deadline here, and every failure is an `EngineFailure` that names the engine.
"""

import asyncio
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import aiohttp
import msgspec

from pipeline.weights import WeightVersion
from trainer.recipe.schema import Precision

PauseMode = Literal["retract", "in_place", "abort"]
"""The treatment of the requests that an engine is sampling when new weights arrive.

retract: they wait, lose their KV cache and continue under the new weights, which compute it again.
in_place: they continue with the cache that the old weights made.
abort: they end at once, and the client continues the turn from the tokens that it received.
"""

CONTROL_S = 30.0
"""Deadline of a call that moves no weights."""

T = TypeVar("T")


class EngineFailure(Exception):
    """An engine or the router refused a call, or did not answer within its deadline."""


class Served(msgspec.Struct, frozen=True):
    """The weights from which an engine samples, as it reports them."""

    weight_version: str  # the format of `pipeline.weights.version_name`, once a run has published
    model_path: str


class _ModelCard(msgspec.Struct, frozen=True):
    id: str
    root: str
    parent: str | None = None  # the model that an adapter belongs to; None: it is the model


class _ModelCards(msgspec.Struct, frozen=True):
    data: list[_ModelCard]


class EngineLayout(msgspec.Struct, frozen=True):
    """The processes of one engine."""

    tp_size: int
    device: str
    quantization: str | None = None  # the type of its weights, as its start names it


class RoutedEngine(msgspec.Struct, frozen=True):
    """An engine in the router's list."""

    id: str
    url: str


class _RoutedEngines(msgspec.Struct, frozen=True):
    workers: list[RoutedEngine]


class _Updated(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


class Engines:
    """Connections to the engines, as an async context manager; it holds no state about engines."""

    def __init__(
        self, router_url: str, *, precision: Precision = "learner", control_s: float = CONTROL_S
    ) -> None:
        """`precision`: the type of the versions that engines are given."""
        self.router_url = router_url.rstrip("/")
        self._precision: Precision = precision
        self._control_s = control_s

    async def __aenter__(self) -> Self:
        # The server may close an idle connection in the minutes between two publications, so none is reused.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout()
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def routed(self) -> tuple[RoutedEngine, ...]:
        """The engines that the router knows, healthy or not."""
        answer = await self._call("GET", f"{self.router_url}/workers", timeout_s=self._control_s)
        return tuple(_decode(answer, _RoutedEngines, self.router_url).workers)

    async def quarantine(self, engine: RoutedEngine) -> None:
        """Takes an engine out of routing. Requests that it is sampling continue."""
        await self._call("DELETE", f"{self.router_url}/workers/{engine.id}", timeout_s=self._control_s)

    async def readmit(self, engine_url: str) -> None:
        """Let the router send requests to an engine; it does so as soon as the engine is healthy."""
        await self._call("POST", f"{self.router_url}/workers", {"url": engine_url}, timeout_s=self._control_s)

    async def served(self, engine_url: str) -> Served:
        answer = await self._call("GET", f"{engine_url}/model_info", timeout_s=self._control_s)
        return _decode(answer, Served, engine_url)

    async def pause(self, engine_url: str, mode: PauseMode) -> None:
        """Makes the engine sample no further token; requests that arrive in the meantime wait."""
        await self._call("POST", f"{engine_url}/pause_generation", {"mode": mode}, timeout_s=self._control_s)

    async def adapters(self, engine_url: str) -> dict[str, str]:
        """The adapters that requests may name, by name, each with the directory from which it was loaded."""
        answer = await self._call("GET", f"{engine_url}/v1/models", timeout_s=self._control_s)
        cards = _decode(answer, _ModelCards, engine_url).data
        return {card.id: card.root for card in cards if card.parent is not None}

    async def unload(self, engine_url: str, adapter: str) -> None:
        """Unloads an adapter. The engine answers when no request uses it any more, and loads no other adapter until then."""
        body = {"lora_name": adapter}
        await self._call("POST", f"{engine_url}/unload_lora_adapter", body, timeout_s=self._control_s)

    async def update(
        self, engine_url: str, version: WeightVersion, *, directory: str, mode: PauseMode
    ) -> None:
        """Loads the version in `directory`, which the engine must be able to read under the same path. The deadline is the caller's."""
        if version.is_adapter:
            adapter = {"lora_name": version.name, "lora_path": directory}
            await self._call("POST", f"{engine_url}/load_lora_adapter", adapter, timeout_s=None)
            return
        await self.check_precision(engine_url)
        body = {"model_path": directory, "weight_version": version.name, "flush_cache": mode != "in_place"}
        answer = await self._call("POST", f"{engine_url}/update_weights_from_disk", body, timeout_s=None)
        updated = _decode(answer, _Updated, engine_url)
        if not updated.success:
            raise EngineFailure(f"{engine_url} did not load {directory}: {updated.message}")

    async def layout(self, engine_url: str) -> EngineLayout:
        answer = await self._call("GET", f"{engine_url}/server_info", timeout_s=self._control_s)
        return _decode(answer, EngineLayout, engine_url)

    async def check_precision(self, engine_url: str) -> None:
        """Raises EngineFailure for an engine that was not started for weights in FP8, if versions are in FP8: it would take the numbers
        without their scales.
        """
        if self._precision == "fp8" and (await self.layout(engine_url)).quantization != "fp8":
            raise EngineFailure(
                f"{engine_url} was not started with --quantization fp8, and weights are published in FP8: start it with "
                "`python -m infra.serving.engine` from the recipe's model, or any other in FP8 with blocks of 128 x 128 of the same shape"
            )

    async def command(self, engine_url: str, path: str, body: dict[str, Any]) -> None:
        """Calls one of SGLang's endpoints that answer with success and a message, and that may move weights.

        The deadline is the caller's.
        """
        answer = await self._call("POST", f"{engine_url}/{path}", body, timeout_s=None)
        done = _decode(answer, _Updated, engine_url)
        if not done.success:
            raise EngineFailure(f"{engine_url}/{path}: {done.message}")

    async def resume(self, engine_url: str) -> None:
        """Makes the engine continue sampling; harmless if it was not paused."""
        await self._call("POST", f"{engine_url}/continue_generation", {}, timeout_s=self._control_s)

    async def _call(
        self, method: str, url: str, body: dict[str, Any] | None = None, *, timeout_s: float | None
    ) -> bytes:
        """Makes the call. Only this function translates aiohttp's errors into ours."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.request(method, url, json=body) as response,
            ):
                answer = await response.read()
        except TimeoutError as error:
            raise EngineFailure(f"{method} {url}: no answer within {timeout_s} s") from error
        except aiohttp.ClientError as error:
            raise EngineFailure(f"{method} {url}: {error}") from error
        if response.status >= 300:
            raise EngineFailure(f"{method} {url}: {response.status} {answer[:500].decode(errors='replace')}")
        return answer


def _decode(answer: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise EngineFailure(f"{url} answered something unexpected: {error}: {answer[:200]!r}") from error
