"""Values of an agent file, as lenient or strict as upstream is: 1.x checks nothing, 2.x converts by pydantic's rules."""

import math
from collections.abc import Mapping
from typing import Any, cast

from pipeline.agent.upstream import Version
from pipeline.errors import RequestError


def number(key: str, value: Any, version: Version, *, whole: bool) -> float | None:
    """The number; None where upstream takes it for no limit. `whole`: upstream 2.x declares it as an int."""
    if version == "2.4":
        value = _converted(key, value, whole=whole)
    elif value is None or not isinstance(value, int | float):
        raise RequestError(f"agent config: {key}: expected a number, got {value!r}")
    return value if math.isfinite(value) and value > 0 else None


def _converted(key: str, value: Any, *, whole: bool) -> int | float:
    try:
        found = float(value.strip() if isinstance(value, str) else value)
    except (TypeError, ValueError) as error:
        raise RequestError(f"agent config: {key}: expected a number, got {value!r}") from error
    if not whole:
        return found
    if not found.is_integer():
        raise RequestError(f"agent config: {key}: expected a whole number, got {value!r}")
    return int(found)


def text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"agent config: {key}: expected text, got {value!r}")
    return value


def texts(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in cast(list[Any], value)):
        raise RequestError(f"agent config: {key}: expected a list of texts, got {value!r}")
    return tuple(cast(list[str], value))


def environment(key: str, value: Any, version: Version) -> dict[str, str]:
    """Variables of the agent's commands. 1.x writes any value as text, 2.x takes text only."""
    if not isinstance(value, Mapping):
        raise RequestError(f"agent config: {key}: expected names and values, got {value!r}")
    found: dict[str, str] = {}
    for name, said in cast(Mapping[Any, Any], value).items():
        if not isinstance(name, str) or (version == "2.4" and not isinstance(said, str)):
            raise RequestError(f"agent config: {key}.{name}: expected text, got {said!r}; put it in quotes")
        found[name] = f"{said}"
    return found
