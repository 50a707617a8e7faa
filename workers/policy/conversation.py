"""One episode's token sequence: what was fed and what was sampled, and nothing else.

A `Sampler` does the sampling, a `Window` (context.py) decides what of the episode stands in the context. What the engine held
and what is fed next share their first tokens (`kept_tokens`); everything behind them is fed, kept replies after a cut too.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.chat import ChatMessage
from pipeline.errors import RequestError
from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import RolloutRequest
from pipeline.telemetry import Attribute, record, span
from pipeline.trajectory import Cut, Turn, VersionSpan
from workers.policy.context import Episode, Window
from workers.policy.formats.replies import read_reply
from workers.policy.render import Renderer
from workers.policy.reply_metrics import record_reply


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled ids with one log-prob each (nats), the weight versions that drew them, and why sampling ended."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionSpan, ...]  # cover 0..len(ids) without a gap
    stop: Literal["stop", "length"]
    digest: bytes  # of prompt, ids and log-probs, made where they came from: pipeline/reply_digest.py
    engine: str = ""  # URL of the engine, if it is known
    routing: bytes = b""  # Turn.routing
    wait_s: float = 0.0  # until an engine worked on it, all requests together


class Sampler(Protocol):
    """Draws a continuation. Raises EngineError."""

    async def sample(
        self, prompt: Sequence[int], *, kept_tokens: int, max_new_tokens: int, turn: int
    ) -> Sampled: ...


class Conversation:
    """The policy's side of one episode: implements `workers.agent.loop.Policy`."""

    def __init__(self, renderer: Renderer, sampler: Sampler, request: RolloutRequest) -> None:
        self._renderer = renderer
        self._sampler = sampler
        self._max_new_tokens = request.sampling.max_new_tokens
        self._context_tokens = request.limits.context_tokens
        self._window = Window(
            renderer,
            request.context,
            context_tokens=self._context_tokens,
            max_new_tokens=self._max_new_tokens,
        )
        self._episode = Episode((), ())  # as it was put to the policy for its last reply
        self._reply: tuple[int, ...] = ()
        self._held: list[int] = []  # exactly what the engine holds after the last turn
        self._num_turns = 0

    async def begin(self, opening: Sequence[ChatMessage]) -> Turn | None:
        """The first reply, after `opening`. None: the context has no room for one."""
        return await self._speak(self._window.opened(opening), len(opening))

    async def answer(self, messages: Sequence[ChatMessage], forget_reply: bool = False) -> Turn | None:
        """The reply after more messages. None: the context has no room for one; the conversation is unchanged.

        `forget_reply`: the last reply is taken out of the context before the messages are put into it.
        """
        if forget_reply:
            longer = self._window.told_again(self._episode, messages)
        else:
            longer = self._window.told(self._episode, self._reply, messages)
        return await self._speak(longer, len(messages), forgot_reply=forget_reply)

    async def _speak(self, longer: Episode, num_told: int, *, forgot_reply: bool = False) -> Turn | None:
        """The reply to `longer`, as far as it fits into the context. Its last `num_told` messages are new."""
        with span("render prompt"):
            episode = self._window.fit(longer)
            if episode is None:
                return None
            prompt = episode.ids()
            kept_tokens = _num_common(self._held, prompt)
            fed = prompt[kept_tokens:]
            self._check(fed)
        room_tokens = self._context_tokens - len(prompt)
        asked_at = time.time()
        sampled, generate_s = await self._sample(
            prompt, kept_tokens, min(self._max_new_tokens, room_tokens), asked_at
        )
        record_reply(generate_s, sampled.wait_s, prompt_tokens=len(prompt), sampled_tokens=len(sampled.ids))
        with span("read reply"):
            text = self._renderer.decode(sampled.ids)
            reply = await read_reply(
                text,
                self._renderer.reply_format,
                opened=self._renderer.opens_thought(prompt),
                with_calls=self._renderer.has_tools,
            )
        num_new = episode.num_newest
        if episode.omitted != self._episode.omitted:
            num_new += episode.num_marker
        cut = self._cut_before(episode, kept_tokens, forgot_reply=forgot_reply)
        self._episode, self._reply = episode, tuple(sampled.ids)
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
            text=text,
            reply=None if reply == ChatMessage("assistant", text) else reply,
            told=episode.newest[-num_told:],
            cut=cut,
            engine=sampled.engine,
            routing=sampled.routing,
            generate_s=generate_s,
            engine_wait_s=min(sampled.wait_s, generate_s),
            repeated_tokens=max(0, len(fed) - num_new),
            digest=sampled.digest,
            asked_at=asked_at,
        )

    async def _sample(
        self, prompt: Sequence[int], kept_tokens: int, max_new_tokens: int, asked_at: float
    ) -> tuple[Sampled, float]:
        """The reply, and the seconds that it took."""
        began_s = time.monotonic()
        sampled: Sampled | None = None
        try:
            sampled = found = await self._sampler.sample(
                prompt, kept_tokens=kept_tokens, max_new_tokens=max_new_tokens, turn=self._num_turns
            )
        finally:
            took_s = time.monotonic() - began_s
            _record(sampled, asked_at, took_s, num_prompt_tokens=len(prompt))
        return found, took_s

    def _cut_before(self, episode: Episode, kept_tokens: int, *, forgot_reply: bool) -> Cut | None:
        """What `episode` lacks that the policy saw, or would have seen, before. None: nothing."""
        dropped_chars = episode.units[-1].dropped_chars if episode.units else 0
        if kept_tokens == len(self._held) and not dropped_chars:
            return None
        return Cut(
            num_omitted=len(episode.omitted),
            marker=episode.marker,
            num_thoughts=episode.num_thoughts - self._episode.num_thoughts,
            dropped_chars=dropped_chars,
            forgot_reply=forgot_reply,
        )

    def _check(self, fed: Sequence[int]) -> None:
        """Raises RequestError for an id that the model has not: it would end the engine's scheduler, not only this request."""
        largest = max(fed, default=0)
        if largest >= self._renderer.vocab_size:
            raise RequestError(
                f"the tokenizer gives id {largest}, the model has only {self._renderer.vocab_size} ids"
            )


def _record(sampled: Sampled | None, started_at: float, took_s: float, *, num_prompt_tokens: int) -> None:
    """The spans of a reply: waiting for an engine, which is all that one without a result did, and generating."""
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


def _num_common(held: list[int], prompt: list[int]) -> int:
    """How many leading ids both have."""
    if prompt[: len(held)] == held:
        return len(held)
    pairs = enumerate(zip(held, prompt, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(held), len(prompt)))
