"""A sink that writes the numbers of a run as JSON lines, for scripts: {"step": 3, "at": ..., "train/loss": ...}."""

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import msgspec

from trainer.records.points import points
from trainer.records.row import Row


class _Line(msgspec.Struct, frozen=True):
    step: int


class MetricsFile(AbstractContextManager["MetricsFile", None]):
    """One file, a line for each point.

    After a resume, lines from `resumed_at` on are removed, because those steps are taken again.
    """

    def __init__(self, path: Path, *, resumed_at: int | None = None) -> None:
        if resumed_at is not None and path.is_file():
            _keep_before(path, resumed_at)
        self._file = path.open("ab", buffering=0)

    def show(self, row: Row) -> None:
        for point in points(row):
            line = {"step": point.step, "at": point.at, **point.values}
            self._file.write(msgspec.json.encode(line) + b"\n")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _keep_before(path: Path, step: int) -> None:
    """Without lines of later steps, and without one that a crash cut short."""
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    kept = [line for line in whole if msgspec.json.decode(line, type=_Line).step < step]
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(b"".join(kept))
    partial.replace(path)
