"""Votes of language models, through SGLang and through OpenAI-compatible servers.
SGLang gets a prompt of token ids, and the vote is parsed from the sampled text; another server gets messages, and the vote is parsed from
its message.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pipeline.chat import ChatMessage
from pipeline.errors import EngineError, EngineRefused, RequestError
from pipeline.judge import JudgeRequest
from pipeline.request import Claim
from workers.judge.engines import RETRY_BUDGET_S, Call, Generated, JudgeEngines
from workers.judge.prompts import (
    CHARS_PER_TOKEN,
    CharacterCutter,
    Cutter,
    JudgeTokenizers,
    StepText,
    TokenCutter,
)
from workers.judge.votes import Opinion, vote_value
from workers.policy.endpoint import EndpointServer, EndpointSettings, read_key, wire_message
from workers.policy.formats import ThoughtSplitter, taken_apart
from workers.policy.render import Renderer


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """A prompt as token ids."""

    ids: Sequence[int]
    opening: str = ""  # the beginning of the reply, with which `ids` end

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class EngineVoters:
    """Language models behind the judge's router."""

    def __init__(self, engines: JudgeEngines, tokenizers: JudgeTokenizers) -> None:
        self._engines = engines
        self._tokenizers = tokenizers

    async def open(self, claim: Claim[JudgeRequest]) -> "EngineVoter":
        """Opens a voter. Raises RequestError if the judge's tokenizer is unknown or cannot be used."""
        renderer = await engine_renderer(self._tokenizers, claim)
        return EngineVoter(self._engines, claim, renderer, TokenCutter(renderer))


@dataclass(frozen=True, slots=True)
class EngineVoter:
    """Votes about the steps of one claim's rollout."""

    engines: JudgeEngines
    claim: Claim[JudgeRequest]
    renderer: Renderer
    cutter: TokenCutter
    versions: set[str] = field(default_factory=set[str])  # versions of weights that replied

    @property
    def num_votes(self) -> int:
        return self.claim.request.judge.num_votes

    @property
    def judge(self) -> str:
        return named(self.claim.request.judge.name, self.versions)

    def render(self, text: StepText) -> IdsPrompt:
        """Renders the prompt. Raises RequestError."""
        return opened_prompt(self.renderer, text, text.opening)

    async def vote(self, prompt: IdsPrompt, *, seed: int, name: str) -> Opinion:
        """Returns one vote. Raises EngineError."""
        judge = self.claim.request.judge
        body = {
            "rid": name,
            "input_ids": prompt.ids,
            "sampling_params": {
                "temperature": judge.temperature,
                "max_new_tokens": judge.max_new_tokens,
                "stop_token_ids": self.renderer.stop_token_ids,
                "sampling_seed": seed,
                "skip_special_tokens": False,
            },
            "stream": False,
        }
        answer = await self.engines.ask(Call("/generate", body, self.claim.request.rollout_id), Generated)
        if answer.meta_info.weight_version is not None:
            self.versions.add(str(answer.meta_info.weight_version))
        text = prompt.opening + self._text(answer)
        opened = self.renderer.opens_thought(prompt.ids)
        reply = taken_apart(text, self.renderer.reply_format, opened, with_calls=False)
        return Opinion(vote_value(reply.content), text)

    async def check(self) -> None:
        """Raises EngineError if the engines are out."""
        await self.engines.check()

    def _text(self, answer: Generated) -> str:
        ids = answer.output_ids
        if ids is None:
            if answer.text is None:
                raise EngineError("engine response: neither output_ids nor text")
            return answer.text
        if ids and not 0 <= min(ids) <= max(ids) < self.renderer.vocab_size:
            raise EngineError(
                f"engine response: an id outside the {self.renderer.vocab_size} of the judge's tokenizer"
            )
        return self.renderer.decode(ids)


async def engine_renderer(tokenizers: JudgeTokenizers, claim: Claim[JudgeRequest]) -> Renderer:
    """The renderer with the tokenizer that the request names. Raises RequestError."""
    name = claim.request.judge.tokenizer
    if not name:
        raise RequestError("judge.tokenizer: engines take token ids, so they need the judge's tokenizer")
    return await tokenizers.renderer(name)


def chat(text: StepText) -> list[ChatMessage]:
    """The prompt as messages, after which the judge replies."""
    system = [ChatMessage("system", text.system)] if text.system else []
    return [*system, ChatMessage("user", text.context + text.step + text.question)]


def opened_prompt(renderer: Renderer, text: StepText, opening: str) -> IdsPrompt:
    """The prompt with the beginning of the judge's reply. Raises RequestError if that begins a thought, because no verdict counts there."""
    ids = renderer.first_prompt(chat(text))
    if opening and renderer.opens_thought(ids):
        raise RequestError(
            f'judge: its chat template begins a thought, so its verdict cannot begin with {opening!r}: use judge.method = "votes", '
            "with templates that give no `opening`"
        )
    return IdsPrompt([*ids, *renderer.encode_text(opening)], opening)


def named(model: str, versions: set[str]) -> str:
    """The name of a model and of the versions of its weights that replied."""
    return "@".join(part for part in (model or "model", "+".join(sorted(versions))) if part)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as messages."""

    messages: list[ChatMessage]
    num_tokens: int


class EndpointVoters:
    """Opens voters that ask the OpenAI-compatible server named in each request. One object serves all judges of a process."""

    def __init__(self, session: aiohttp.ClientSession, tokenizers: JudgeTokenizers) -> None:
        self._session = session
        self._tokenizers = tokenizers

    async def open(self, claim: Claim[JudgeRequest]) -> "EndpointVoter":
        """Opens a voter. Raises RequestError for a key that cannot be read, or a tokenizer that is unknown."""
        endpoint = claim.request.judge.endpoint
        if endpoint is None:
            raise RequestError("the request names no endpoint")
        settings = EndpointSettings(retry_budget_s=RETRY_BUDGET_S, first_reply_s=RETRY_BUDGET_S)
        server = EndpointServer(self._session, endpoint, read_key(endpoint), settings)
        name = claim.request.judge.tokenizer
        return EndpointVoter(server, claim, await self._tokenizers.renderer(name) if name else None)


@dataclass(frozen=True, slots=True)
class EndpointVoter:
    """Votes about the steps of one claim's rollout."""

    server: EndpointServer
    claim: Claim[JudgeRequest]
    renderer: Renderer | None  # None: the server's tokenizer is not known

    @property
    def cutter(self) -> Cutter:
        return TokenCutter(self.renderer) if self.renderer else CharacterCutter()

    @property
    def num_votes(self) -> int:
        return self.claim.request.judge.num_votes

    @property
    def judge(self) -> str:
        return self.server.endpoint.model

    def render(self, text: StepText) -> ChatPrompt:
        """Renders the prompt. Raises RequestError."""
        if text.opening:
            raise RequestError(
                "judge.templates: opening: the beginning of an endpoint's reply cannot be set; remove `opening`"
            )
        messages = chat(text)
        if self.renderer is not None:
            return ChatPrompt(messages, len(self.renderer.first_prompt(messages)))
        num_chars = sum(len(message.content) for message in messages)
        return ChatPrompt(messages, math.ceil(num_chars / CHARS_PER_TOKEN))

    async def vote(self, prompt: ChatPrompt, *, seed: int, name: str) -> Opinion:
        """Returns one vote. Raises EngineError."""
        judge, endpoint = self.claim.request.judge, self.server.endpoint
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": [wire_message(message) for message in prompt.messages],
            "temperature": judge.temperature,
            "seed": seed,
        }
        if "max_completion_tokens" not in endpoint.options:  # newer servers' name of the same field
            body["max_tokens"] = judge.max_new_tokens
        answer = await self.server.ask(body | endpoint.options)
        if answer is None:
            raise EngineRefused(
                "prompt and reply exceed the server's context: lower judge.prompt_tokens or judge.max_new_tokens"
            )
        reply = ThoughtSplitter(exact=False)(answer.reply)
        text = f"<think>{reply.reasoning}</think>{reply.content}" if reply.reasoning else reply.content
        return Opinion(vote_value(reply.content), text)

    async def check(self) -> None:
        """Does nothing, because only a request shows whether an endpoint is out."""
