"""Thoughts in the text of a reply that came without token ids: from a server that does not tell them apart, or from a file."""

import re
from dataclasses import dataclass

from msgspec.structs import replace

from pipeline.chat import ChatMessage
from pipeline.reply_format import THOUGHT_MARKS
from workers.policy.formats.replies import split_thoughts

_BEGIN, _END = THOUGHT_MARKS["think"]
_FENCE = "```"
_TAG = re.compile(r"<(/?)(\w*(?:bash|command)\w*)>")  # round a command, in agents that use tags


@dataclass(frozen=True, slots=True)
class ThoughtSplitter:
    """Takes thoughts out of content, unless the agent is `exact`: upstream reads all that a server sends as content."""

    exact: bool

    def __call__(self, reply: ChatMessage) -> ChatMessage:
        if self.exact or reply.reasoning:
            return reply
        reasoning, content = thoughts_and_content(reply.content)
        return replace(reply, reasoning=reasoning, content=content) if content != reply.content else reply


def thoughts_and_content(text: str) -> tuple[str, str]:
    """Nobody knows whether the prompt had begun the thoughts: a closing mark without an opening one ends them, unless it stands in a
    command.
    """
    if text.lstrip().startswith(_BEGIN):
        return split_thoughts(text, _BEGIN, _END, opened=False)
    before, end, rest = text.partition(_END)
    if not end or before.count(_FENCE) % 2 or _in_tag(before):
        return "", text
    return before.strip(), rest.lstrip()


def _in_tag(text: str) -> bool:
    """Whether the last tag round a command is an opening one."""
    slashes = [slash for slash, _ in _TAG.findall(text)]
    return bool(slashes) and not slashes[-1]
