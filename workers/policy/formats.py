"""Parses a sampled reply into thoughts, content and tool calls, in the format of each family of models.

`read_reply` is the only entry point. A parser of tool calls is a function from a text to the text without its calls, and the calls. All of
them read text from a policy, so they run in a process with limits. A reply that came without token ids, from a server that does not
separate thoughts or from a file, is split by `ThoughtSplitter`.
"""

import ast
import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from msgspec.structs import replace

from pipeline.chat import THOUGHT_MARKS, CallFormat, ChatMessage, ReplyFormat, ToolCall, storable_message
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')


class ReadCalls(NamedTuple):
    """A reply's text without its tool calls, and the calls in order."""

    content: str
    calls: tuple[ToolCall, ...]


def json_value(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start`, after any whitespace, and where it ends. Raises ValueError if there is none."""
    return _DECODER.raw_decode(text, skip_space(text, start))


def skip_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start


def call_of(value: Any) -> ToolCall:
    """The call in an object with a name and arguments. An object that lacks them becomes a call that no agent can carry out."""
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    arguments = fields.get("arguments", fields.get("parameters", {} if fields else value))
    name, identity = fields.get("name"), fields.get("id")
    return ToolCall(
        name=name if isinstance(name, str) else "",
        arguments=arguments_text(arguments),
        id=identity if isinstance(identity, str) else "",
    )


def malformed(text: str) -> ToolCall:
    """A call whose JSON cannot be parsed: its arguments are the policy's text."""
    name = _NAME.search(text)
    return ToolCall(name=name[1] if name else "", arguments=text.strip())


def arguments_text(arguments: Any) -> str:
    """JSON text of a call's arguments. Some models write it as a JSON string already."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def without(text: str, spans: list[tuple[int, int]]) -> str:
    """`text` without the parts in `spans`, and without the whitespace around them."""
    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(text)]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return "\n".join(stripped for piece in pieces if (stripped := piece.strip())) if spans else text


_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


def read_harmony(text: str, *, with_calls: bool) -> ChatMessage:
    """Reads a reply in the Harmony format: the analysis channel holds thoughts, messages to a tool are calls, the rest is content."""
    parts: dict[Literal["thoughts", "content"], list[str]] = {"thoughts": [], "content": []}
    calls: list[ToolCall] = []
    for header, body in _harmony_messages(text):
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] != "assistant":
            calls.append(ToolCall(name=recipient[1].removeprefix("functions."), arguments=body.strip()))
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


def _harmony_messages(text: str) -> list[tuple[str, str]]:
    """The header and the body of each message. Text outside of all messages becomes one without a header."""
    found: list[tuple[str, str]] = []
    for piece in _HARMONY_END.split(text):
        header, separator, body = piece.partition("<|message|>")
        if separator:
            found.append((header, body))
        elif piece.strip():
            found.append(("", piece))
    return found


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
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once for each call."""
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
    """`<|python_tag|>{"name": …, "parameters": {…}}; {…}`; the tag may be missing if the reply consists only of calls."""
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
    """The JSON value at the start of `text`, as the text of a call's arguments; `text` itself if it begins with none."""
    try:
        return arguments_text(json_value(text, 0)[0])
    except ValueError:
        return text.strip()


def _position(text: str, mark: str, start: int) -> int:
    found = text.find(mark, start)
    return len(text) if found < 0 else found


_PYTHON_BEGIN, _PYTHON_END = "<|tool_call_start|>", "<|tool_call_end|>"


def python_calls(text: str) -> ReadCalls:
    """Reads calls in Python syntax. A call must have only keyword arguments with literal values; any other is malformed."""
    words, found, rest = text.partition(_PYTHON_BEGIN)
    if not found:
        return ReadCalls(text, ())
    source, _, trailing = rest.partition(_PYTHON_END)
    content = "\n".join(piece for piece in (words.strip(), trailing.strip()) if piece)
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        elements = tree.elts if isinstance(tree, ast.List) else [tree]
        return ReadCalls(content, tuple(_python_call(element) for element in elements))
    except (SyntaxError, ValueError):
        return ReadCalls(content, (malformed(source),))


def _python_call(element: ast.expr) -> ToolCall:
    """The call. Raises ValueError for anything but a call of a name with literal keyword arguments."""
    if not isinstance(element, ast.Call) or not isinstance(element.func, ast.Name) or element.args:
        raise ValueError("not a call with keyword arguments")
    arguments = {one.arg: ast.literal_eval(one.value) for one in element.keywords if one.arg is not None}
    try:
        return ToolCall(name=element.func.id, arguments=arguments_text(arguments))
    except TypeError as error:  # a literal that JSON cannot represent, such as bytes
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Markup:
    call: tuple[str, str]  # the delimiters before the name and after the last parameter
    name_end: str  # "": the name ends where the first parameter or the end of the call begins
    key: tuple[str, str]
    value: tuple[str, str]
    around: tuple[str, str] = ("", "")  # delimiters around one or more calls
    trims_newline: bool = False  # whether one newline at each end of a value belongs to the markup


_QWEN_CODER = _Markup(
    call=("<function=", "</function>"),
    name_end=">",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    around=("<tool_call>", "</tool_call>"),
    trims_newline=True,
)
_SEED = dataclasses.replace(_QWEN_CODER, around=("<seed:tool_call>", "</seed:tool_call>"))
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
    return _markup_calls(text, _QWEN_CODER)


def seed_calls(text: str) -> ReadCalls:
    """Calls as Qwen3-Coder's, between `<seed:tool_call>` and its end."""
    return _markup_calls(text, _SEED)


def glm_calls(text: str) -> ReadCalls:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""
    return _markup_calls(text, _GLM)


def minimax_calls(text: str) -> ReadCalls:
    """`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></minimax:tool_call>`."""
    return _markup_calls(text, _MINIMAX)


def _markup_calls(text: str, markup: _Markup) -> ReadCalls:
    calls: list[ToolCall] = []
    spans: list[tuple[int, int]] = []
    at = text.find(markup.call[0])
    while at >= 0:
        call, end = _markup_call(text, at + len(markup.call[0]), markup)
        calls.append(call)
        spans.append(_widened(text, at, end, markup.around))
        at = text.find(markup.call[0], end)
    return ReadCalls(without(text, spans), tuple(calls))


def _markup_call(text: str, start: int, markup: _Markup) -> tuple[ToolCall, int]:
    """The call whose name begins at `start`, and the offset at which it ends."""
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
        value, at = _markup_value(text, value_start, markup)
        arguments[text[key_start:key_end].strip()] = value
    at = skip_space(text, at)
    at += len(markup.call[1]) if text.startswith(markup.call[1], at) else 0
    call = ToolCall(name=text[start:name_end].strip(), arguments=json.dumps(arguments, ensure_ascii=False))
    return call, min(at, len(text))


def _markup_value(text: str, start: int, markup: _Markup) -> tuple[str, int]:
    """The value at `start`, and the offset of the text after it.

    It ends only where the next parameter or the end of the call follows, because a command may contain an end delimiter.
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
    """The span of a call including the delimiters around it, if there are any."""
    if around[0]:
        before = text[:start].rstrip()
        start = len(before) - len(around[0]) if before.endswith(around[0]) else start
        after = skip_space(text, end)
        end = after + len(around[1]) if text.startswith(around[1], after) else end
    return start, end


READ_CPU_S = 2  # limit for one reply; milliseconds are usual

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
    """The parsed `text`; the parsing runs in a separate process. `opened`: the prompt had begun the thoughts; `with_calls`: commands are
    tool calls.

    A reply that exceeds the limits becomes content only, without calls.
    """
    try:
        return await isolation.call(taken_apart, text, form, opened, with_calls, cpu_s=READ_CPU_S)
    except LimitExceeded:
        return ChatMessage("assistant", text)


def taken_apart(text: str, form: ReplyFormat, opened: bool, with_calls: bool) -> ChatMessage:
    """The result of `read_reply`, computed in this process. Without `with_calls`, text that looks like a call stays content."""
    if form.thoughts == "harmony":
        return storable_message(read_harmony(text, with_calls=with_calls))
    reasoning, content = split_thoughts(text, *THOUGHT_MARKS[form.thoughts], opened=opened)
    calls: tuple[ToolCall, ...] = ()
    if with_calls and form.tool_calls in _CALLS:
        content, calls = _CALLS[form.tool_calls](content)
    return storable_message(ChatMessage("assistant", content, reasoning=reasoning, tool_calls=calls))


def split_thoughts(text: str, begin: str, end: str, *, opened: bool) -> tuple[str, str]:
    """Thoughts and the rest. Thoughts are only at the beginning: after other words, their delimiters are text."""
    if not opened:
        bare = text.lstrip()
        if not bare.startswith(begin.rstrip()):
            return "", text
        text = bare.removeprefix(begin.rstrip())
    elif text.lstrip().startswith(begin.rstrip()):  # some models repeat the delimiter
        text = text.lstrip().removeprefix(begin.rstrip())
    thoughts, _, rest = text.partition(end)
    return thoughts.strip(), rest.lstrip("\n")


_THOUGHT_BEGIN, _THOUGHT_END = THOUGHT_MARKS["think"]
_FENCE = "```"
_TAG = re.compile(r"<(/?)(\w*(?:bash|command)\w*)>")  # tags around a command, in agents that use them


@dataclass(frozen=True, slots=True)
class ThoughtSplitter:
    """Removes thoughts from content, unless the agent is `exact`: upstream treats everything that a server sends as content."""

    exact: bool

    def __call__(self, reply: ChatMessage) -> ChatMessage:
        if self.exact or reply.reasoning:
            return reply
        reasoning, content = thoughts_and_content(reply.content)
        return replace(reply, reasoning=reasoning, content=content) if content != reply.content else reply


def thoughts_and_content(text: str) -> tuple[str, str]:
    """Thoughts and content. It is unknown whether the prompt had begun the thoughts, so a closing delimiter without an opening one ends
    them, unless it is in a command.
    """
    if text.lstrip().startswith(_THOUGHT_BEGIN):
        return split_thoughts(text, _THOUGHT_BEGIN, _THOUGHT_END, opened=False)
    before, end, rest = text.partition(_THOUGHT_END)
    if not end or before.count(_FENCE) % 2 or _in_tag(before):
        return "", text
    return before.strip(), rest.lstrip()


def _in_tag(text: str) -> bool:
    """Whether the last command tag in the text is an opening one."""
    slashes = [slash for slash, _ in _TAG.findall(text)]
    return bool(slashes) and not slashes[-1]
