"""Messages of a chat, as chat templates, agents' prompts and artefacts use them."""

from typing import Literal

from msgspec.structs import replace

from pipeline.message import Message

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(Message, frozen=True, kw_only=True):
    """A call of a tool in an assistant's message."""

    name: str
    arguments: str  # the policy's own text; a JSON object if the call is well-formed
    id: str = ""  # what a tool's message refers to; "" where the format has none


class ChatMessage(Message, frozen=True):
    """One message. An assistant's `content` is without its thoughts and tool calls."""

    role: Role
    content: str
    reasoning: str = ""  # an assistant's thoughts
    tool_calls: tuple[ToolCall, ...] = ()  # an assistant's calls, in order
    tool_call_id: str = ""  # in a tool's message: the id of the call that it answers


def storable(text: str) -> str:
    """`text` with a question mark for each half of a surrogate pair, which an escape in JSON can make and UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def storable_message(message: ChatMessage) -> ChatMessage:
    """`message` with every text of it storable."""
    calls = tuple(
        ToolCall(name=storable(call.name), arguments=storable(call.arguments), id=storable(call.id))
        for call in message.tool_calls
    )
    return replace(
        message,
        content=storable(message.content),
        reasoning=storable(message.reasoning),
        tool_calls=calls,
        tool_call_id=storable(message.tool_call_id),
    )
