"""Checkpoints on disk: which is the newest complete one. A pointer file names it and changes in one step,
after the directory is whole.
"""

import os
import shutil
from pathlib import Path

from trainer.learner import directories

_POINTER = "latest"


class Checkpoints:
    """The checkpoints of one run; the learner writes into `place`, `complete` makes it count."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def place(self, step: int) -> Path:
        """Where to write the next one: never over the one that counts, even if it is of the same step."""
        usual = self._directory / f"step-{step:08d}"
        return usual.with_name(f"{usual.name}.again") if self.latest() == usual else usual

    def latest(self) -> Path | None:
        """The newest complete checkpoint. Raises ValueError if the pointer names one that is gone."""
        pointer = self._directory / _POINTER
        if not pointer.exists():
            return None
        found = self._directory / pointer.read_text().strip()
        if not found.is_dir():
            raise ValueError(
                f"{pointer} names {found.name}, which is not there; restore it, or write another's name"
            )
        return found

    def complete(self, written: Path) -> None:
        """`written` is whole: resume from it. Older ones beyond `keep` go."""
        partial = self._directory / f".{_POINTER}"
        with partial.open("w") as file:
            file.write(written.name)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._directory / _POINTER)
        directories.sync(self._directory)
        older = sorted(
            path for path in self._directory.glob("step-*") if path.name <= written.name and path != written
        )
        for path in older[: len(older) - self._keep + 1]:
            shutil.rmtree(path)
