"""Tool calls whose arguments are elements of text: Qwen3-Coder, Seed-OSS, GLM, MiniMax. Every value is taken as text."""

import json
from dataclasses import dataclass, replace

from pipeline.chat import ToolCall
from workers.policy.formats.reading import ReadCalls, skip_space, without


@dataclass(frozen=True, slots=True)
class _Markup:
    call: tuple[str, str]  # in front of the name; behind the last parameter
    name_end: str  # "": the name ends where the first parameter or the end of the call begins
    key: tuple[str, str]
    value: tuple[str, str]
    around: tuple[str, str] = ("", "")  # stand around one or more calls
    trims_newline: bool = False  # one newline at each end of a value belongs to the markup


_QWEN_CODER = _Markup(
    call=("<function=", "</function>"),
    name_end=">",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    around=("<tool_call>", "</tool_call>"),
    trims_newline=True,
)
_SEED = replace(_QWEN_CODER, around=("<seed:tool_call>", "</seed:tool_call>"))
_GLM = _Markup(
    call=("<tool_call>", "</tool_call>"),
    name_end="",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
)
_MINIMAX = _Markup(
    call=('<invoke name="', "</invoke>"),
    name_end='">',
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    around=("<minimax:tool_call>", "</minimax:tool_call>"),
    trims_newline=True,
)


def qwen_coder_calls(text: str) -> ReadCalls:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""
    return _calls(text, _QWEN_CODER)


def seed_calls(text: str) -> ReadCalls:
    """As Qwen3-Coder's, between `<seed:tool_call>` and its end."""
    return _calls(text, _SEED)


def glm_calls(text: str) -> ReadCalls:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""
    return _calls(text, _GLM)


def minimax_calls(text: str) -> ReadCalls:
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>`."""
    return _calls(text, _MINIMAX)


def _calls(text: str, markup: _Markup) -> ReadCalls:
    calls: list[ToolCall] = []
    spans: list[tuple[int, int]] = []
    at = text.find(markup.call[0])
    while at >= 0:
        call, end = _call(text, at + len(markup.call[0]), markup)
        calls.append(call)
        spans.append(_widened(text, at, end, markup.around))
        at = text.find(markup.call[0], end)
    return ReadCalls(without(text, spans), tuple(calls))


def _call(text: str, start: int, markup: _Markup) -> tuple[ToolCall, int]:
    """The call whose name begins at `start`, and where it ends."""
    ends = [markup.name_end] if markup.name_end else [markup.key[0], markup.call[1]]
    name_end = min(_position(text, end, start) for end in ends)
    at = skip_space(text, name_end + len(markup.name_end))
    arguments: dict[str, str] = {}
    while text.startswith(markup.key[0], at):
        key_start = at + len(markup.key[0])
        key_end = _position(text, markup.key[1], key_start)
        value_start = key_end + len(markup.key[1])
        if markup.value[0]:
            value_start = _position(text, markup.value[0], value_start) + len(markup.value[0])
        value, at = _value(text, value_start, markup)
        arguments[text[key_start:key_end].strip()] = value
    at = skip_space(text, at)
    at += len(markup.call[1]) if text.startswith(markup.call[1], at) else 0
    call = ToolCall(name=text[start:name_end].strip(), arguments=json.dumps(arguments, ensure_ascii=False))
    return call, min(at, len(text))


def _value(text: str, start: int, markup: _Markup) -> tuple[str, int]:
    """The value at `start`, and where what follows it begins.

    It ends only where the next parameter or the end of the call follows, because a command may contain the mark of an end.
    """
    mark, end = markup.value[1], text.find(markup.value[1], start)
    while end >= 0:
        after = skip_space(text, end + len(mark))
        if after == len(text) or text.startswith((markup.key[0], markup.call[1]), after):
            break
        end = text.find(mark, end + len(mark))
    else:
        end = after = _position(text, markup.call[1], start)
    value = text[start:end]
    if markup.trims_newline:
        value = value.removeprefix("\n").removesuffix("\n")
    return value, after


def _widened(text: str, start: int, end: int, around: tuple[str, str]) -> tuple[int, int]:
    """The span of a call with the marks around it, if they are there."""
    if around[0]:
        before = text[:start].rstrip()
        start = len(before) - len(around[0]) if before.endswith(around[0]) else start
        after = skip_space(text, end)
        end = after + len(around[1]) if text.startswith(around[1], after) else end
    return start, end


def _position(text: str, mark: str, start: int) -> int:
    found = text.find(mark, start)
    return len(text) if found < 0 else found
