"""The table of a run's rollouts: the rows of all of them, in memory, filtered and ordered as a request asks.

Rows are made of the heads in the run's stores and of its journal. Bodies are not read, except where a request searches in them. A rollout
that is only in a store is not settled yet; one that is only in the journal was withdrawn, or its record was removed when the store exceeded
its budget.
"""

import contextlib
import fnmatch
import functools
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.web.run_journal import COLUMNS, RolloutRow, RunJournal, row_of_head
from pipeline import intervals
from pipeline.journal.reading import size_of
from pipeline.journal.rows import StepRow
from pipeline.message import MalformedMessage
from pipeline.rollout_store import record, segment
from pipeline.rollout_store.reading import DIRECTORY, EVALUATIONS
from pipeline.trajectory import Trajectory, Turn

Place = tuple[Path, int]
"""The segment and the offset of a record."""


class RolloutIndex:
    """The rows of one run, by request id. Only one thread may use it at a time."""

    def __init__(self, run_dir: Path, journal: RunJournal) -> None:
        self.rows: dict[str, RolloutRow] = {}
        self.changes = 0  # grows with each call of `read` that found something
        self._run_dir = run_dir
        self._journal = journal
        self._places: dict[str, Place] = {}
        # Offset read so far and size at that time, by segment
        self._read: dict[Path, tuple[int, int]] = {}
        self._num_episodes = self._num_steps = 0
        self._generation = (0, 0)
        self._trained_by: dict[str, StepRow] = {}  # the step of each request that has no row yet

    def read(self, max_bytes: int) -> int:
        """Reads the new part of the journal, then the new heads, and stops after `max_bytes`. Returns the number of bytes read."""
        num_bytes = self._journal.read(max_bytes)
        generation = (self._journal.episodes.generation, self._journal.steps.generation)
        paths = _segments(self._run_dir)
        if generation != self._generation or not self._read.keys() <= set(paths):
            # A resumed trainer removed rows, or the store removed its oldest segment.
            self._begin_again()
            self._generation = generation
        self._take_steps()
        self._take_episodes()
        for path in paths:
            num_bytes += self._read_heads(path, max_bytes - num_bytes)
        return num_bytes

    @property
    def progress(self) -> tuple[int, int]:
        """The number of bytes of the journal and all segments that were read or skipped, and their total."""
        done, in_all = self._journal.progress
        for path in _segments(self._run_dir):
            end, known_bytes = self._read.get(path, (0, -1))
            size = size_of(path)
            done, in_all = done + (size if size == known_bytes else end), in_all + size
        return done, in_all

    def place_of(self, request_id: str) -> Place | None:
        """The segment and offset of the newest record of a rollout."""
        return self._places.get(request_id)

    def group(self, group_id: str) -> list[RolloutRow]:
        """The rollouts of a group, in the order of its members."""
        found = (row for row in self.rows.values() if row.group_id == group_id)
        return sorted(found, key=lambda row: (row.member, row.finished_at))

    def _begin_again(self) -> None:
        # The journal's row objects are used again, so what this index added to them is reset.
        for row in self._journal.episodes.rows:
            row.is_stored, row.is_dead, row.step, row.lag = False, False, None, None
        self.rows, self._places, self._read, self._trained_by = {}, {}, {}, {}
        self._num_episodes = self._num_steps = 0
        self.changes += 1

    def _read_heads(self, path: Path, max_bytes: int) -> int:
        start, known_bytes = self._read.get(path, (0, -1))
        num_bytes = 0
        if max_bytes <= 0 or size_of(path) == known_bytes:
            return num_bytes
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                for entry in segment.entries(file, start=start):
                    head = entry.stored.head
                    row = self.rows.get(head.request_id)
                    if row is None or row.finished_at < head.finished_at:
                        row = self._put(row_of_head(head), row)
                    row.is_stored, row.is_dead = True, entry.stored.is_dead
                    self._places[row.request_id] = (path, entry.offset)
                    start = entry.offset + entry.frame.num_bytes
                    num_bytes += record.HEADER_BYTES + entry.frame.head_bytes
                    if num_bytes >= max_bytes:
                        size = -1  # no size that a file can have, so the next `read` continues here
                        break
        except FileNotFoundError:
            return num_bytes
        self._read[path] = start, size
        self.changes += 1
        return num_bytes

    def _take_episodes(self) -> None:
        new = self._journal.episodes.rows[self._num_episodes :]
        for row in new:
            before = self.rows.get(row.request_id)
            self._put(row, before)
            if before is not None:
                row.is_stored, row.is_dead = before.is_stored, before.is_dead
        self._num_episodes += len(new)
        self.changes += bool(new)

    def _take_steps(self) -> None:
        """Applies the new steps to the rows. A step's row is written before those of its episodes."""
        new = self._journal.steps.rows[self._num_steps :]
        for step in new:
            for request_id in step.request_ids:
                row = self.rows.get(request_id)
                if row is None:
                    self._trained_by[request_id] = step
                else:
                    _say_trained(row, step)
        self._num_steps += len(new)
        self.changes += bool(new)

    def _put(self, row: RolloutRow, before: RolloutRow | None) -> RolloutRow:
        """Replaces the row `before` by `row`, which gets the values that only `before` has."""
        if before is not None:
            row.step, row.lag = before.step, before.lag
            for name in ("fate", "evaluation", "at"):
                setattr(row, name, getattr(row, name) or getattr(before, name))
        step = self._trained_by.pop(row.request_id, None)
        if step is not None:
            _say_trained(row, step)
        self.rows[row.request_id] = row
        return row


def _say_trained(row: RolloutRow, step: StepRow) -> None:
    row.step = step.step
    row.lag = None if row.version_first is None else max(0, step.version - row.version_first)


def _segments(run_dir: Path) -> list[Path]:
    return [path for store in _stores(run_dir) for path in segment.segments_in(store)]


def _stores(run_dir: Path) -> list[Path]:
    """The store of the run, and those of the evaluations in its directory."""
    return [run_dir / DIRECTORY, *sorted(run_dir.glob(f"{EVALUATIONS}/*/{DIRECTORY}"))]


PAGE_SIZE, MAX_PAGE_SIZE = 50, 500
SEARCH_S = 2.0  # time limit of a text search in long bodies
NEWEST_FIRST = "-finished_at"
_RANGES = {
    "step": "step",
    "version": "version_first",
    "turns": "num_turns",
    "tokens": "sampled_tokens",
    "lag": "lag",
    "failed": "num_failed_commands",
}
"""Parameters that are one number or a range, and the columns that they narrow."""

_PARAMETERS = frozenset(
    (
        "task",
        "reward",
        "outcome",
        "worker",
        "engine",
        *_RANGES,
        "purpose",
        "fate",
        "group",
        "text",
        "sort",
        "page",
        "page_size",
    )
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
    """The rows of one index in the order that was last requested: sorting takes longer than filtering."""

    def __init__(self) -> None:
        self._order: tuple[str, int] = ("", -1)
        self._sorted: list[RolloutRow] = []

    def page(self, index: RolloutIndex, query: RolloutQuery) -> dict[str, Any]:
        """The reply to a request for the table."""
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
            "reward": mean_reward(found),
            "page": query.page,
            "page_size": query.page_size,
            "rows": found[first : first + query.page_size],
            "took_ms": round(1000 * (time.perf_counter() - began_at), 1),
            "text_searched": num_searched,
            "text_complete": is_complete,
        }


def mean_reward(rows: Iterable[RolloutRow]) -> intervals.Estimate | None:
    """The mean reward with its 95 % interval; groups are the draws, or tasks where the rollouts are an evaluation's. None: no reward."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.reward is not None:
            groups.setdefault(row.task_id if row.evaluation else row.group_id, []).append(row.reward)
    return intervals.mean(groups.values())


def _in_order(rows: Iterable[RolloutRow], sort: str) -> list[RolloutRow]:
    """The rows sorted by one column; those without a value come last in either direction."""
    key, all_rows = operator.attrgetter(sort.removeprefix("-")), list(rows)
    known = [row for row in all_rows if key(row) is not None]
    known.sort(key=key, reverse=sort.startswith("-"))
    return known + [row for row in all_rows if key(row) is None]


def _tests(given: Mapping[str, str]) -> Iterator[Test]:
    """One test for each parameter that narrows the table."""
    for parameter, column in (("task", "task_id"), ("outcome", "outcome"), ("worker", "worker")):
        if given.get(parameter):
            yield _like(given[parameter], operator.attrgetter(column))
    if given.get("engine"):
        yield _any_like(given["engine"])
    for parameter, column in (("purpose", "purpose"), ("fate", "fate"), ("group", "group_id")):
        if given.get(parameter):
            yield _equal(given[parameter], operator.attrgetter(column))
    if given.get("reward"):
        yield _equal(_reward(given["reward"]), operator.attrgetter("reward"))
    for parameter, column in _RANGES.items():
        if given.get(parameter):
            yield _within(*_range(parameter, given[parameter]), operator.attrgetter(column))


def _like(pattern: str, value: Callable[[RolloutRow], str]) -> Test:
    """A test in which `*` matches any text; a pattern without one must occur in the value."""
    matches = _matcher(pattern)
    return lambda row: matches(value(row))


def _any_like(pattern: str) -> Test:
    """The same test for the engines of a rollout, of which one must match."""
    matches = _matcher(pattern)
    return lambda row: any(map(matches, row.engines))


def _matcher(pattern: str) -> Callable[[str], bool]:
    is_whole = "*" in pattern
    wanted = fnmatch.translate(_only_stars(pattern)) if is_whole else re.escape(pattern)
    expression = re.compile(wanted, re.IGNORECASE | re.DOTALL)
    found = expression.match if is_whole else expression.search

    @functools.cache  # few values, many rows
    def matches(text: str) -> bool:
        return found(text) is not None

    return matches


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
    """The rows whose turns contain the text, the number of rows searched, and whether these were all."""
    wanted, give_up_at = text.casefold(), time.monotonic() + SEARCH_S
    found: list[RolloutRow] = []
    searched = 0
    for row in rows:
        trajectory = trajectory_of(index, row.request_id)
        if trajectory is not None and any(
            wanted in piece.casefold() for turn in trajectory.turns for piece in texts_of(turn)
        ):
            found.append(row)
        searched += trajectory is not None
        if time.monotonic() > give_up_at:
            return found, searched, row is rows[-1]
    return found, searched, True


def trajectory_of(index: RolloutIndex, request_id: str) -> Trajectory | None:
    """The rollout's trajectory; None if no store has it, or its record cannot be read."""
    place = index.place_of(request_id)
    if place is None:
        return None
    with contextlib.suppress(OSError, MalformedMessage), place[0].open("rb") as file:
        entry = segment.entry_at(file, place[1])
        body = None if entry is None else segment.read_body(file, entry)
        return None if body is None else record.unpack_body(body).trajectory
    return None


def texts_of(turn: Turn) -> Iterator[str]:
    """The texts that were shown, said, run and printed."""
    yield turn.text
    yield from (message.content for message in turn.told)
    for action in turn.actions:
        yield action.command
        if action.observation is not None:
            yield action.observation.output
