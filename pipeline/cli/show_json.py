"""What `show --json` prints: everything that is known, with token arrays as lists and other bytes as text."""

from collections.abc import Iterable
from typing import Any, cast

import msgspec

from pipeline.cli.finding import FoundJudging, FoundRollout
from pipeline.message import unpack_float32s, unpack_int32s


def rollout(found: FoundRollout) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(found, builtin_types=(bytes,))
    shown["trajectory"] = shown.pop("result")
    for turn in (shown["trajectory"] or {"turns": ()})["turns"]:
        turn["fed"], turn["sampled"] = list(unpack_int32s(turn["fed"])), list(unpack_int32s(turn["sampled"]))
        turn["logprobs"] = list(unpack_float32s(turn["logprobs"]))
    return _as_text(shown)


def judging(found: FoundJudging) -> dict[str, Any]:
    shown = plain(found)
    shown["judgement"] = shown.pop("result")
    return shown


def plain(value: object) -> Any:
    """A message as JSON holds it."""
    return _as_text(msgspec.to_builtins(value, builtin_types=(bytes,)))


def _as_text(value: Any) -> Any:
    match value:
        case bytes():
            return value.decode(errors="replace")
        case dict():
            return {name: _as_text(inner) for name, inner in cast(dict[str, Any], value).items()}
        case list() | tuple():
            return [_as_text(inner) for inner in cast(Iterable[Any], value)]
        case _:
            return value
