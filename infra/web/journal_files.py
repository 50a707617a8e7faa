"""The rows of a run's journal, read as they are appended.

A journal is JSON lines, one file per kind of row. Only what was appended is read again. A resumed trainer cuts the files at its
checkpoint and moves the rest to `<file>.discarded`; then a file is read from its beginning.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from infra.web.rollout_row import row_of_line

FILES = (
    *("steps", "episodes", "evaluations", "publications", "deliveries", "staleness", "quarantines"),
    *("skipped_batches", "endings", "judgements", "alarms", "starts", "fleet"),
)
"""The files whose growth the pages are told of, without their suffix."""

_TAIL_BYTES = 64 * 1024  # where the last row is looked for first
T = TypeVar("T")
JsonRow = dict[str, Any]


class JournalFile(Generic[T]):
    """The rows of one file. What cannot be decoded is passed over, as is an incomplete last line. For one thread at a time."""

    def __init__(self, path: Path, decode: Callable[[bytes], T]) -> None:
        self.rows: list[T] = []
        self.generation = 0  # grows when the file is read from its beginning again
        self._path = path
        self._decode = decode
        self._offset = 0
        self._identity: tuple[int, int] = (0, 0)

    def read(self, max_bytes: int) -> int:
        """Read what was appended since the last call, and stop after `max_bytes`. Returns how many bytes were read."""
        try:
            with self._path.open("rb") as file:
                self._begin_again_if_cut(file)
                file.seek(self._offset)
                num_bytes = 0
                while num_bytes < max_bytes and (line := file.readline()).endswith(b"\n"):
                    num_bytes += len(line)
                    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                        self.rows.append(self._decode(line))
                self._offset += num_bytes
                return num_bytes
        except FileNotFoundError:
            self.rows, self._offset = [], 0
            return 0

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that were read, and bytes that there are."""
        return self._offset, max(self._offset, _size(self._path))

    def _begin_again_if_cut(self, file: BinaryIO) -> None:
        identity = (self._path.stat().st_ino, _size(discarded(self._path)))
        if file.seek(0, 2) < self._offset or (identity != self._identity and self._offset):
            self.rows, self._offset = [], 0
            self.generation += 1
        self._identity = identity


class RunJournal:
    """The journal of one run, as far as the pages show it. For one thread at a time."""

    def __init__(self, directory: Path) -> None:
        def file(name: str) -> JournalFile[JsonRow]:
            return JournalFile(directory / f"{name}.jsonl", _json_row)

        self.steps = file("steps")
        self.evaluations = file("evaluations")
        self.publications = file("publications")
        self.deliveries = file("deliveries")
        self.staleness = file("staleness")
        self.quarantines = file("quarantines")
        self.skipped_batches = file("skipped_batches")
        self.endings = file("endings")
        self.alarms = file("alarms")
        self.starts = file("starts")
        self.fleet = file("fleet")
        self.episodes = JournalFile(directory / "episodes.jsonl", row_of_line)
        found: list[JournalFile[Any] | None] = [getattr(self, name, None) for name in FILES]
        # The episodes are by far the longest.
        self._files = sorted((one for one in found if one is not None), key=lambda one: one is self.episodes)

    def read(self, max_bytes: int) -> int:
        """Read what is new of all files, the episodes last, and stop after `max_bytes`. Returns how many bytes were read."""
        num_bytes = 0
        for file in self._files:
            num_bytes += file.read(max_bytes - num_bytes)
        return num_bytes

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that were read, and bytes that there are."""
        found = [file.progress for file in self._files]
        return sum(read for read, _ in found), sum(size for _, size in found)


def last_row(path: Path, is_wanted: Callable[[JsonRow], bool] = lambda _: True) -> JsonRow:
    """The last whole row of a file that is wanted, found from its end; an empty one if there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            tail_bytes = _TAIL_BYTES
            while True:
                file.seek(max(0, size - tail_bytes))
                # What is before the first line end may be a part of a row, what is behind the last one is not whole.
                lines = file.read(size - file.tell()).split(b"\n")[:-1]
                for line in reversed(lines[1:] if tail_bytes < size else lines):
                    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                        if is_wanted(row := _json_row(line)):
                            return row
                if tail_bytes >= size:
                    return {}
                tail_bytes *= 8
    except FileNotFoundError:
        return {}


def discarded(path: Path) -> Path:
    """Where a resumed trainer moves the rows behind its checkpoint."""
    return path.with_name(f"{path.name}.discarded")


def sizes(directory: Path) -> dict[str, tuple[int, int]]:
    """Of each file of a journal, and of what was cut off it; they change when a row is appended or cut off."""
    paths = {name: directory / f"{name}.jsonl" for name in FILES}
    return {name: (_size(path), _size(discarded(path))) for name, path in paths.items()}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _json_row(line: bytes) -> JsonRow:
    return msgspec.json.decode(line, type=JsonRow)
