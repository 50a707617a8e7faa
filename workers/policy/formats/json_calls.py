"""Tool calls whose arguments are JSON: Hermes and Qwen, Llama 3, Mistral, DeepSeek, Kimi K2."""

import re

from pipeline.chat import ToolCall
from workers.policy.formats.reading import (
    ReadCalls,
    arguments_text,
    call_of,
    json_value,
    malformed,
    skip_space,
    without,
)

_DEEPSEEK_BEGIN, _DEEPSEEK_END = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    "<\uff5ctool\u2581call\u2581end\uff5c>",
)
_DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_DEEPSEEK_SECTION = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_KIMI_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]([^\[\]]*))?(?:\[ARGS\]|(?=\s*\{))")


def hermes_calls(text: str) -> ReadCalls:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as often as there are calls."""
    calls: list[ToolCall] = []
    spans: list[tuple[int, int]] = []
    begin, end = "<tool_call>", "</tool_call>"
    at = text.find(begin)
    while at >= 0:
        after = at + len(begin)
        try:
            value, stop = json_value(text, after)
            calls.append(call_of(value))
        except ValueError:
            stop = _position(text, end, after)
            calls.append(malformed(text[after:stop]))
        stop = skip_space(text, stop)
        stop += len(end) if text.startswith(end, stop) else 0
        spans.append((at, stop))
        at = text.find(begin, stop)
    return ReadCalls(without(text, spans), tuple(calls))


def llama_calls(text: str) -> ReadCalls:
    """`<|python_tag|>{"name": …, "parameters": {…}}; {…}`; the tag may be missing where the reply is nothing but calls."""
    tag = "<|python_tag|>"
    words, found, rest = text.partition(tag)
    if not found:
        if not text.lstrip().startswith("{"):
            return ReadCalls(text, ())
        words, rest = "", text
    calls: list[ToolCall] = []
    at = 0
    while (at := skip_space(rest, at)) < len(rest):
        try:
            value, at = json_value(rest, at)
        except ValueError:
            if calls:
                words += rest[at:]
            else:
                calls.append(malformed(rest[at:]))
            break
        calls.append(call_of(value))
        at = skip_space(rest, at)
        at += rest.startswith(";", at)
    return ReadCalls(words.strip(), tuple(calls))


def mistral_calls(text: str) -> ReadCalls:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}` for each call."""
    begin = "[TOOL_CALLS]"
    words, found, rest = text.partition(begin)
    if not found:
        return ReadCalls(text, ())
    calls: list[ToolCall] = []
    if rest.lstrip().startswith("["):
        try:
            value, _ = json_value(rest, 0)
            calls = [call_of(one) for one in value]
        except ValueError:
            calls = [malformed(rest)]
        return ReadCalls(words.strip(), tuple(calls))
    at = 0
    while named := _MISTRAL_NAMED.match(rest, at):
        try:
            value, at = json_value(rest, named.end())
        except ValueError:
            calls.append(ToolCall(name=named[1], arguments=rest[named.end() :].strip(), id=named[2] or ""))
            break
        calls.append(ToolCall(name=named[1], arguments=arguments_text(value), id=named[2] or ""))
        at = skip_space(rest, at)
        at += len(begin) if rest.startswith(begin, at) else 0
    return ReadCalls(words.strip(), tuple(calls) or (malformed(rest),))


def deepseek_calls(text: str) -> ReadCalls:
    """DeepSeek V3 (a type, the name, and JSON between fences) and V3.1 (the name and JSON)."""
    words, found, rest = text.partition(_DEEPSEEK_SECTION[0])
    if not found:
        return ReadCalls(text, ())
    calls: list[ToolCall] = []
    for one in rest.split(_DEEPSEEK_BEGIN)[1:]:
        head, _, tail = one.partition(_DEEPSEEK_END)[0].partition(_DEEPSEEK_SEPARATOR)
        if head.strip() == "function" and "```json" in tail:
            head, _, tail = tail.partition("```json")
            tail = tail.rpartition("```")[0] or tail
        calls.append(ToolCall(name=head.strip(), arguments=_json_text(tail)))
    return ReadCalls(words.strip(), tuple(calls))


def kimi_calls(text: str) -> ReadCalls:
    """A section of calls, each with an id such as `functions.bash:0` and JSON. The id is what results refer to."""
    words, found, rest = text.partition(_KIMI_SECTION[0])
    if not found:
        return ReadCalls(text, ())
    calls: list[ToolCall] = []
    for one in rest.partition(_KIMI_SECTION[1])[0].split(_KIMI_BEGIN)[1:]:
        identity, _, arguments = one.partition(_KIMI_END)[0].partition(_KIMI_ARGUMENTS)
        name = identity.strip().removeprefix("functions.").rpartition(":")[0] or identity.strip()
        calls.append(ToolCall(name=name, arguments=_json_text(arguments), id=identity.strip()))
    return ReadCalls(words.strip(), tuple(calls))


def _json_text(text: str) -> str:
    """The JSON value in `text`, written as arguments; `text` itself if there is none."""
    try:
        return arguments_text(json_value(text, 0)[0])
    except ValueError:
        return text.strip()


def _position(text: str, mark: str, start: int) -> int:
    found = text.find(mark, start)
    return len(text) if found < 0 else found
