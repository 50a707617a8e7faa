"""The rows of all rollouts of a run, in memory: from the heads in its stores and from its journal.

Bodies are not read. What a store holds and the journal does not is a rollout that is not settled yet; what only the journal has was
withdrawn, or its record was removed when the store outgrew its budget.
"""

from pathlib import Path
from typing import cast

from infra.web.journal_files import JsonRow, RunJournal
from infra.web.rollout_row import RolloutRow, row_of_head
from pipeline.rollout_store import record, segment
from pipeline.rollout_store.reading import DIRECTORY, EVALUATIONS

Place = tuple[Path, int]
"""The segment and the offset of a record."""


class RolloutIndex:
    """The rows of one run, by request id. For one thread at a time."""

    def __init__(self, run_dir: Path, journal: RunJournal) -> None:
        self.rows: dict[str, RolloutRow] = {}
        self.changes = 0  # grows with every call of `read` that found something
        self._run_dir = run_dir
        self._journal = journal
        self._places: dict[str, Place] = {}
        self._read: dict[Path, tuple[int, int]] = {}  # of each segment: read up to, and its size then
        self._num_episodes = self._num_steps = 0
        self._generation = (0, 0)
        self._trained_by: dict[str, JsonRow] = {}  # the step of each request without a row as yet

    def read(self, max_bytes: int) -> int:
        """Read what is new of the journal, then the heads that are new, and stop after `max_bytes`. Returns how many bytes were read."""
        num_bytes = self._journal.read(max_bytes)
        generation = (self._journal.episodes.generation, self._journal.steps.generation)
        paths = _segments(self._run_dir)
        if generation != self._generation or not self._read.keys() <= set(paths):
            # A resumed trainer took rows back, or the store removed its oldest segment.
            self._begin_again()
            self._generation = generation
        self._take_steps()
        self._take_episodes()
        for path in paths:
            num_bytes += self._read_heads(path, max_bytes - num_bytes)
        return num_bytes

    @property
    def progress(self) -> tuple[int, int]:
        """Of the journal and of all segments: bytes that were read or passed over, and bytes that there are."""
        done, in_all = self._journal.progress
        for path in _segments(self._run_dir):
            end, known_bytes = self._read.get(path, (0, -1))
            size = _size(path)
            done, in_all = done + (size if size == known_bytes else end), in_all + size
        return done, in_all

    def place_of(self, request_id: str) -> Place | None:
        """Where the newest record of a rollout is."""
        return self._places.get(request_id)

    def group(self, group_id: str) -> list[RolloutRow]:
        """The rollouts of a group, in the order of its members."""
        found = (row for row in self.rows.values() if row.group_id == group_id)
        return sorted(found, key=lambda row: (row.member, row.finished_at))

    def _begin_again(self) -> None:
        # The rows of the journal go on to be used.
        for row in self._journal.episodes.rows:
            row.is_stored, row.is_dead, row.step, row.lag = False, False, None, None
        self.rows, self._places, self._read, self._trained_by = {}, {}, {}, {}
        self._num_episodes = self._num_steps = 0
        self.changes += 1

    def _read_heads(self, path: Path, max_bytes: int) -> int:
        start, known_bytes = self._read.get(path, (0, -1))
        num_bytes = 0
        if max_bytes <= 0 or _size(path) == known_bytes:
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
                        size = -1  # to be gone on with
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
        """A step's row is written before those of its episodes."""
        new = self._journal.steps.rows[self._num_steps :]
        for step in new:
            for request_id in _texts(step.get("request_ids")):
                row = self.rows.get(request_id)
                if row is None:
                    self._trained_by[request_id] = step
                else:
                    _say_trained(row, step)
        self._num_steps += len(new)
        self.changes += bool(new)

    def _put(self, row: RolloutRow, before: RolloutRow | None) -> RolloutRow:
        """The row takes the place of the one before; what only that one tells is kept."""
        if before is not None:
            row.step, row.lag = before.step, before.lag
            row.fate, row.evaluation, row.at = (
                row.fate or before.fate,
                row.evaluation or before.evaluation,
                row.at or before.at,
            )
        step = self._trained_by.pop(row.request_id, None)
        if step is not None:
            _say_trained(row, step)
        self.rows[row.request_id] = row
        return row


def _say_trained(row: RolloutRow, step: JsonRow) -> None:
    row.step = step.get("step")
    first, version = row.version_first, step.get("version")
    row.lag = None if first is None or version is None else max(0, version - first)


def _segments(run_dir: Path) -> list[Path]:
    return [path for store in _stores(run_dir) for path in segment.segments_in(store)]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _stores(run_dir: Path) -> list[Path]:
    """The store of the run, and those of the evaluations in its directory."""
    return [run_dir / DIRECTORY, *sorted(run_dir.glob(f"{EVALUATIONS}/*/{DIRECTORY}"))]


def _texts(value: object) -> list[str]:
    """The texts of a list in a row of the journal; of anything else, none."""
    found = cast(list[object], value) if isinstance(value, list) else []
    return [one for one in found if isinstance(one, str)]
