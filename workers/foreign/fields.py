"""Readers of the fields of a request's JSON, which refuse unsuitable values.

Every value that an agent program or a policy sends is either accepted here or refused with one sentence that names it.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from pipeline.chat import storable

Json = Mapping[str, Any]

MOST_NESTED = 128  # objects and lists within each other; Python's own bound depends on who calls
# Number of commas and opening brackets in a body; each may become an object of a hundred bytes
MOST_PARTS = 10**6


class RequestRefused(Exception):
    """A request that is answered with status 400; the message gives the reason, for the program and for readers of its log."""


class ContextFull(RequestRefused):
    """A request whose prompt leaves no room for a reply in the policy's context."""

    def __init__(self, prompt_tokens: int | None, context_tokens: int) -> None:
        super().__init__("the prompt is longer than the context")
        self.prompt_tokens = prompt_tokens  # None: too long to be counted
        self.context_tokens = context_tokens


def read_json(body: bytes) -> Json:
    """The object in a request's body. Halves of surrogate pairs, which programs make when they cut a text, become question marks."""
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_PARTS:
        raise RequestRefused("the body has too many parts")
    try:
        tree = json_value(body.decode(errors="replace"))
    except ValueError as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error
    return as_object(tree, "the body")


def json_value(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for other text, and for values that Python can read but not print again: `NaN`, numbers
    outside the range of floats, deep nesting.
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level: list[Any] = [value]
    for _ in range(MOST_NESTED):
        level = [one for outer in level for one in _inner(outer)]
    if level:
        raise ValueError("it is nested too deeply")
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:80]} is not a number")
    return number


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast(dict[str, Any], value).values()
    return cast(list[Any], value) if isinstance(value, list) else ()


def as_object(value: Any, where: str) -> Json:
    if not isinstance(value, Mapping):
        raise RequestRefused(f"{where} is not an object")
    return cast(Json, value)


def text_in(fields: Json, name: str) -> str:
    """The field, which is a string; "" if it is null or absent."""
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestRefused(f"{name} is not a string")
    return storable(value)


def flag_in(fields: Json, name: str) -> bool:
    """The field, which is a boolean; False if it is null or absent."""
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise RequestRefused(f"{name} is neither true nor false")
    return value is True


def objects_in(fields: Json, name: str) -> list[Json]:
    """The field, which is a list of objects; empty if it is null or absent."""
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestRefused(f"{name} is not a list")
    return [as_object(one, f"an entry of {name}") for one in cast(Sequence[Any], value)]


def limit_in(fields: Json, *names: str) -> int | None:
    """The first of these numbers of tokens that is present; None if none is."""
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestRefused(f"{name} is not a number of tokens")
        return value
    return None


def content_in(fields: Json, name: str, kinds: frozenset[str]) -> str:
    """The text of a content: a string, or a list of parts whose texts are joined. Parts of types other than `kinds` are refused."""
    value = fields.get(name)
    if not isinstance(value, list):
        return text_in(fields, name)
    parts = objects_in(fields, name)
    for part in parts:
        if text_in(part, "type") not in kinds:
            raise unknown_content(part)
    return "".join(text_in(part, "text") for part in parts)


def unknown_content(part: Json) -> RequestRefused:
    return RequestRefused(
        f"content of the type {text_in(part, 'type')[:80]!r} is not supported: the policy reads text only"
    )


def printed(value: Any) -> str:
    """JSON text in which letters are not escaped."""
    return storable(json.dumps(value, ensure_ascii=False))
