"""A sampled reply as a message: thoughts, content and tool calls apart."""

from collections.abc import Callable

from pipeline.chat import ChatMessage, ToolCall
from pipeline.reply_format import THOUGHT_MARKS, CallFormat, ReplyFormat
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded
from workers.policy.formats.harmony import read_harmony
from workers.policy.formats.json_calls import (
    deepseek_calls,
    hermes_calls,
    kimi_calls,
    llama_calls,
    mistral_calls,
)
from workers.policy.formats.python_calls import python_calls
from workers.policy.formats.reading import ReadCalls
from workers.policy.formats.xml_calls import glm_calls, minimax_calls, qwen_coder_calls, seed_calls

READ_CPU_S = 2  # for one reply; milliseconds are usual

_CALLS: dict[CallFormat, Callable[[str], ReadCalls]] = {
    "hermes": hermes_calls,
    "qwen3_coder": qwen_coder_calls,
    "seed": seed_calls,
    "glm": glm_calls,
    "llama3": llama_calls,
    "mistral": mistral_calls,
    "deepseek": deepseek_calls,
    "kimi_k2": kimi_calls,
    "minimax": minimax_calls,
    "pythonic": python_calls,
}


async def read_reply(text: str, form: ReplyFormat, *, opened: bool, with_calls: bool) -> ChatMessage:
    """`text` taken apart, in a process of its own. `opened`: the prompt had begun the thoughts; `with_calls`: commands are tool calls.

    A reply that exceeds the limits is all content, in which no agent finds a call.
    """
    try:
        return await isolation.call(taken_apart, text, form, opened, with_calls, cpu_s=READ_CPU_S)
    except LimitExceeded:
        return ChatMessage("assistant", text)


def taken_apart(text: str, form: ReplyFormat, opened: bool, with_calls: bool) -> ChatMessage:
    """As `read_reply`. Without `with_calls`, whatever looks like a call stays content."""
    if form.thoughts == "harmony":
        return read_harmony(text, with_calls=with_calls)
    reasoning, content = split_thoughts(text, *THOUGHT_MARKS[form.thoughts], opened=opened)
    calls: tuple[ToolCall, ...] = ()
    if with_calls and form.tool_calls in _CALLS:
        content, calls = _CALLS[form.tool_calls](content)
    return ChatMessage("assistant", content, reasoning=reasoning, tool_calls=calls)


def split_thoughts(text: str, begin: str, end: str, *, opened: bool) -> tuple[str, str]:
    """Thoughts and the rest. Thoughts are only at the beginning: behind other words, their marks are text."""
    if not opened:
        bare = text.lstrip()
        if not bare.startswith(begin.rstrip()):
            return "", text
        text = bare.removeprefix(begin.rstrip())
    elif text.lstrip().startswith(begin.rstrip()):  # some models repeat the mark
        text = text.lstrip().removeprefix(begin.rstrip())
    thoughts, _, rest = text.partition(end)
    return thoughts.strip(), rest.lstrip("\n")
