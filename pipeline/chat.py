"""Messages of a chat, as chat templates, agents' prompts and artefacts know them."""

from typing import Literal

from pipeline.message import Message

Role = Literal["system", "user", "assistant", "tool"]


class ToolCall(Message, frozen=True, kw_only=True):
    """A call of a tool in an assistant's message."""

    name: str
    arguments: str  # as the policy wrote them; a JSON object if the call is well-formed
    id: str = ""  # what a tool's message refers to; "" where the format has none


class ChatMessage(Message, frozen=True):
    """One message. An assistant's `content` is without its thoughts and tool calls."""

    role: Role
    content: str
    reasoning: str = ""  # an assistant's thoughts
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant, in order
    tool_call_id: str = ""  # of a tool's message: the call that it is the result of
