"""The engines and router that are checked, requests to them, and a description of the model from its directory and the engine.

`TransformersReference` is a second implementation of the model.
"""

import asyncio
import contextlib
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from pipeline.model_config import language_keys

ROUTING_KEY = "X-SMG-Routing-Key"
ENGINE_HEADER = "x-smg-routed-worker-id"  # header of a router's response that names the engine which answered
CONTROL_S = 60.0
"""Deadline of a call that samples nothing."""


class Nonconformity(Exception):
    """An engine or the router did not behave as a run needs. The message contains what was expected and what was seen."""


class Finish(msgspec.Struct, frozen=True):
    """The reason why a reply ended."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str | None = None


class WeightSpan(msgspec.Struct, frozen=True):
    """Weights of `version` sampled the tokens from start (inclusive) to end (exclusive)."""

    version: str
    start: int
    end: int


class Meta(msgspec.Struct, frozen=True):
    """The engine's metadata about a reply."""

    id: str
    prompt_tokens: int
    finish_reason: Finish
    output_token_logprobs: list[tuple[float, int, str | None]] = msgspec.field(
        default_factory=list[tuple[float, int, str | None]]
    )
    input_token_logprobs: list[tuple[float | None, int, str | None]] = msgspec.field(
        default_factory=list[tuple[float | None, int, str | None]]
    )
    weight_versions: list[WeightSpan] | None = None


class Reply(msgspec.Struct, frozen=True):
    """An engine's reply to one request."""

    output_ids: list[int]
    meta_info: Meta
    engine: str = ""  # the engine that the router names

    @property
    def logprobs(self) -> list[float]:
        """The log-probs of the sampled tokens, in nats."""
        return [logprob for logprob, _, _ in self.meta_info.output_token_logprobs]

    @property
    def input_logprobs(self) -> list[float | None]:
        return [logprob for logprob, _, _ in self.meta_info.input_token_logprobs]


class SampledModel(msgspec.Struct, frozen=True):
    """The model that an engine samples from."""

    model_path: str
    weight_version: str


class ServerInfo(msgspec.Struct, frozen=True):
    """The settings with which an engine was started."""

    dtype: str = "auto"
    version: str = "?"
    context_length: int | None = None
    max_total_num_tokens: int = 0


class _Load(msgspec.Struct, frozen=True):
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0


class _Loads(msgspec.Struct, frozen=True):
    loads: list[_Load]


@dataclass(frozen=True, slots=True)
class Model:
    """The properties of the served model that the checks need."""

    vocab_size: int
    context_tokens: int
    special_ids: frozenset[int]
    dtype: str  # type of the engine's activations

    @property
    def is_exact(self) -> bool:
        """Whether the same tokens have the same log-probs however they are batched, but for fp32's rounding."""
        return self.dtype in ("float32", "float")


@dataclass(slots=True)
class Target:
    """The engines and the router, over one HTTP session."""

    http: aiohttp.ClientSession
    engine_urls: Sequence[str]
    router_url: str  # "": the engines are asked directly
    model: Model
    num_burst_requests: int
    seed: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    @property
    def front_url(self) -> str:
        """The URL to which a worker would send its requests."""
        return self.router_url or self.engine_urls[0]

    def prompt(self, num_tokens: int) -> list[int]:
        """Random tokens of the model, none of them special."""
        drawn: list[int] = []
        while len(drawn) < num_tokens:
            token = self.rng.randrange(self.model.vocab_size)
            if token not in self.model.special_ids:
                drawn.append(token)
        return drawn

    async def sample(self, url: str, prompt: Sequence[int], num_tokens: int, **options: Any) -> Reply:
        """One reply of up to `num_tokens`, greedy and past every stop token unless `options` say otherwise.

        `rid`, `routing_key` and `input_logprobs` are options of the request; all others are sampling parameters.
        """
        rid = options.pop("rid", None) or uuid.uuid4().hex
        routing_key = options.pop("routing_key", rid)
        start = 0 if options.pop("input_logprobs", False) else -1
        sampling: Mapping[str, Any] = {
            "max_new_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            **options,
        }
        body = {
            "rid": rid,
            "input_ids": list(prompt),
            "sampling_params": sampling,
            "return_logprob": True,
            "logprob_start_len": start,
            "stream": False,
        }
        async with self.http.post(
            f"{url}/generate", json=body, headers={ROUTING_KEY: str(routing_key)}
        ) as response:
            data = await response.read()
            engine = response.headers.get(ENGINE_HEADER, "")
        if response.status != 200:
            raise Nonconformity(
                f"{url}/generate: HTTP {response.status} {data[:300].decode(errors='replace')}"
            )
        return msgspec.structs.replace(_decode(data, Reply, f"{url}/generate"), engine=engine)

    async def served(self, engine_url: str) -> SampledModel:
        return _decode(await self._call("GET", f"{engine_url}/model_info"), SampledModel, engine_url)

    async def pause(self, engine_url: str, mode: str) -> None:
        await self._call("POST", f"{engine_url}/pause_generation", {"mode": mode})

    async def resume(self, engine_url: str) -> None:
        await self._call("POST", f"{engine_url}/continue_generation", {})

    async def abort(self, engine_url: str, rid: str) -> None:
        await self._call("POST", f"{engine_url}/abort_request", {"rid": rid})

    async def load_weights(
        self, engine_url: str, directory: str, version: str, *, flush: bool = True
    ) -> None:
        body = {"model_path": directory, "weight_version": version, "flush_cache": flush}
        await self._call("POST", f"{engine_url}/update_weights_from_disk", body)

    async def is_healthy(self, engine_url: str) -> bool:
        """Whether /health answers within 5 s, the time that a router waits."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(5.0), self.http.get(f"{engine_url}/health") as response:
                return response.status == 200
        return False

    async def num_requests(self, engine_url: str) -> int:
        """The number of requests that the engine is sampling or holds in its queue."""
        answer = _decode(await self._call("GET", f"{engine_url}/v1/loads"), _Loads, engine_url)
        return sum(load.num_running_reqs + load.num_waiting_reqs for load in answer.loads)

    async def until_running(self, engine_url: str, task: asyncio.Task[Any], *, num_requests: int = 1) -> None:
        """Return once the engine samples `num_requests` requests, one of which is `task`'s, or the task has ended."""
        while not task.done():
            if await self.num_requests(engine_url) >= num_requests:
                return
            await asyncio.sleep(0.01)

    async def _call(self, method: str, url: str, body: dict[str, Any] | None = None) -> bytes:
        try:
            async with asyncio.timeout(CONTROL_S), self.http.request(method, url, json=body) as response:
                data = await response.read()
        except TimeoutError as error:
            raise Nonconformity(f"{method} {url}: no answer within {CONTROL_S:.0f} s") from error
        if response.status != 200:
            raise Nonconformity(
                f"{method} {url}: HTTP {response.status} {data[:300].decode(errors='replace')}"
            )
        return data


SOME_WAY_S = 0.1
"""An engine samples some tokens in this time, but not a long reply."""


@dataclass(frozen=True, slots=True)
class Long:
    """A long reply: `num_tokens` tokens after `prompt`, greedy, and its content when nothing interrupts it."""

    prompt: list[int]
    num_tokens: int
    undisturbed: Reply
    took_s: float


async def long_reply(target: Target, engine_url: str, *, at_least_s: float = 1.5) -> Long:
    """A request whose reply takes the engine `at_least_s`, or that has as many tokens as the engine's context allows."""
    prompt, num_tokens = target.prompt(16), 64
    longest = target.model.context_tokens - len(prompt) - 8
    while True:
        num_tokens = min(num_tokens, longest)
        began = time.monotonic()
        reply = await target.sample(engine_url, prompt, num_tokens)
        took_s = time.monotonic() - began
        if took_s >= at_least_s or num_tokens == longest:
            return Long(prompt, num_tokens, reply, took_s)
        num_tokens = int(num_tokens * max(1.5, min(8.0, 1.2 * at_least_s / took_s)))


@contextlib.asynccontextmanager
async def under_way(
    target: Target, engine_url: str, long: Long, *, rid: str | None = None
) -> AsyncIterator[asyncio.Task[Reply]]:
    """Yields the long request when part of its reply has been sampled; cancels it at the end of the block."""
    task = asyncio.create_task(
        target.sample(engine_url, long.prompt, long.num_tokens, rid=rid), name="long reply"
    )
    try:
        await target.until_running(engine_url, task)
        await asyncio.sleep(SOME_WAY_S)
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _decode(data: bytes, kind: type[Any], url: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except msgspec.DecodeError as error:
        raise Nonconformity(f"{url} answered something unexpected: {error}: {data[:200]!r}") from error


# One reply may fill 1/CACHE_PART of the engine's KV cache: some checks have two replies in progress and a third waiting.
CACHE_PART = 4


def describe(directory: Path, info: ServerInfo) -> Model:
    """The model in `directory` as an engine started with `info` serves it. Raises ValueError naming what is missing."""
    config = _json(directory / "config.json")
    if not config:
        raise ValueError(
            f"{directory}: no config.json in it; give --model the directory that the engine serves"
        )
    text = language_keys(config)
    limits = [text.get("max_position_embeddings"), info.context_length]
    limits += [info.max_total_num_tokens // CACHE_PART] if info.max_total_num_tokens else []
    return Model(
        vocab_size=int(text["vocab_size"]),
        context_tokens=min(int(limit) for limit in limits if limit),
        special_ids=_special_ids(directory, config),
        dtype=info.dtype
        if info.dtype != "auto"
        else str(text.get("torch_dtype") or text.get("dtype") or "auto"),
    )


def _special_ids(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for source in (config, _json(directory / "generation_config.json")):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = source.get(key)
            found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    added = _json(directory / "tokenizer.json").get("added_tokens", [])
    return frozenset(found | {int(token["id"]) for token in added})


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())) if path.is_file() else {}


class TransformersReference:
    """The model computed by transformers on the CPU, in fp32, one sequence at a time."""

    def __init__(self, directory: Path) -> None:
        """Loading takes four bytes of memory for each parameter. Raises OSError or ValueError for a model that transformers cannot load."""
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(self, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> list[float]:
        torch = self._torch
        ids_1T = torch.tensor([[*prompt, *sampled]])
        with torch.no_grad():
            logits_SV = self._model(ids_1T).logits[0, len(prompt) - 1 : -1]
        logprobs_SV = (logits_SV / temperature).log_softmax(-1)
        return logprobs_SV.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()
