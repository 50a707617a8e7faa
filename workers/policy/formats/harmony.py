"""Replies in harmony, the format of gpt-oss: messages in channels. The prompt has ended with `<|start|>assistant`."""

import re
from typing import Literal

from pipeline.chat import ChatMessage, ToolCall
from workers.policy.formats.reading import storable

_END = re.compile(r"<\|(?:end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


def read_harmony(text: str, *, with_calls: bool) -> ChatMessage:
    """Analysis is thoughts, messages to a tool are its calls, everything else is content."""
    parts: dict[Literal["thoughts", "content"], list[str]] = {"thoughts": [], "content": []}
    calls: list[ToolCall] = []
    for header, body in _messages(text):
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] != "assistant":
            name = recipient[1].removeprefix("functions.")
            calls.append(ToolCall(name=storable(name), arguments=body.strip()))
        elif channel is not None and channel[1] == "analysis":
            parts["thoughts"].append(body)
        else:
            parts["content"].append(body)
    return ChatMessage(
        "assistant",
        "\n".join(parts["content"]),
        reasoning="\n".join(parts["thoughts"]),
        tool_calls=tuple(calls) if with_calls else (),
    )


def _messages(text: str) -> list[tuple[str, str]]:
    """The header and the body of each message. Text that is in no message is one without a header."""
    found: list[tuple[str, str]] = []
    for piece in _END.split(text):
        header, separator, body = piece.partition("<|message|>")
        if separator:
            found.append((header, body))
        elif piece.strip():
            found.append(("", piece))
    return found
