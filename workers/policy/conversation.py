"""One episode's token sequence: what was fed and what was sampled, and nothing else.

A `Sampler` does the sampling; how many tokens still fit is decided here.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.chat import ChatMessage
from pipeline.errors import RequestError
from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import RolloutRequest
from pipeline.trajectory import Turn, VersionSpan
from workers.policy.render import Renderer

MIN_ROOM_TOKENS = 16  # a reply cut shorter than this is useless


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled ids with one log-prob each (nats), the weight versions that drew them, and why sampling ended."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionSpan, ...]  # cover 0..len(ids) without a gap
    stop: Literal["stop", "length"]
    engine: str = ""  # URL of the engine, if it is known


class Sampler(Protocol):
    """Draws a continuation. Raises EngineError."""

    async def sample(self, prompt: Sequence[int], *, max_new_tokens: int, turn: int) -> Sampled: ...


class Conversation:
    """The policy's side of one episode: implements `workers.agent.loop.Policy`."""

    def __init__(self, renderer: Renderer, sampler: Sampler, request: RolloutRequest) -> None:
        self._renderer = renderer
        self._sampler = sampler
        self._max_new_tokens = request.sampling.max_new_tokens
        self._context_tokens = request.limits.context_tokens
        self._held: list[int] = []  # exactly what the engine holds after the last turn
        self._num_turns = 0

    async def begin(self, opening: Sequence[ChatMessage]) -> Turn | None:
        """The first reply, after `opening`. None: the context has no room for one."""
        return await self._speak(opening, self._renderer.first_prompt(opening))

    async def answer(self, messages: Sequence[ChatMessage]) -> Turn | None:
        """The reply after more messages. None: the context has no room for one; the conversation is unchanged."""
        last_id = self._held[-1] if self._held else None
        return await self._speak(messages, self._renderer.suffix(messages, last_id=last_id))

    async def _speak(self, told: Sequence[ChatMessage], fed: Sequence[int]) -> Turn | None:
        largest = max(fed, default=0)
        # Such a token would end the engine's scheduler, not only this request.
        if largest >= self._renderer.vocab_size:
            raise RequestError(
                f"the tokenizer gives id {largest}, the model has only {self._renderer.vocab_size} ids"
            )
        prompt = [*self._held, *fed]
        room_tokens = self._context_tokens - len(prompt)
        if room_tokens < min(MIN_ROOM_TOKENS, self._max_new_tokens):
            return None
        started_at = time.monotonic()
        sampled = await self._sampler.sample(
            prompt, max_new_tokens=min(self._max_new_tokens, room_tokens), turn=self._num_turns
        )
        kept_tokens = len(self._held)
        self._held = [*prompt, *sampled.ids]
        self._num_turns += 1
        cut_by_context = sampled.stop == "length" and room_tokens < self._max_new_tokens
        return Turn(
            kept_tokens=kept_tokens,
            fed=pack_int32s(fed),
            sampled=pack_int32s(sampled.ids),
            logprobs=pack_float32s(sampled.logprobs),
            versions=sampled.versions,
            stop="context" if cut_by_context else sampled.stop,
            text=self._renderer.decode(sampled.ids),
            told=tuple(told),
            engine=sampled.engine,
            generate_s=time.monotonic() - started_at,
        )
