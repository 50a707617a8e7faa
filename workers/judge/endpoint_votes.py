"""Votes of an OpenAI-compatible server: messages in, a message out."""

import math
from dataclasses import dataclass
from typing import Any

import aiohttp

from pipeline.chat import ChatMessage
from pipeline.errors import EngineRefused, RequestError
from pipeline.judge import JudgeRequest
from pipeline.request import Claim
from workers.judge.engine_votes import chat
from workers.judge.engines import RETRY_BUDGET_S
from workers.judge.prompts import CHARS_PER_TOKEN, CharacterCutter, Cutter, StepText, TokenCutter
from workers.judge.tokenizers import JudgeTokenizers
from workers.judge.verdicts import vote_value
from workers.judge.votes import Opinion
from workers.policy.endpoint import EndpointServer, EndpointSettings, read_key, wire_message
from workers.policy.formats.served import ThoughtSplitter
from workers.policy.render import Renderer


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as messages."""

    messages: list[ChatMessage]
    num_tokens: int


class EndpointVoters:
    """All endpoints of the judges of one process."""

    def __init__(self, session: aiohttp.ClientSession, tokenizers: JudgeTokenizers) -> None:
        self._session = session
        self._tokenizers = tokenizers

    async def open(self, claim: Claim[JudgeRequest]) -> "EndpointVoter":
        """Raises RequestError for a key that cannot be read, or a tokenizer that is unknown."""
        endpoint = claim.request.judge.endpoint
        if endpoint is None:
            raise RequestError("the request names no endpoint")
        settings = EndpointSettings(retry_budget_s=RETRY_BUDGET_S)
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
        """Raises RequestError."""
        if text.opening:
            raise RequestError(
                "judge.templates: opening: an endpoint cannot be told how its reply begins; remove `opening`"
            )
        messages = chat(text)
        if self.renderer is not None:
            return ChatPrompt(messages, len(self.renderer.first_prompt(messages)))
        num_chars = sum(len(message.content) for message in messages)
        return ChatPrompt(messages, math.ceil(num_chars / CHARS_PER_TOKEN))

    async def vote(self, prompt: ChatPrompt, *, seed: int, name: str) -> Opinion:
        """Raises EngineError."""
        judge, endpoint = self.claim.request.judge, self.server.endpoint
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": [wire_message(message) for message in prompt.messages],
            "temperature": judge.temperature,
            "seed": seed,
        }
        if "max_completion_tokens" not in endpoint.options:  # what newer servers call the same
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
        """Does nothing: whether an endpoint is out is known by asking it."""
