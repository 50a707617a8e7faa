"""The tasks of a file, for commands that work without a queue: each with its calibration, and found by its id."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from pipeline.task import Task
from pipeline.taskfile import read_tasks, read_verified, standing, verified_path

NAMED_AT_MOST = 3  # ids in a sentence


def calibrated_tasks(path: Path) -> list[Task]:
    """The tasks of the file, each with the calibration that its verification holds. Raises ValueError or OSError."""
    verified = verified_path(path)
    known = read_verified(verified) if verified.exists() else {}
    return [
        replace(task, calibration=found.calibration if (found := standing(known, task)) else b"")
        for task in read_tasks(path)
    ]


class TaskIndex:
    """Tasks by id. The source's prefix of an id may be left out, where what remains stands for one task only."""

    def __init__(self, path: Path, tasks: Iterable[Task]) -> None:
        """Of the task file `path`."""
        self._path = path
        self._by_id = {task.id: task for task in tasks}
        self._by_instance: dict[str, list[Task]] = defaultdict(list)
        for task in self._by_id.values():
            self._by_instance[task.id.partition(":")[2]].append(task)

    def find(self, given: str) -> Task | None:
        """None if there is no such task. Raises ValueError if there are several."""
        if given in self._by_id:
            return self._by_id[given]
        found = self._by_instance.get(given, []) if given else []
        if len(found) > 1:
            names = ", ".join(task.id for task in found[:NAMED_AT_MOST])
            raise ValueError(f"{given!r} stands for several tasks in {self._path}: give one of {names}")
        return found[0] if found else None

    def require(self, given: Collection[str], *, where: str) -> list[Task]:
        """The task of each id. Raises ValueError naming those that are unknown."""
        found = {one: self.find(one) for one in given}
        unknown = [one for one, task in found.items() if task is None]
        if unknown:
            raise ValueError(f"{where}: {_few(unknown)}: no such task in {self._path}; {self._hint()}")
        return [task for task in found.values() if task is not None]

    def _hint(self) -> str:
        first = next(iter(self._by_id), None)
        return f"its ids look like {first!r}" if first else "it holds no task"


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(map(repr, names[:NAMED_AT_MOST]))}{more}"
