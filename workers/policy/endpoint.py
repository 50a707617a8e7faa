"""Replies of an OpenAI-compatible server: messages in, a message out. There are no token ids, so such a turn is never trained.

A request is repeated while the server is busy, broken or unavailable, after the time in its Retry-After. A refused request is not repeated,
nor is a greedy one that got the same invalid answer twice. A server that never replied is given up soon. The first failure is logged at
once. The key is read when a conversation opens, is sent to the server, and is in no log, error or artefact.
"""

import asyncio
import json
import logging
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self, TypeVar, cast

import aiohttp
import msgspec
from msgspec.structs import replace

from pipeline.agent.config import AgentConfig, load_agent
from pipeline.chat import ChatMessage, ToolCall, storable, storable_message
from pipeline.errors import EngineError, EngineRefused, RequestError
from pipeline.request import Claim, Endpoint
from pipeline.screen import visible_line
from pipeline.telemetry import span
from pipeline.trajectory import Cut, Turn, Usage
from workers.policy.formats import ThoughtSplitter

log = logging.getLogger("swerve.worker")

A = TypeVar("A")

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
LONGEST_ASKED_WAIT_S = 300.0  # a server that wants a longer pause counts as out
MAX_ANSWER_BYTES = 64 * 2**20
LONGEST_INTEGER = 100  # digits
MOST_TOKENS = 2**32  # largest number of tokens that a server may report for one reply
_COUNTED = ("prompt_tokens", "completion_tokens")
PROBE_TIMEOUT_S = 10.0
SAY_AGAIN_S = 60.0  # pause after which a failure is logged again
_RETRIED_STATUSES = frozenset({408, 409, 425, 429})  # besides all from 500 on except these:
_NEVER_STATUSES = frozenset({501, 505})
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

    request_timeout_s: float = 900.0  # time from sending a request to the last byte of its answer
    # Time from the first failure of a request to the last try, without the pauses that the server asks for.
    retry_budget_s: float = 600.0
    # The same for a server that has never replied to this process, unless it says that it is busy: perhaps there is no server.
    first_reply_s: float = 20.0


@dataclass(slots=True)
class ServerHealth:
    """The knowledge about one server that all conversations of a process share."""

    is_reached: bool = False  # whether it has answered anything
    has_replied: bool = False
    failing_since: float | None = None  # monotonic; None while it replies
    said_at: float = -math.inf  # monotonic time of the last log line about a failure
    reaching: asyncio.Lock = field(default_factory=asyncio.Lock)

    def reached(self) -> None:
        if not self.is_reached:
            self.is_reached, self.failing_since = True, None

    def replied(self, url: str) -> None:
        if self.failing_since is not None and math.isfinite(self.said_at):
            log.warning("%s replies", url)
            self.said_at = -math.inf
        self.has_replied, self.failing_since = True, None

    def failed(self, url: str, why: str) -> None:
        now = time.monotonic()
        self.failing_since = self.failing_since or now
        if now - self.said_at > SAY_AGAIN_S:
            log.warning("%s: %s; it is asked again", url, visible_line(why))
            self.said_at = now


class EndpointPolicies:
    """All conversations of one process with such servers, in one HTTP session. It is an async context manager."""

    def __init__(self, settings: EndpointSettings | None = None) -> None:
        self._settings = settings or EndpointSettings()
        self._session: aiohttp.ClientSession | None = None
        self._health = defaultdict[str, ServerHealth](ServerHealth)

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
        """An empty conversation for `claim`, whose request names an endpoint.

        Raises RequestError for a key that cannot be read, EngineError if nothing answers at the endpoint's address.
        """
        return EndpointConversation(await self._server(claim), load_agent(claim.request.agent_config))

    async def voice(self, claim: Claim) -> "EndpointVoice":
        """The voice that replies to an agent program. Raises the errors of `open`."""
        return EndpointVoice(await self._server(claim))

    async def _server(self, claim: Claim) -> "EndpointServer":
        assert self._session is not None, "EndpointPolicies is used outside its `async with`"
        endpoint = claim.request.endpoint
        if endpoint is None:
            raise RequestError("the request names no endpoint")
        health = self._health[endpoint.api_base]
        server = EndpointServer(self._session, endpoint, read_key(endpoint), self._settings, health)
        await server.reach()
        return server


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

    def __init__(self, server: "EndpointServer", agent: AgentConfig) -> None:
        self._server = server
        self._without_thoughts = ThoughtSplitter(agent.exact)
        self._tools = agent.tools
        self._returns_thoughts = agent.upstream == "2.4"  # 1.x sends role and content alone
        self._messages: list[ChatMessage] = []

    async def begin(self, opening: Sequence[ChatMessage]) -> Turn | None:
        """The first reply, after `opening`; None if the server reports that its context has no room."""
        return await self._speak(opening)

    async def answer(self, messages: Sequence[ChatMessage], forget_reply: bool = False) -> Turn | None:
        """The reply after more messages; None if the server reports that its context has no room.

        `forget_reply`: the last reply is no longer sent.
        """
        if forget_reply:
            del self._messages[-1:]
        return await self._speak(messages, Cut(forgot_reply=True) if forget_reply else None)

    async def _speak(self, told: Sequence[ChatMessage], cut: Cut | None = None) -> Turn | None:
        self._messages += told
        turn = await self._server.turn(self._body(), self._without_thoughts)
        if turn is None:
            return None
        self._messages.append(turn.said)
        return replace(turn, told=tuple(told), cut=cut)

    def _body(self) -> dict[str, Any]:
        """The request's body. Besides model, messages and tools, it contains only the fields in the endpoint's options."""
        body: dict[str, Any] = {
            "model": self._server.endpoint.model,
            "messages": [
                wire_message(message, with_thoughts=self._returns_thoughts) for message in self._messages
            ],
        }
        if self._tools:
            body["tools"] = list(self._tools)
        return body | self._server.endpoint.options


class EndpointVoice:
    """Replies to an agent program, which sends its whole conversation each time: implements `workers.policy.speaker.MessageVoice`."""

    def __init__(self, server: "EndpointServer") -> None:
        self._server = server
        self._without_thoughts = ThoughtSplitter(exact=False)

    async def reply(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        *,
        number: int,
        max_new_tokens: int | None,
    ) -> Turn | None:
        """The reply; None if the server reports that its context has no room. Raises EngineError.

        The program's limit of tokens can only tighten a limit in the endpoint's options.
        """
        options = dict(self._server.endpoint.options)
        for name in ("max_tokens", "max_completion_tokens"):
            if max_new_tokens is not None and isinstance(options.get(name), int):
                options[name] = min(options[name], max_new_tokens)
        body: dict[str, Any] = {
            "model": self._server.endpoint.model,
            # A program returns thoughts only if the server's replies contained some.
            "messages": [wire_message(message, with_thoughts=True) for message in messages],
        }
        if tools:
            body["tools"] = list(tools)
        return await self._server.turn(body | options, self._without_thoughts)


def wire_message(message: ChatMessage, *, with_thoughts: bool = False) -> dict[str, Any]:
    """`message` in the format of the chat completions API."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if with_thoughts and message.reasoning:
        wire["reasoning_content"] = message.reasoning
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
    arguments: Any = None


class _CalledTool(msgspec.Struct, frozen=True):
    function: _Function
    id: Any = None

    def call(self, number: int) -> ToolCall:
        """The call. Some servers send the object of the arguments itself, and some no id."""
        arguments = self.function.arguments
        if not isinstance(arguments, str):
            arguments = "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
        identity = self.id if isinstance(self.id, str) and self.id else f"call_{number}"
        return ToolCall(id=identity, name=self.function.name, arguments=arguments or "{}")


class _Part(msgspec.Struct, frozen=True):
    text: Any = None


class _Message(msgspec.Struct, frozen=True):
    content: str | list[_Part] | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: list[_CalledTool] | None = None

    @property
    def spoken(self) -> ChatMessage:
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(_text(part.text) for part in content)
        return ChatMessage(
            "assistant",
            content,
            reasoning=_text(self.reasoning_content) or _text(self.reasoning),
            tool_calls=tuple(call.call(number) for number, call in enumerate(self.tool_calls or ())),
        )


class _Choice(msgspec.Struct, frozen=True):
    message: _Message
    finish_reason: Any = None


class _Completion(msgspec.Struct, frozen=True):
    """The fields of a chat completion that are read. Only the fields that make up a reply have to have their types."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    usage: Any = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A server's reply. Every text in it can be stored, and every number is a count."""

    reply: ChatMessage
    finish_reason: str
    usage: Usage | None


def read_completion(data: bytes) -> Completion:
    """The completion in the body. Raises ValueError for a body without one.

    Python's parser accepts halves of surrogate pairs and NaN, which some servers write although they are not JSON.
    """
    try:
        tree = json.loads(data.decode(errors="replace"), object_pairs_hook=_object, parse_int=_integer)
        found = msgspec.convert(tree, _Completion)
        reply = storable_message(found.choices[0].message.spoken)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    usage = cast(dict[str, Any], found.usage) if isinstance(found.usage, dict) else None
    return Completion(
        reply,
        storable(_text(found.choices[0].finish_reason)),
        None if usage is None else Usage(**{name: _count(usage.get(name)) for name in _COUNTED}),
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {storable(name): value for name, value in pairs}


def _integer(digits: str) -> int | float:
    """The integer; a float for thousands of digits, which Python refuses to parse as an integer."""
    return int(digits) if len(digits) <= LONGEST_INTEGER else float(digits)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    """The count; 0 for a number that no server can have counted."""
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else 0


class _Busy(EngineError):
    """The server cannot answer at this moment."""

    def __init__(
        self, message: str, *, wait_s: float | None = None, says_so: bool = False, malformed: str = ""
    ) -> None:
        """`wait_s`: the pause that the server asks for;

        `says_so`: its own HTTP status says that it is busy or broken; `malformed`: the error in an answer that is not a completion.
        """
        super().__init__(message)
        self.wait_s = wait_s
        self.says_so = says_so
        self.malformed = malformed


@dataclass(frozen=True, slots=True)
class EndpointServer:
    """One endpoint and its key."""

    session: aiohttp.ClientSession
    endpoint: Endpoint
    key: str = field(repr=False)
    settings: EndpointSettings
    health: ServerHealth = field(default_factory=ServerHealth)

    @property
    def url(self) -> str:
        return f"{self._base}/chat/completions"

    @property
    def _base(self) -> str:
        return self.endpoint.api_base.rstrip("/")

    async def reach(self) -> None:
        """Return once the server has given this process any answer. Raises EngineError.

        This needs no prompt, so a missing server is noticed before a container is made for an episode.
        """
        async with self.health.reaching:
            if not self.health.is_reached:
                await self._repeated(self._probe, is_greedy=False)

    async def turn(self, body: dict[str, Any], without_thoughts: ThoughtSplitter) -> Turn | None:
        """The server's reply as a turn without messages; None if the conversation is too long for it. Raises EngineError."""
        asked_at, started_at = time.time(), time.monotonic()
        named = {"gen_ai.operation.name": "chat", "gen_ai.request.model": self.endpoint.model}
        with span("generate", named=named):
            answer = await self.ask(body)
        if answer is None:
            return None
        reply = without_thoughts(answer.reply)
        return Turn(
            kept_tokens=0,
            fed=b"",
            sampled=b"",
            logprobs=b"",
            versions=(),
            stop="length" if answer.finish_reason == "length" else "stop",
            text=reply.content,
            reply=reply,
            usage=answer.usage,
            engine=self.endpoint.api_base,
            generate_s=time.monotonic() - started_at,
            finish_reason=answer.finish_reason,
            asked_at=asked_at,
        )

    async def ask(self, body: dict[str, Any]) -> Completion | None:
        """The server's answer;

        None if the conversation is too long for it. Repeats the request within the retry budget. Raises EngineError.
        """
        data = msgspec.json.encode(body)
        answer = await self._repeated(lambda: self._send(data), is_greedy=body.get("temperature") == 0)
        self.health.replied(self.url)
        return answer

    async def _repeated(self, send: Callable[[], Awaitable[A]], *, is_greedy: bool) -> A:
        """The result of `send`, which is repeated while it raises _Busy."""
        wait_s, num_sent, failed_at, asked_to_wait_s, nonsense = FIRST_WAIT_S, 0, 0.0, 0.0, ""
        while True:
            num_sent += 1
            try:
                return await send()
            except _Busy as busy:
                self.health.failed(self.url, str(busy))
                if is_greedy and busy.malformed and busy.malformed == nonsense:
                    raise EngineRefused(f"{self.url}: {busy}; the same again at temperature 0") from busy
                nonsense = busy.malformed
                now = time.monotonic()
                failed_at = failed_at or now
                # A server may ask for no pause, and do so repeatedly; it gets one immediate repetition.
                pause_s = wait_s if busy.wait_s is None else max(busy.wait_s, wait_s - FIRST_WAIT_S)
                if busy.wait_s is not None and busy.wait_s <= LONGEST_ASKED_WAIT_S:
                    asked_to_wait_s += busy.wait_s
                give_up_at = failed_at + self.settings.retry_budget_s + asked_to_wait_s
                if not (self.health.has_replied or busy.says_so):
                    give_up_at = (self.health.failing_since or now) + self.settings.first_reply_s
                if now + pause_s > give_up_at:
                    raise EngineError(f"{self.url}: {busy}; gave up after {num_sent} requests") from busy
            await asyncio.sleep(pause_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _probe(self) -> None:
        await self._exchange("GET", f"{self._base}/models", timeout_s=PROBE_TIMEOUT_S)

    async def _send(self, data: bytes) -> Completion | None:
        status, headers, text = await self._exchange("POST", self.url, data)
        if status == 200:
            return self._decoded(text)
        if status in _TOO_LONG_STATUSES and _TOO_LONG.search(text.decode(errors="replace")):
            return None
        reason = f"HTTP {status}: {self._shown(text)}"
        if status in _RETRIED_STATUSES or (status >= 500 and status not in _NEVER_STATUSES):
            raise _Busy(reason, wait_s=_retry_after_s(headers.get("Retry-After", "")), says_so=True)
        if status in _REFUSED_KEY:
            reason += f"; the key comes from {self.endpoint.key_file or self.endpoint.key_env or 'nowhere'}"
        raise EngineRefused(f"{self.url}: {reason}")

    async def _exchange(
        self, method: str, url: str, data: bytes | None = None, *, timeout_s: float | None = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body of any answer. Raises _Busy if there is none."""
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        timeout = aiohttp.ClientTimeout(total=timeout_s or self.settings.request_timeout_s)
        try:
            async with self.session.request(
                method, url, data=data, headers=headers, allow_redirects=False, timeout=timeout
            ) as response:
                text = await _read(response)
        except aiohttp.InvalidURL as error:
            raise EngineRefused(f"{url} is no URL: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Busy(f"{type(error).__name__}: {self._without_key(str(error))}".rstrip(": ")) from None
        self.health.reached()
        return response.status, response.headers, text

    def _decoded(self, text: bytes) -> Completion:
        try:
            return read_completion(text)
        except ValueError as error:
            raise _Busy(
                f"the answer is not a chat completion: {error}; it is {self._shown(text)!r}",
                malformed=str(error),
            ) from None

    def _shown(self, text: bytes) -> str:
        """The beginning of an answer, without the key, which some servers quote."""
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
    """The pause in a Retry-After header: seconds, or a date. None if the header cannot be parsed."""
    with suppress(ValueError):
        return max(0.0, float(header))
    with suppress(ValueError, TypeError, OverflowError):
        at = parsedate_to_datetime(header)
        return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    return None
