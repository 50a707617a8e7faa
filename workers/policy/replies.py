"""A policy that replays given replies without a tokenizer: its turns contain messages and no tokens.

Its purposes are trying a prompt, reproducing an episode from its transcript, and tests. A file of replies is a JSON list; each element is a
text or a message `{"content": ..., "tool_calls": [...]}`. A trajectory file, an object with `messages`, provides the replies in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from pipeline.agent.config import load_agent
from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import ChatMessage, ToolCall
from pipeline.errors import EngineError
from pipeline.request import Claim
from pipeline.trajectory import Cut, Turn
from workers.policy.formats import ThoughtSplitter


@dataclass(frozen=True, slots=True)
class GivenReply:
    """A reply as a message, and why it ended, as the server named it; "" if unknown."""

    message: ChatMessage
    finish_reason: str = ""


class RepliesPolicies:
    """Opens conversations that all reply `replies`, in order. Past their end a conversation raises EngineError."""

    def __init__(self, replies: Sequence[GivenReply]) -> None:
        self._replies = tuple(replies)

    async def open(self, claim: Claim) -> "Replay":
        split = ThoughtSplitter(load_agent(claim.request.agent_config).exact)
        return Replay([replace(reply, message=split(reply.message)) for reply in self._replies])

    async def voice(self, claim: Claim) -> "ReplayVoice":
        """The same replies for an agent program. They answer its requests in the order of arrival."""
        split = ThoughtSplitter(exact=False)
        return ReplayVoice([replace(reply, message=split(reply.message)) for reply in self._replies])


@dataclass(frozen=True, slots=True)
class ReplayVoice:
    """Implements `workers.policy.speaker.MessageVoice`. Its context is never full."""

    replies: Sequence[GivenReply]

    async def reply(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        *,
        number: int,
        max_new_tokens: int | None,
    ) -> Turn:
        return _turn_of(self.replies, number)


@dataclass(slots=True)
class Replay:
    """One conversation: implements `workers.agent.loop.Policy`. Its context is never full."""

    replies: Sequence[GivenReply]
    num_given: int = field(default=0, init=False)

    async def begin(self, opening: Sequence[ChatMessage]) -> Turn:
        return self._next(opening)

    async def answer(self, messages: Sequence[ChatMessage], forget_reply: bool = False) -> Turn:
        return self._next(messages, Cut(forgot_reply=True) if forget_reply else None)

    def _next(self, told: Sequence[ChatMessage], cut: Cut | None = None) -> Turn:
        turn = _turn_of(self.replies, self.num_given)
        self.num_given += 1
        return msgspec.structs.replace(turn, told=tuple(told), cut=cut)


def _turn_of(replies: Sequence[GivenReply], number: int) -> Turn:
    """Raises EngineError past the end."""
    if number >= len(replies):
        raise EngineError(f"the given replies end after {len(replies)}, and the episode has not ended")
    reply = replies[number]
    return Turn(
        kept_tokens=0,
        fed=b"",
        sampled=b"",
        logprobs=b"",
        versions=(),
        stop="length" if reply.finish_reason == "length" else "stop",
        text=reply.message.content,
        reply=reply.message,
        finish_reason=reply.finish_reason,
    )


class _GivenFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _GivenCall(msgspec.Struct, frozen=True):
    """A tool call in the format of OpenAI's interface, or a short form: the function itself, or only the command."""

    function: _GivenFunction | None = None
    name: str = BASH_TOOL["function"]["name"]
    arguments: str | dict[str, Any] | None = None
    command: str | None = None
    id: str = ""

    @property
    def call(self) -> ToolCall:
        name, arguments = self.name, self.arguments
        if self.function is not None:
            name, arguments = self.function.name, self.function.arguments
        elif arguments is None:
            arguments = {} if self.command is None else {"command": self.command}
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        return ToolCall(name=name, arguments=text, id=self.id)


class _GivenMessage(msgspec.Struct, frozen=True):
    content: str | None = None
    tool_calls: list[_GivenCall] | None = None
    role: str = "assistant"
    reasoning_content: str | None = None
    finish_reason: str = ""


class _Transcript(msgspec.Struct, frozen=True):
    messages: list[_GivenMessage]


def read_replies(path: Path) -> tuple[GivenReply, ...]:
    """The replies of a file. Raises OSError; ValueError naming the element that is not a reply."""
    return given_replies(path.read_bytes(), where=str(path))


def given_replies(data: bytes, *, where: str) -> tuple[GivenReply, ...]:
    """The replies in JSON from the source `where`. Raises ValueError naming the element that is not a reply."""
    try:
        found = msgspec.json.decode(data, type=list[str | _GivenMessage] | _Transcript)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{where}: {error}; give a JSON list of replies, each a text or an object with content and tool_calls"
        ) from error
    if isinstance(found, _Transcript):
        found = [message for message in found.messages if message.role == "assistant"]
    replies = tuple(_given(one) for one in found)
    if not replies:
        raise ValueError(f"{where} holds no reply")
    return replies


def _given(one: str | _GivenMessage) -> GivenReply:
    if isinstance(one, str):
        return GivenReply(ChatMessage("assistant", one))
    calls = tuple(call.call for call in one.tool_calls or ())
    message = ChatMessage(
        "assistant", one.content or "", reasoning=one.reasoning_content or "", tool_calls=calls
    )
    return GivenReply(message, one.finish_reason)
