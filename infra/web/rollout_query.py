"""Which rollouts a request for the table means, in which order, and what is searched in their bodies."""

import contextlib
import fnmatch
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.web.rollout_index import RolloutIndex
from infra.web.rollout_row import COLUMNS, RolloutRow
from pipeline.message import MalformedMessage
from pipeline.rollout_store import record, segment
from pipeline.trajectory import Trajectory

PAGE_SIZE, MAX_PAGE_SIZE = 50, 500
SEARCH_S = 2.0  # so long bodies are searched for a text
NEWEST_FIRST = "-finished_at"
_RANGES = {"version": "version_first", "turns": "num_turns", "tokens": "sampled_tokens", "lag": "lag"}
"""Parameters that are one number or a range, and the columns that they narrow."""

_PARAMETERS = frozenset(
    ("task", "reward", "outcome", *_RANGES, "purpose", "fate", "group", "text", "sort", "page", "page_size")
)

Test = Callable[[RolloutRow], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutQuery:
    """The parameters of a request for the table, checked."""

    tests: tuple[Test, ...]
    text: str
    sort: str
    page: int
    page_size: int

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "RolloutQuery":
        """Raises ValueError naming the parameter that is wrong."""
        unknown = sorted(set(given) - _PARAMETERS)
        if unknown:
            raise ValueError(f"{unknown[0]}: no such parameter; there are {', '.join(sorted(_PARAMETERS))}")
        sort = given.get("sort") or NEWEST_FIRST
        if sort.removeprefix("-") not in COLUMNS:
            raise ValueError(f"sort: no column {sort.removeprefix('-')!r}; there are {', '.join(COLUMNS)}")
        return cls(
            tests=tuple(_tests(given)),
            text=given.get("text", ""),
            sort=sort,
            page=_whole_number(given, "page", default=0, least=0, most=10**9),
            page_size=_whole_number(given, "page_size", default=PAGE_SIZE, least=1, most=MAX_PAGE_SIZE),
        )


class SortedRollouts:
    """The rows of one index in the order that was last wanted: sorting takes longer than filtering."""

    def __init__(self) -> None:
        self._order: tuple[str, int] = ("", -1)
        self._sorted: list[RolloutRow] = []

    def page(self, index: RolloutIndex, query: RolloutQuery) -> dict[str, Any]:
        """The reply to a request."""
        began_at = time.perf_counter()
        order = (query.sort, index.changes)
        if order != self._order:
            self._sorted, self._order = _in_order(index.rows.values(), query.sort), order
        found = self._sorted
        for test in query.tests:
            found = list(filter(test, found))
        num_searched, is_complete = 0, True
        if query.text:
            found, num_searched, is_complete = _search(index, found, query.text)
        first = query.page * query.page_size
        return {
            "total": len(found),
            "num_rollouts": len(index.rows),
            "page": query.page,
            "page_size": query.page_size,
            "rows": found[first : first + query.page_size],
            "took_ms": round(1000 * (time.perf_counter() - began_at), 1),
            "text_searched": num_searched,
            "text_complete": is_complete,
        }


def _in_order(rows: Iterable[RolloutRow], sort: str) -> list[RolloutRow]:
    """By one column; rows without a value come last in either direction."""
    key, all_rows = operator.attrgetter(sort.removeprefix("-")), list(rows)
    known = [row for row in all_rows if key(row) is not None]
    known.sort(key=key, reverse=sort.startswith("-"))
    return known + [row for row in all_rows if key(row) is None]


def _tests(given: Mapping[str, str]) -> Iterator[Test]:
    """One for each parameter that narrows the table."""
    for parameter, column in (("task", "task_id"), ("outcome", "outcome")):
        if given.get(parameter):
            yield _like(given[parameter], operator.attrgetter(column))
    for parameter, column in (("purpose", "purpose"), ("fate", "fate"), ("group", "group_id")):
        if given.get(parameter):
            yield _equal(given[parameter], operator.attrgetter(column))
    if given.get("reward"):
        yield _equal(_reward(given["reward"]), operator.attrgetter("reward"))
    for parameter, column in _RANGES.items():
        if given.get(parameter):
            yield _within(*_range(parameter, given[parameter]), operator.attrgetter(column))


def _like(pattern: str, value: Callable[[RolloutRow], str]) -> Test:
    """`*` is any text; without one the pattern is a part of the value."""
    is_whole = "*" in pattern
    wanted = fnmatch.translate(_only_stars(pattern)) if is_whole else re.escape(pattern)
    expression = re.compile(wanted, re.IGNORECASE | re.DOTALL)
    matches = expression.match if is_whole else expression.search
    verdicts: dict[str, bool] = {}  # few values, many rows

    def test(row: RolloutRow) -> bool:
        text = value(row)
        if text not in verdicts:
            verdicts[text] = matches(text) is not None
        return verdicts[text]

    return test


def _only_stars(pattern: str) -> str:
    """The pattern for `fnmatch`, in which nothing but `*` is special."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


def _equal(wanted: object, value: Callable[[RolloutRow], object]) -> Test:
    return lambda row: value(row) == wanted


def _within(first: int, last: int, value: Callable[[RolloutRow], int | None]) -> Test:
    def test(row: RolloutRow) -> bool:
        found = value(row)
        return found is not None and first <= found <= last

    return test


def _reward(text: str) -> float | None:
    try:
        return None if text == "none" else float(text)
    except ValueError as error:
        raise ValueError(f"reward: {text!r} is not a number; give one such as 0 or 1, or none") from error


def _range(parameter: str, text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15})?)?", text)
    if found is None:
        raise ValueError(
            f"{parameter}: {text!r} is not a number; give one such as 7, or a range such as 3-7 or 3-"
        )
    return int(found[1]), int(found[2] or (10**15 if "-" in text else found[1]))


def _whole_number(given: Mapping[str, str], name: str, *, default: int, least: int, most: int) -> int:
    text = given.get(name) or str(default)
    if not re.fullmatch(r"[0-9]{1,10}", text) or not least <= int(text) <= most:
        raise ValueError(f"{name}: {text!r} is not a whole number from {least} to {most}")
    return int(text)


def _search(index: RolloutIndex, rows: Sequence[RolloutRow], text: str) -> tuple[list[RolloutRow], int, bool]:
    """The rows in whose turns the text is, how many were read, and whether that were all."""
    wanted, give_up_at = text.casefold(), time.monotonic() + SEARCH_S
    found: list[RolloutRow] = []
    searched = 0
    for row in rows:
        trajectory = _trajectory(index, row.request_id)
        if trajectory is not None and any(wanted in piece.casefold() for piece in _texts_of(trajectory)):
            found.append(row)
        searched += trajectory is not None
        if time.monotonic() > give_up_at:
            return found, searched, row is rows[-1]
    return found, searched, True


def _trajectory(index: RolloutIndex, request_id: str) -> Trajectory | None:
    """None if no store has it, or its record cannot be read."""
    place = index.place_of(request_id)
    if place is None:
        return None
    with contextlib.suppress(OSError, MalformedMessage), place[0].open("rb") as file:
        entry = segment.entry_at(file, place[1])
        body = None if entry is None else segment.read_body(file, entry)
        return None if body is None else record.unpack_body(body).trajectory
    return None


def _texts_of(trajectory: Trajectory) -> Iterator[str]:
    """What was shown, said, run and printed."""
    for turn in trajectory.turns:
        yield turn.text
        yield from (message.content for message in turn.told)
        for action in turn.actions:
            yield action.command
            if action.observation is not None:
                yield action.observation.output
