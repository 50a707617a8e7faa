"""Readers of a run's directory: what identifies the run, and the rows of its journal.

A journal may be read while its trainer appends to it. A last line that is cut short is not a row yet. A complete line that is not a row
of its kind, because of a crash or because somebody edited the file, is skipped; where numbers would be wrong without it, it is an error.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec

from pipeline.journal.rows import FILES, ImitationStepRow, Row
from pipeline.message import prepared

RUN_FILE, RECIPE, JOURNAL, LAUNCHES = "run.json", "recipe.toml", "journal", "launches.jsonl"
LOGS = "logs"  # the directory of the logs of the trainer, and of the processes that a local run starts

_MAX_LINE_BYTES = 64 * 1024**2
"""Readers skip a longer line in parts, so that no file can fill their memory."""
_TAIL_BYTES = 64 * 1024  # size of the tail in which the last row is looked for first
_NO_ROW = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

R = TypeVar("R", bound=Row)


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: a directory with this file is the directory of a run."""

    run_id: str
    started_at: float = 0.0  # Unix seconds
    kind: str = "rl"  # of its recipe; "sft": supervised fine-tuning
    # Digests of the ids of the training tasks in their order, by the recipe's key of their file.
    tasks: dict[str, str] = {}


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The start of a trainer's process in the directory of a run, a line of `launches.jsonl`. Resumes never remove these lines."""

    at: float  # Unix seconds
    host: str
    pid: int
    command: str  # what a shell starts again
    directory: str  # where the command was given
    # Keys of the recipe that do not have their default, as `learner.lr: 2e-6`, and keys that the process before had otherwise.
    set: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def launches(run_dir: Path) -> list[Launch]:
    """The starts of the run's processes, oldest first; lines that are no launch are left out."""
    found: list[Launch] = []
    with contextlib.suppress(OSError):
        for line in (run_dir / LAUNCHES).read_bytes().splitlines():
            with contextlib.suppress(*_NO_ROW):
                found.append(msgspec.json.decode(line, type=Launch))
    return found


class NoJournal(LookupError):
    """A directory without a journal; the message says what to give instead."""


class MalformedJournal(ValueError):
    """A line that is not the row it should be; the message names the file, line and field."""


def identity(run_dir: Path) -> RunFile:
    """The run whose directory this is. A directory without a readable `run.json`, such as an evaluation's, is named after the id."""
    try:
        return msgspec.json.decode((run_dir / RUN_FILE).read_bytes(), type=RunFile)
    except (OSError, *_NO_ROW):
        return RunFile(run_id=run_dir.resolve().name)


def journal_of(run_dir: Path) -> Path:
    """The journal's directory in a run's; `run_dir` may also be the journal's directory itself."""
    inside = run_dir / JOURNAL
    return inside if inside.is_dir() else run_dir


def found_journal(run_dir: Path, kind: type[Row]) -> Path:
    """The journal's directory, if it has rows of a kind. Raises NoJournal, for rows that runs of this kind never have, too."""
    directory = journal_of(run_dir)
    if identity(run_dir).kind == "sft" and kind is not ImitationStepRow:
        raise NoJournal(
            f"{run_dir} is of supervised fine-tuning, which has no {FILES[kind]}: `python -m trainer.report` sums it up"
        )
    if not (directory / FILES[kind]).is_file():
        raise NoJournal(
            f"{run_dir} holds no journal with {FILES[kind]}: give the directory of a run, as in runs/demo"
        )
    return directory


def read(directory: Path, kind: type[R]) -> Iterator[R]:
    """The rows of one kind, in order; none if the file does not exist. Raises MalformedJournal for a complete line that is not a row."""
    path, decoder = directory / FILES[kind], msgspec.json.Decoder(prepared(kind))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), path.open("rb") as file:
        for number, line in enumerate(_whole_lines(file), 1):
            try:
                yield decoder.decode(line)
            except _NO_ROW as error:
                raise MalformedJournal(f"{path}, line {number}: {error}") from error


def mentioning(directory: Path, kind: type[R], text: str) -> Iterator[R]:
    """The rows of one kind whose line contains the text, in order. Only these lines are decoded; lines that are not rows are skipped."""
    wanted, decoder = text.encode(), msgspec.json.Decoder(prepared(kind))
    with contextlib.suppress(FileNotFoundError), (directory / FILES[kind]).open("rb") as file:
        for line in _whole_lines(file):
            if wanted in line:
                with contextlib.suppress(*_NO_ROW):
                    yield decoder.decode(line)


def last_row(directory: Path, kind: type[R], is_wanted: Callable[[R], bool] = lambda _: True) -> R | None:
    """The last row of one kind that `is_wanted` accepts, searched from the end of its file; None if there is none."""
    decoder = msgspec.json.Decoder(prepared(kind))
    try:
        with (directory / FILES[kind]).open("rb") as file:
            size = file.seek(0, 2)
            tail_bytes = _TAIL_BYTES
            while True:
                file.seek(max(0, size - tail_bytes))
                # What comes before the first line end may be a part of a row; what comes after the last one is not whole.
                lines = file.read(size - file.tell()).split(b"\n")[:-1]
                for line in reversed(lines[1:] if tail_bytes < size else lines):
                    with contextlib.suppress(*_NO_ROW):
                        if is_wanted(row := decoder.decode(line)):
                            return row
                if tail_bytes >= size:
                    return None
                tail_bytes *= 8
    except FileNotFoundError:
        return None


class RowFile(Generic[R]):
    """The rows of one file, read as they are appended; lines that are not rows are skipped. One thread at a time may use it.

    Each call reads only what was appended. A resumed trainer cuts its files at its checkpoint and moves the rest to
    `<file>.discarded`; then the file is read from its beginning.
    """

    def __init__(self, path: Path, kind: type[R]) -> None:
        self.rows: list[R] = []
        self.generation = 0  # grows when the file is read from its beginning again
        self._path = path
        self._decoder = msgspec.json.Decoder(prepared(kind))
        self._offset = 0
        self._identity: tuple[int, int] = (0, 0)

    def read(self, max_bytes: int) -> int:
        """Reads what was appended since the last call, and stops after `max_bytes`. Returns the number of bytes read."""
        try:
            with self._path.open("rb") as file:
                self._begin_again_if_cut(file)
                file.seek(self._offset)
                num_bytes = 0
                while num_bytes < max_bytes and (line := _whole_line(file)):
                    num_bytes += len(line)
                    with contextlib.suppress(*_NO_ROW):
                        self.rows.append(self._decoder.decode(line))
                self._offset += num_bytes
                return num_bytes
        except FileNotFoundError:
            self.rows, self._offset = [], 0
            return 0

    @property
    def progress(self) -> tuple[int, int]:
        """The number of bytes read, and the total."""
        return self._offset, max(self._offset, size_of(self._path))

    def _begin_again_if_cut(self, file: BinaryIO) -> None:
        identity = (self._path.stat().st_ino, size_of(discarded(self._path)))
        if file.seek(0, 2) < self._offset or (identity != self._identity and self._offset):
            self.rows, self._offset = [], 0
            self.generation += 1
        self._identity = identity


def discarded(path: Path) -> Path:
    """The file to which a resumed trainer moves the rows after its checkpoint."""
    return path.with_name(f"{path.name}.discarded")


def size_of(path: Path) -> int:
    """The size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _whole_lines(file: BinaryIO) -> Iterator[bytes]:
    while line := _whole_line(file):
        yield line


def _whole_line(file: BinaryIO) -> bytes:
    """The next line with its newline, or a part of a line that is too long.

    Empty at the end of the file, also if the last line has no newline yet.
    """
    line = file.readline(_MAX_LINE_BYTES)
    return line if line.endswith(b"\n") or len(line) == _MAX_LINE_BYTES else b""
