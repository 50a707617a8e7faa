"""Makes one turn from one prompt: samples a reply to exact token ids and parses it. The caller decides on the prompt.

A `Sampler` does the sampling. The built-in loop's `Conversation` (conversation.py) and the tree of an agent program
(`workers/foreign`) use the same `Speaker`, so turns mean the same in both.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pipeline.chat import ChatMessage
from pipeline.errors import RequestError
from pipeline.message import pack_float32s, pack_int32s
from pipeline.telemetry import SECONDS, Attribute, meter, record, span
from pipeline.trajectory import Turn, VersionSpan
from workers.policy.formats import read_reply
from workers.policy.render import Renderer

_WHAT = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "sglang"}

_durations = meter().create_histogram(
    "gen_ai.client.operation.duration",
    unit="s",
    description="How long a reply took, its waits and repeated requests included",
    explicit_bucket_boundaries_advisory=[0.01 * 2**power for power in range(14)],
)
_waits = meter().create_histogram(
    "swerve.reply.wait.duration",
    unit="s",
    description="How long a reply waited until an engine worked on it, all its requests together",
    explicit_bucket_boundaries_advisory=SECONDS,
)
_tokens = meter().create_histogram(
    "gen_ai.client.token.usage",
    unit="{token}",
    description="Tokens of a reply: of its whole prompt, and sampled",
    explicit_bucket_boundaries_advisory=[4**power for power in range(14)],
)


def record_reply(duration_s: float, wait_s: float, *, prompt_tokens: int, sampled_tokens: int) -> None:
    _durations.record(duration_s, _WHAT)
    _waits.record(wait_s)
    _tokens.record(prompt_tokens, _WHAT | {"gen_ai.token.type": "input"})
    _tokens.record(sampled_tokens, _WHAT | {"gen_ai.token.type": "output"})


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled ids with one log-prob each (nats), the weight versions that sampled them, and why sampling ended."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionSpan, ...]  # cover 0..len(ids) without a gap
    stop: Literal["stop", "length"]
    digest: bytes  # digest of prompt, ids and log-probs as they arrived: pipeline/trajectory.py
    engine: str = ""  # URL of the engine, if it is known
    routing: bytes = b""  # bytes for `Turn.routing`
    wait_s: float = 0.0  # time until an engine worked on it, all requests together


class Sampler(Protocol):
    """Samples a continuation. Raises EngineError."""

    async def sample(
        self, prompt: Sequence[int], *, kept_tokens: int, max_new_tokens: int, turn: int
    ) -> Sampled: ...


@dataclass(frozen=True, slots=True)
class Speaker:
    """The sampler of one episode with the limits of each reply."""

    sampler: Sampler
    max_new_tokens: int
    context_tokens: int

    async def reply(
        self,
        renderer: Renderer,
        prompt: Sequence[int],
        *,
        kept_tokens: int,
        number: int,
        max_new_tokens: int | None = None,
    ) -> Turn:
        """The turn whose prompt is `prompt`, of which the engine has held the first `kept_tokens`. The turn's `told` is empty.

        `number` is unique among the samplings of the episode; `max_new_tokens` may only tighten the limit. Raises EngineError, and
        RequestError for an id that is not in the model's vocabulary.
        """
        fed = prompt[kept_tokens:]
        _check(fed, renderer.vocab_size)
        limit_tokens = min(self.max_new_tokens, max_new_tokens or self.max_new_tokens)
        room_tokens = self.context_tokens - len(prompt)
        asked_at = time.time()
        sampled, generate_s = await self._sample(
            prompt, kept_tokens, min(limit_tokens, room_tokens), number, asked_at
        )
        record_reply(generate_s, sampled.wait_s, prompt_tokens=len(prompt), sampled_tokens=len(sampled.ids))
        with span("read reply"):
            text = renderer.decode(sampled.ids)
            reply = await read_reply(
                text,
                renderer.reply_format,
                opened=renderer.opens_thought(prompt),
                with_calls=renderer.has_tools,
            )
        cut_by_context = sampled.stop == "length" and room_tokens < limit_tokens
        return Turn(
            kept_tokens=kept_tokens,
            fed=pack_int32s(fed),
            sampled=pack_int32s(sampled.ids),
            logprobs=pack_float32s(sampled.logprobs),
            versions=sampled.versions,
            stop="context" if cut_by_context else sampled.stop,
            text=text,
            reply=None if reply == ChatMessage("assistant", text) else reply,
            engine=sampled.engine,
            routing=sampled.routing,
            generate_s=generate_s,
            engine_wait_s=min(sampled.wait_s, generate_s),
            digest=sampled.digest,
            asked_at=asked_at,
        )

    async def _sample(
        self, prompt: Sequence[int], kept_tokens: int, max_new_tokens: int, number: int, asked_at: float
    ) -> tuple[Sampled, float]:
        """The reply, and the seconds that it took."""
        began_s = time.monotonic()
        sampled: Sampled | None = None
        try:
            sampled = found = await self.sampler.sample(
                prompt, kept_tokens=kept_tokens, max_new_tokens=max_new_tokens, turn=number
            )
        finally:
            took_s = time.monotonic() - began_s
            _record(sampled, asked_at, took_s, num_prompt_tokens=len(prompt))
        return found, took_s


@dataclass(frozen=True, slots=True)
class Voice:
    """The source of replies for an agent program. The program sends its tools with each request, so the renderer has none."""

    renderer: Renderer  # a renderer without tools
    speaker: Speaker


class MessageVoice(Protocol):
    """The source of replies to an agent program that have no token ids, so that they are never trained."""

    async def reply(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        *,
        number: int,
        max_new_tokens: int | None,
    ) -> Turn | None:
        """The reply to a whole conversation; `number` counts the replies of the episode from 0. Returns None if its context has no room.

        Raises EngineError.
        """
        ...


AnyVoice = Voice | MessageVoice


def _check(fed: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError for an id outside of the model's vocabulary: it would end the engine's scheduler, not only this request."""
    largest = max(fed, default=0)
    if largest >= vocab_size:
        raise RequestError(f"the tokenizer gives id {largest}, the model has only {vocab_size} ids")


def _record(sampled: Sampled | None, started_at: float, took_s: float, *, num_prompt_tokens: int) -> None:
    """Records the spans of a reply: the wait for an engine, which is the whole time if there was no result, and the generation."""
    generating_at = started_at + (took_s if sampled is None else min(sampled.wait_s, took_s))
    record("engine wait", started_at, generating_at)
    if sampled is None:
        return
    named: dict[str, Attribute] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.output_tokens": len(sampled.ids),
        "gen_ai.response.finish_reasons": (sampled.stop,),
        "server.address": sampled.engine,
    }
    version = sampled.versions[-1].version if sampled.versions else -1
    record("generate", generating_at, started_at + took_s, named=named, version=version)
