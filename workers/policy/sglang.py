"""Samples from SGLang engines through their router: a request contains token ids; a response contains token ids, log-probs and weight
versions.

Versions and ids are taken only from the response: the router may have repeated a request on another engine, new weights may have arrived in
the middle of it, or a pause may have cut it. A cut reply is continued from the tokens already sampled, so none is lost. Requests to busy or
absent engines are retried for a while; a request that an engine refuses is not.

Where a run's versions are adapters (`RolloutRequest.names_adapter`), each request names the one that is served when it is sent. An engine
that lacks it refuses the request, which is then repeated with the one that is served by that time. Replies report the name of the whole
weights, which must be the base of the run's adapters; the version of their tokens is that of the adapter.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Literal, Self

import aiohttp
import msgspec
from msgspec import structs
from redis.asyncio import Redis

from pipeline import redis_calls
from pipeline.agent.config import load_agent
from pipeline.chat_template import Tools
from pipeline.errors import EngineError, EngineRefused, RequestError
from pipeline.message import MalformedMessage, pack_float32s, pack_int32s
from pipeline.request import Claim, Sampling
from pipeline.telemetry import current_traceparent
from pipeline.tokenizer import TokenizerBundle, get_tokenizer
from pipeline.trajectory import VersionSpan, reply_digest
from pipeline.weights import ServedWeights, base_name, parse_version_name, served_weights, version_name
from workers.policy.conversation import Conversation
from workers.policy.render import Renderer
from workers.policy.speaker import Sampled, Speaker, Voice

ROUTING_KEY = "X-SMG-Routing-Key"  # all turns of an episode go to the engine that has its prefix cached
MAX_BARREN_CUTS = 20  # consecutive cuts without a token between them before an engine counts as broken
FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 2.0  # new claims are held back in the meantime, so only turns in progress ask
# 404 is what the router says while it knows no engine: one that just started, or lost them all.
RETRIED_STATUSES = frozenset({404, 408, 429, 500, 502, 503, 504})
_LORA = b"LoRA"  # what SGLang's refusal of an adapter that it does not have, or has unloaded, says
_ENGINE_HEADER = "x-smg-routed-worker-id"  # the response's header with the engine's URL


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Timeouts and retries. A paused engine holds requests, so one request may take as long as a weight update and its queue."""

    request_timeout_s: float = 900.0
    retry_budget_s: float = 120.0  # time from the first failure of a request
    cut_wait_s: float = 0.25  # pause before a cut reply is continued


TokenizerSource = Callable[[str], Awaitable[TokenizerBundle | None]]
"""Returns the tokenizer with this name; None if it was never announced. Raises RequestError."""


def announced_tokenizers(redis: Redis) -> TokenizerSource:
    """The tokenizers in Redis.

    It waits during outages of Redis; if a claim's lease is lost in the meantime, its holder cancels the wait.
    """

    async def bundle(name: str) -> TokenizerBundle | None:
        try:
            return await redis_calls.until_answered(lambda: get_tokenizer(redis, name))
        except MalformedMessage as error:
            raise RequestError(f"tokenizer {name}: {error}") from error

    return bundle


ServedSource = Callable[[str], Awaitable[ServedWeights | None]]
"""Returns the version that the engines serve of this run; None if none was recorded."""


def recorded_served(redis: Redis) -> ServedSource:
    """The record in Redis. It waits during outages of Redis, like `announced_tokenizers`, and raises EngineError if it cannot be read."""

    async def served(run_id: str) -> ServedWeights | None:
        try:
            return await redis_calls.until_answered(lambda: served_weights(redis, run_id))
        except MalformedMessage as error:
            raise EngineError(f"the served version of run {run_id}: {error}") from error

    return served


async def none_recorded(run_id: str) -> None:
    """The source where there is no Redis."""


def one_tokenizer(bundle: TokenizerBundle) -> TokenizerSource:
    """Always this tokenizer, whatever its name."""

    async def same(name: str) -> TokenizerBundle:
        return bundle

    return same


class SglangPolicies:
    """All conversations of one process, with one HTTP session and one renderer per tokenizer. It is an async context manager."""

    def __init__(
        self,
        router_url: str,
        tokenizers: TokenizerSource,
        settings: EngineSettings | None = None,
        *,
        served: ServedSource = none_recorded,
        any_weights: bool = False,
    ) -> None:
        """`served` is asked for requests that name an adapter. `any_weights`: the engines may serve weights that the request's run has not
        published, for an episode that is never trained.
        """
        self._router_url = router_url.rstrip("/")
        self._tokenizers = tokenizers
        self._settings = settings or EngineSettings()
        self._served = served
        self._any_weights = any_weights
        # Keys are the tokenizer, and whether commands are tool calls.
        self._renderers: dict[tuple[str, bool], Renderer] = {}
        self._making = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=self._settings.request_timeout_s)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def check(self) -> None:
        """Raises EngineError unless the router answers and has an engine that answers."""
        assert self._session is not None, "SglangPolicies is used outside its `async with`"
        try:
            async with self._session.get(f"{self._router_url}/readiness") as response:
                if response.status != 200:
                    raise EngineError(f"{self._router_url}: no engine is ready ({response.status})")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"{self._router_url}: {error or type(error).__name__}") from error

    async def open(self, claim: Claim) -> Conversation:
        """An empty conversation for `claim`. Raises RequestError if its tokenizer is unknown or cannot be used."""
        tools = load_agent(claim.request.agent_config).tools
        renderer = await self._renderer(claim.request.tokenizer, tools)
        return Conversation(renderer, self._speaker(claim, renderer), claim.request)

    async def voice(self, claim: Claim) -> Voice:
        """The voice that replies to an agent program. Raises RequestError like `open`."""
        renderer = await self._renderer(claim.request.tokenizer, ())
        return Voice(renderer, self._speaker(claim, renderer))

    def _speaker(self, claim: Claim, renderer: Renderer) -> Speaker:
        assert self._session is not None, "SglangPolicies is used outside its `async with`"
        sampler = _Sampler(
            self._session,
            f"{self._router_url}/generate",
            self._settings,
            claim,
            renderer,
            self._served,
            self._any_weights,
        )
        request = claim.request
        return Speaker(
            sampler,
            max_new_tokens=request.sampling.max_new_tokens,
            context_tokens=request.limits.context_tokens,
        )

    async def _renderer(self, name: str, tools: Tools) -> Renderer:
        kind = (name, bool(tools))
        async with self._making:
            if kind not in self._renderers:
                bundle = await self._tokenizers(name)
                if bundle is None:
                    raise RequestError(f"tokenizer {name} was never announced")
                self._renderers[kind] = await asyncio.to_thread(Renderer, bundle, tools)
            return self._renderers[kind]


class _Finish(msgspec.Struct, frozen=True):
    type: Literal["stop", "length", "abort"]
    message: str | None = None


class _Weights(msgspec.Struct, frozen=True):
    version: str | int
    start: int
    end: int


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float, int, str | None]]
    weight_versions: list[_Weights] | None = None
    weight_version: str | int | None = None
    routed_experts: bytes | None = None  # int32 values; base64 on the wire
    # Seconds that the request spent in the engine; of these, the seconds until it began to compute.
    e2e_latency: float | None = None
    queue_time: float | None = None


class _Answer(msgspec.Struct, frozen=True):
    """The fields of a /generate response that are read."""

    output_ids: list[int]
    meta_info: _Meta


_ANSWERS = msgspec.json.Decoder(_Answer)


@dataclass(slots=True)
class _Draft:
    """An unfinished reply, made by as many requests as it takes."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    routing: bytes = b""  # routing of the newest answer, which covers the earlier ones
    worked_s: float = 0.0  # seconds that engines worked on it
    begun_at: float = field(default_factory=time.monotonic)

    def add(self, answer: _Answer) -> None:
        """Appends the tokens of `answer`. Raises EngineError if its parts contradict each other."""
        meta, offset = answer.meta_info, len(self.ids)
        if [token for _, token, _ in meta.output_token_logprobs] != answer.output_ids:
            raise EngineError("engine response: output_token_logprobs are not those of output_ids")
        for span in _spans(meta, len(answer.output_ids)):
            last = self.spans[-1] if self.spans else None
            if last is not None and last.version == span.version:
                self.spans[-1] = VersionSpan(last.version, last.start, offset + span.end)
            else:
                self.spans.append(VersionSpan(span.version, offset + span.start, offset + span.end))
        self.routing = narrow_routing(meta.routed_experts or b"")
        self.ids += answer.output_ids
        self.logprobs += [logprob for logprob, _, _ in meta.output_token_logprobs]

    def finished(self, prompt: Sequence[int], stop: Literal["stop", "length"], engine: str) -> Sampled:
        digest = reply_digest(pack_int32s(prompt), pack_int32s(self.ids), pack_float32s(self.logprobs))
        wait_s = max(0.0, time.monotonic() - self.begun_at - self.worked_s)
        return Sampled(self.ids, self.logprobs, tuple(self.spans), stop, digest, engine, self.routing, wait_s)


@dataclass(frozen=True, slots=True)
class _Sampler:
    """The sampler of one claim."""

    session: aiohttp.ClientSession
    url: str
    settings: EngineSettings
    claim: Claim
    renderer: Renderer
    served: ServedSource
    any_weights: bool

    async def sample(
        self, prompt: Sequence[int], *, kept_tokens: int, max_new_tokens: int, turn: int
    ) -> Sampled:
        draft, barren_cuts, num_sent = _Draft(), 0, 0
        rid = f"{self.claim.request.id}.{self.claim.attempt}.{turn}"
        while True:
            held, room_tokens = [*prompt, *draft.ids], max_new_tokens - len(draft.ids)
            # An engine may still be busy with the previous request; ids are never used twice.
            question = _Question(held, max(kept_tokens - 1, 0), room_tokens, rid)
            answer, engine, num_sent = await self._ask(question, num_sent, draft)
            draft.add(answer)
            self._check(answer, room_tokens)
            stopped = bool(draft.ids) and draft.ids[-1] in self.renderer.stop_token_ids
            finish = answer.meta_info.finish_reason
            if finish.type != "abort" or stopped or len(draft.ids) >= max_new_tokens:
                ended = "stop" if stopped or finish.type == "stop" else "length"
                return draft.finished(prompt, ended, engine)
            barren_cuts = 0 if answer.output_ids else barren_cuts + 1
            if barren_cuts > MAX_BARREN_CUTS:
                raise EngineError(
                    f"engine aborts whatever it is asked: {finish.message or 'no reason given'}"
                )
            await asyncio.sleep(self.settings.cut_wait_s)

    async def _ask(self, question: "_Question", num_sent: int, draft: _Draft) -> tuple[_Answer, str, int]:
        """The engine's answer, the engine's URL, and the number of requests that this turn has sent. Retries within its budget."""
        wait_s, give_up_at = FIRST_WAIT_S, float("inf")
        while True:
            try:
                rid = question.rid if num_sent == 0 else f"{question.rid}.{num_sent}"
                sent_at = time.monotonic()
                answer, engine = await self._send(replace(question, rid=rid))
                draft.worked_s += _worked_s(answer.meta_info, time.monotonic() - sent_at)
                return answer, engine, num_sent + 1
            except _Unavailable as error:
                give_up_at = min(give_up_at, time.monotonic() + self.settings.retry_budget_s)
                if time.monotonic() + wait_s > give_up_at:
                    raise EngineError(
                        f"{self.url}: {error}; gave up after {num_sent + 1} requests"
                    ) from error
            num_sent += 1
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _send(self, question: "_Question") -> tuple[_Answer, str]:
        """Sends one request. Raises _Unavailable if another try may help, otherwise EngineError."""
        request = self.claim.request
        headers = {ROUTING_KEY: request.id, "Content-Type": "application/json"}
        if traceparent := current_traceparent() or request.traceparent:
            headers["traceparent"] = traceparent
        adapter = await self._adapter()
        body = msgspec.json.encode(self._body(question) | ({"lora_path": adapter} if adapter else {}))
        try:
            async with self.session.post(self.url, data=body, headers=headers) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from error
        if response.status != 200:
            lacks_adapter = adapter and response.status == 400 and _LORA in data
            kind = _Unavailable if lacks_adapter or response.status in RETRIED_STATUSES else EngineRefused
            raise kind(f"HTTP {response.status}: {data[:500].decode(errors='replace')}")
        try:
            answer = _ANSWERS.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"engine response: {error}") from error
        if adapter:
            answer = _by_adapter(answer, adapter, request.run_id)
        elif not self.any_weights:
            _check_run(answer, request.run_id)
        return answer, response.headers.get(_ENGINE_HEADER, "")

    async def _adapter(self) -> str:
        """The name of the adapter that the engines serve now; empty if the run's versions are whole weights.

        Raises _Unavailable if none is served yet.
        """
        request = self.claim.request
        if not request.names_adapter:
            return ""
        served = await self.served(request.run_id)
        if served is None:
            raise _Unavailable(f"no engine serves an adapter of run {request.run_id}")
        return version_name(request.run_id, served.version)

    def _body(self, question: "_Question") -> dict[str, object]:
        request = self.claim.request
        body: dict[str, object] = {
            "rid": question.rid,
            "input_ids": question.prompt,
            "sampling_params": _sampling_params(
                request.sampling, question.room_tokens, self.renderer.stop_token_ids
            ),
            "return_logprob": True,
            "logprob_start_len": -1,  # log-probs of the output only, so that a cached prefix remains usable
            "stream": False,
        }
        if request.report_routing:
            body |= {"return_routed_experts": True, "routed_experts_start_len": question.routing_from}
        return body

    def _check(self, answer: _Answer, room_tokens: int) -> None:
        ids = answer.output_ids
        if ids and self.claim.request.report_routing and not answer.meta_info.routed_experts:
            raise EngineError(
                "engine response: no routed experts; start the engine with --enable-return-routed-experts, or set "
                "learner.routing_replay = false"
            )
        if not ids and answer.meta_info.finish_reason.type != "abort":
            raise EngineError("engine response: finished without a single token")
        if len(ids) > room_tokens:
            raise EngineError(f"engine response: {len(ids)} tokens where {room_tokens} were allowed")
        if ids and not 0 <= min(ids) <= max(ids) < self.renderer.vocab_size:
            raise EngineError(
                f"engine response: an id outside the {self.renderer.vocab_size} of the tokenizer"
            )


@dataclass(frozen=True, slots=True)
class _Question:
    """The prompt and settings that an engine continues."""

    prompt: Sequence[int]
    routing_from: int  # position of the first token whose experts are reported, if the request wants them
    room_tokens: int
    rid: str


class _Unavailable(EngineError):
    """No engine can take the request at this moment."""


def _worked_s(meta: _Meta, round_trip_s: float) -> float:
    """The time that the engine worked on a request; the whole round trip if it does not report the time."""
    if meta.e2e_latency is None:
        return round_trip_s
    return min(max(0.0, meta.e2e_latency - (meta.queue_time or 0.0)), round_trip_s)


def narrow_routing(experts: bytes) -> bytes:
    """The lowest byte of each int32. Raises EngineError if another byte is not 0."""
    if len(experts) % 4 or any(experts[place::4].strip(b"\0") for place in (1, 2, 3)):
        raise EngineError("engine response: routed experts are not int32s from 0 to 255")
    return experts[::4]


def _sampling_params(
    sampling: Sampling, room_tokens: int, stop_token_ids: Sequence[int]
) -> dict[str, object]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "max_new_tokens": room_tokens,
        "stop_token_ids": stop_token_ids,
        "skip_special_tokens": False,
        "no_stop_trim": True,  # the stop token is one of the sampled tokens
    }


def _check_run(answer: _Answer, run_id: str) -> None:
    """Raises _Unavailable unless `run_id` published the weights of every token. An engine that has just started serves other weights until
    the trainer has updated it, so its tokens are dropped and requested again.
    """
    for span in _reported(answer.meta_info, len(answer.output_ids)):
        with suppress(ValueError):
            if span.end <= span.start or parse_version_name(str(span.version))[0] == run_id:
                continue
        raise _Unavailable(
            f"the engine serves weights {span.version!r}, which run {run_id} has not published"
        )


def _by_adapter(answer: _Answer, adapter: str, run_id: str) -> _Answer:
    """The answer with the adapter as the version of its tokens. Raises _Unavailable if an engine has sampled one with other whole weights
    than those that the adapter belongs to.
    """
    base, num_tokens = base_name(run_id), len(answer.output_ids)
    for span in _reported(answer.meta_info, num_tokens):
        if span.end > span.start and span.version != base:
            raise _Unavailable(
                f"the engine has weights {span.version!r} and not {base!r}, the base of adapter {adapter!r}"
            )
    spans = [_Weights(adapter, 0, num_tokens)]
    return structs.replace(answer, meta_info=structs.replace(answer.meta_info, weight_versions=spans))


def _spans(meta: _Meta, num_tokens: int) -> list[VersionSpan]:
    """The versions that sampled the tokens, without empty spans. Raises EngineError if they leave a gap."""
    reported = _reported(meta, num_tokens)
    spans = [
        VersionSpan(_number(span.version), span.start, span.end) for span in reported if span.end > span.start
    ]
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != num_tokens:
        raise EngineError(f"engine response: weight_versions {reported} do not cover {num_tokens} tokens")
    return spans


def _reported(meta: _Meta, num_tokens: int) -> list[_Weights]:
    """Returns the weight versions that the engine reports for its tokens. If it reports one version, that covers all `num_tokens`."""
    if meta.weight_versions is not None:
        return meta.weight_versions
    if meta.weight_version is None:
        raise EngineError("engine response: names no weight version")
    return [_Weights(meta.weight_version, 0, num_tokens)]


def _number(version: str | int) -> int:
    """The number of published weights; 0 for others, which only an episode that is never trained may have."""
    with suppress(ValueError):
        return parse_version_name(str(version))[1]
    return 0
