"""What the parsers of tool calls have in common: JSON values inside text."""

import json
import re
from typing import Any, NamedTuple, cast

from pipeline.chat import ToolCall

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')


class ReadCalls(NamedTuple):
    """A reply's text without its tool calls, and these in order."""

    content: str
    calls: tuple[ToolCall, ...]


def json_value(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start`, behind any whitespace, and where it ends. Raises ValueError if there is none."""
    return _DECODER.raw_decode(text, skip_space(text, start))


def skip_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start


def call_of(value: Any) -> ToolCall:
    """The call that an object with a name and arguments is. What lacks them is a call that no agent can carry out."""
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    arguments = fields.get("arguments", fields.get("parameters", {} if fields else value))
    name, identity = fields.get("name"), fields.get("id")
    return ToolCall(
        name=storable(name) if isinstance(name, str) else "",
        arguments=arguments_text(arguments),
        id=storable(identity) if isinstance(identity, str) else "",
    )


def malformed(text: str) -> ToolCall:
    """A call whose JSON cannot be read: its arguments are what the policy wrote."""
    name = _NAME.search(text)
    return ToolCall(name=name[1] if name else "", arguments=text.strip())


def arguments_text(arguments: Any) -> str:
    """JSON text of a call's arguments. Some models write it as a JSON string already."""
    return storable(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def storable(text: str) -> str:
    """`text` without halves of surrogate pairs, which JSON escapes can make and UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def without(text: str, spans: list[tuple[int, int]]) -> str:
    """`text` without the parts in `spans`, and without the whitespace that stood around them."""
    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(text)]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    return "\n".join(stripped for piece in pieces if (stripped := piece.strip())) if spans else text
