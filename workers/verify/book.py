"""TASKS.verified.jsonl: the result for each task, written to disk after every change."""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from pipeline.task import Task
from pipeline.taskfile import Verification, read_verified, standing, verified_path, write_verified
from workers.unqueued.outputs import writing


@dataclass(slots=True)
class Book:
    """The verifications of a task file by task id."""

    path: Path
    entries: dict[str, Verification] = field(default_factory=dict[str, Verification])

    @classmethod
    def beside(cls, tasks: Path) -> "Book":
        """The book of the task file `tasks`. Raises Unwritable if nothing can be kept beside it, ValueError if it is damaged."""
        path = verified_path(tasks)
        with writing("TASKS.jsonl", path):
            tempfile.TemporaryFile(dir=path.parent).close()
        return cls(path, read_verified(path) if path.exists() else {})

    def stands(self, task: Task, *, measured: bool) -> bool:
        """Whether `task`, as it is now, was found to be ok; and its strength `measured`, if that is wanted."""
        entry = standing(self.entries, task)
        return entry is not None and entry.ok and (entry.strength is not None or not measured)

    def enter(self, new: Verification) -> None:
        """Records `new`. Of the same version of a task, an infrastructure failure does not replace an earlier verdict, and a strength
        that was measured earlier is kept.

        Raises Unwritable; what was written before stays.
        """
        old = self.entries.get(new.task)
        if old is not None and old.fingerprint == new.fingerprint:
            if _is_broken(new) and not _is_broken(old):
                return
            new = replace(new, strength=new.strength or old.strength)
        self.entries[new.task] = new
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with writing("TASKS.jsonl", self.path):
                write_verified(partial, self.entries.values())
                partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)


def _is_broken(verification: Verification) -> bool:
    return "infrastructure" in verification.states.values()
