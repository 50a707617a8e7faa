"""Replies of an OpenAI-compatible server: messages in, a message out. There are no token ids, so such a turn is never trained.

A request is repeated while the server is busy, broken or away, after the time that its Retry-After names; a request that it
refuses is not. The key is read when a conversation opens, is sent to the server, and stands in no log, error or artefact.
"""

import asyncio
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from pipeline.agent.config import load_agent
from pipeline.chat import ChatMessage, ToolCall
from pipeline.errors import EngineError, EngineRefused, RequestError
from pipeline.request import Claim, Endpoint, Sampling
from pipeline.telemetry import span
from pipeline.trajectory import Cut, Turn, Usage
from workers.policy.formats.served import ThoughtSplitter

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
LONGEST_ASKED_WAIT_S = 300.0  # a server that wants a longer pause counts as out
MAX_ANSWER_BYTES = 64 * 2**20
_RETRIED_STATUSES = frozenset({408, 409, 425, 429})  # and all from 500
_REFUSED_KEY = frozenset({401, 403})
_TOO_LONG_STATUSES = frozenset({400, 413, 422})
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|maximum (context|model) len|"
    r"(prompt|input|request)[^.]{0,40} (is )?too (long|large)|too many tokens",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Timeouts and retries."""

    request_timeout_s: float = 900.0  # from sending a request to the last byte of its answer
    # From the first failure of a request to the last try, without the pauses that the server wants.
    retry_budget_s: float = 600.0


class EndpointPolicies:
    """All conversations of one process with such servers: one HTTP session. An async context manager."""

    def __init__(self, settings: EndpointSettings | None = None) -> None:
        self._settings = settings or EndpointSettings()
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

    async def open(self, claim: Claim) -> "EndpointConversation":
        """An empty conversation for `claim`, whose request names an endpoint. Raises RequestError for a key that cannot be read."""
        assert self._session is not None, "EndpointPolicies is used outside its `async with`"
        endpoint = claim.request.endpoint
        if endpoint is None:
            raise RequestError("the request names no endpoint")
        server = EndpointServer(self._session, endpoint, read_key(endpoint), self._settings)
        agent = load_agent(claim.request.agent_config)
        return EndpointConversation(server, claim.request.sampling, ThoughtSplitter(agent.exact), agent.tools)


def read_key(endpoint: Endpoint) -> str:
    """The key of `endpoint` on this machine; "" if it names none. Raises RequestError."""
    if endpoint.key_file:
        try:
            key = Path(endpoint.key_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"the key file {endpoint.key_file} cannot be read: {error}") from error
        if not key:
            raise RequestError(f"the key file {endpoint.key_file} is empty")
    elif endpoint.key_env:
        key = os.environ.get(endpoint.key_env, "").strip()
        if not key:
            raise RequestError(
                f"the environment variable {endpoint.key_env} is not set; it holds the endpoint's key"
            )
    else:
        return ""
    if not key.isascii() or not key.isprintable():
        raise RequestError("the endpoint's key holds characters that no HTTP header can have")
    return key


class EndpointConversation:
    """One episode's messages: implements `workers.agent.loop.Policy`."""

    def __init__(
        self,
        server: "EndpointServer",
        sampling: Sampling,
        without_thoughts: ThoughtSplitter,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._server = server
        self._sampling = sampling
        self._without_thoughts = without_thoughts
        self._tools = tools
        self._messages: list[ChatMessage] = []

    async def begin(self, opening: Sequence[ChatMessage]) -> Turn | None:
        """The first reply, after `opening`. None: the server says that its context has no room."""
        return await self._speak(opening)

    async def answer(self, messages: Sequence[ChatMessage], forget_reply: bool = False) -> Turn | None:
        """The reply after more messages. None: the server says that its context has no room.

        `forget_reply`: the last reply is no longer sent.
        """
        if forget_reply:
            del self._messages[-1:]
        return await self._speak(messages, Cut(forgot_reply=True) if forget_reply else None)

    async def _speak(self, told: Sequence[ChatMessage], cut: Cut | None = None) -> Turn | None:
        self._messages += told
        asked_at, started_at = time.time(), time.monotonic()
        named = {"gen_ai.operation.name": "chat", "gen_ai.request.model": self._server.endpoint.model}
        with span("generate", named=named):
            answer = await self._server.ask(self._body())
        if answer is None:
            return None
        reply = self._without_thoughts(answer.reply)
        self._messages.append(reply)
        return Turn(
            kept_tokens=0,
            fed=b"",
            sampled=b"",
            logprobs=b"",
            versions=(),
            stop="length" if answer.choices[0].finish_reason == "length" else "stop",
            text=reply.content,
            reply=reply,
            told=tuple(told),
            cut=cut,
            usage=answer.usage and answer.usage.counted,
            engine=self._server.endpoint.api_base,
            generate_s=time.monotonic() - started_at,
            finish_reason=answer.choices[0].finish_reason or "",
            asked_at=asked_at,
        )

    def _body(self) -> dict[str, Any]:
        sampling, endpoint = self._sampling, self._server.endpoint
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": [wire_message(message) for message in self._messages],
            "temperature": sampling.temperature,
        }
        if sampling.top_p != 1:
            body["top_p"] = sampling.top_p
        if sampling.top_k is not None:
            body["top_k"] = sampling.top_k
        if "max_completion_tokens" not in endpoint.options:  # what newer servers call the same
            body["max_tokens"] = sampling.max_new_tokens
        if self._tools:
            body["tools"] = list(self._tools)
        return body | endpoint.options


def wire_message(message: ChatMessage) -> dict[str, Any]:
    """`message` as the chat completions API has it. Thoughts are not sent back."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["content"] = message.content or None
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    return wire


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class _CalledTool(msgspec.Struct, frozen=True):
    function: _Function
    id: str | None = None


class _Part(msgspec.Struct, frozen=True):
    text: str = ""


class _Message(msgspec.Struct, frozen=True):
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_CalledTool] | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def counted(self) -> Usage:
        return Usage(
            prompt_tokens=max(self.prompt_tokens or 0, 0),
            completion_tokens=max(self.completion_tokens or 0, 0),
        )


class Completion(msgspec.Struct, frozen=True):
    """What is read of a chat completion."""

    choices: list[_Choice]
    usage: _Usage | None = None

    @property
    def reply(self) -> ChatMessage:
        message = self.choices[0].message
        content = message.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        reasoning = message.reasoning_content or message.reasoning or ""
        calls = tuple(
            ToolCall(
                id=call.id or f"call_{number}",
                name=call.function.name,
                arguments=_as_text(call.function.arguments),
            )
            for number, call in enumerate(message.tool_calls or ())
        )
        return ChatMessage("assistant", content, reasoning=reasoning, tool_calls=calls)


_COMPLETIONS = msgspec.json.Decoder(Completion)


def _as_text(arguments: str | dict[str, Any] | None) -> str:
    if isinstance(arguments, dict):  # some servers send the object itself
        return msgspec.json.encode(arguments).decode()
    return arguments or "{}"


class _Busy(EngineError):
    """The server cannot answer at this moment."""

    def __init__(self, message: str, *, wait_s: float | None = None) -> None:
        """`wait_s`: the pause that the server wants."""
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class EndpointServer:
    """One endpoint with its key."""

    session: aiohttp.ClientSession
    endpoint: Endpoint
    key: str = field(repr=False)
    settings: EndpointSettings

    @property
    def url(self) -> str:
        return f"{self.endpoint.api_base.rstrip('/')}/chat/completions"

    async def ask(self, body: dict[str, Any]) -> Completion | None:
        """The server's answer. None: the conversation is too long for it. Asks again within the retry budget. Raises EngineError."""
        data = msgspec.json.encode(body)
        wait_s, num_sent, give_up_at = FIRST_WAIT_S, 0, float("inf")
        while True:
            num_sent += 1
            try:
                return await self._send(data)
            except _Busy as busy:
                now = time.monotonic()
                give_up_at = min(give_up_at, now + self.settings.retry_budget_s)
                pause_s = wait_s if busy.wait_s is None else busy.wait_s
                if busy.wait_s is not None and busy.wait_s <= LONGEST_ASKED_WAIT_S:
                    give_up_at += busy.wait_s
                if now + pause_s > give_up_at:
                    raise EngineError(f"{self.url}: {busy}; gave up after {num_sent} requests") from busy
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _send(self, data: bytes) -> Completion | None:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            async with self.session.post(
                self.url, data=data, headers=headers, allow_redirects=False
            ) as response:
                text = await _read(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Busy(f"{type(error).__name__}: {self._without_key(str(error))}".rstrip(": ")) from None
        if response.status == 200:
            return self._decoded(text)
        if response.status in _TOO_LONG_STATUSES and _TOO_LONG.search(text.decode(errors="replace")):
            return None
        reason = f"HTTP {response.status}: {self._shown(text)}"
        if response.status in _RETRIED_STATUSES or response.status >= 500:
            raise _Busy(reason, wait_s=_retry_after_s(response.headers.get("Retry-After", "")))
        if response.status in _REFUSED_KEY:
            reason += f"; the key comes from {self.endpoint.key_file or self.endpoint.key_env or 'nowhere'}"
        raise EngineRefused(f"{self.url}: {reason}")

    def _decoded(self, text: bytes) -> Completion:
        try:
            answer = _COMPLETIONS.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _Busy(
                f"the answer is not a chat completion: {error}; it is {self._shown(text)!r}"
            ) from None
        if not answer.choices:
            raise _Busy("the answer has no choice")
        return answer

    def _shown(self, text: bytes) -> str:
        """The beginning of an answer. Some servers quote the key."""
        return self._without_key(text.decode(errors="replace"))[:300]

    def _without_key(self, text: str) -> str:
        return text.replace(self.key, "[key]") if self.key else text


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The body. Raises _Busy for one that is too long to be an answer."""
    parts, num_bytes = list[bytes](), 0
    async for part in response.content.iter_chunked(2**16):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > MAX_ANSWER_BYTES:
            raise _Busy(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    return b"".join(parts)


def _retry_after_s(header: str) -> float | None:
    """The pause that a Retry-After header wants: seconds, or a date. None if it says nothing that can be read."""
    with suppress(ValueError):
        return max(0.0, float(header))
    with suppress(ValueError, TypeError):
        at = parsedate_to_datetime(header)
        return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    return None
