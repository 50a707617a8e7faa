"""Task files: one `pipeline.task.Task` a line as JSON, bytes in base64.

Beside tasks.jsonl lie tasks.gold.jsonl, the solutions, which never leave the side of those who own the tasks, and
tasks.verified.jsonl, what the grader made of them.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from pipeline.task import Task

T = TypeVar("T")


class Gold(msgspec.Struct, frozen=True, kw_only=True):
    """The known solution of the task `id`, hidden tests left out; and the hidden tests, as far as they are a diff."""

    id: str
    patch: str
    test_patch: str = ""


State = Literal["empty", "useless", "tests_only", "gold"]
Found = Literal[0, 1, "infrastructure"]
EXPECTED: dict[State, Found] = {"empty": 0, "useless": 0, "tests_only": 0, "gold": 1}


class Strength(msgspec.Struct, frozen=True, kw_only=True):
    """How a task's tests judge partial fixes: patches made of the known fix, each with a part of it taken back or changed."""

    num_partial_fixes: int  # that were graded
    passing: tuple[str, ...]  # those that passed all the same, each in a line: "calc.py:12: == becomes !="

    @property
    def weakness(self) -> float:
        """The share of the partial fixes that passed; 0 if no partial fix could be made."""
        return len(self.passing) / self.num_partial_fixes if self.num_partial_fixes else 0.0


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What the production grader said of one task's four states, the worst of all repeats."""

    task: str  # its id
    fingerprint: str  # of the task as it was verified
    states: dict[State, Found]
    ok: bool
    reason: str  # "" if ok
    verdict_kind: str
    seconds: float
    verified_at: float  # Unix seconds
    warning: str = ""  # what a person should know of a task although it is ok
    calibration: bytes = b""  # packed, as it travels in a task; see calibration.py
    num_tests: int = 0  # that the known fix passes in every run
    num_controlled: int = 0  # of these, tests that can be made to fail by a contradiction
    strength: Strength | None = None  # None: it was not measured

    @property
    def weakness(self) -> float | None:
        """The share of wrong patches that its tests let pass; None if that was not measured."""
        return None if self.strength is None else self.strength.weakness


def fingerprint(task: Task) -> str:
    """Changes with anything that the task says: a verification counts for the very task that it was made of. The calibration is
    no part of that: it is a result of the verification.
    """
    said = msgspec.structs.replace(task, calibration=b"")
    return hashlib.sha256(msgspec.json.encode(said, order="deterministic")).hexdigest()


def standing(verifications: Mapping[str, Verification], task: Task) -> Verification | None:
    """The verification of the task as it is now; None if it was never verified, or has changed since."""
    found = verifications.get(task.id)
    return found if found is not None and found.fingerprint == fingerprint(task) else None


def write_tasks(path: Path, tasks: Iterable[Task]) -> None:
    """Writes `tasks` in order, into a directory that is made if need be. Raises ValueError, and writes nothing, if two have one id."""
    tasks = list(tasks)
    _refuse_duplicates(path, [task.id for task in tasks])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))


def read_tasks(path: Path) -> list[Task]:
    """The tasks in order. Raises ValueError naming the line that is not a task."""
    tasks = [_record(path, number, line, Task) for number, line in _lines(path)]
    _refuse_duplicates(path, [task.id for task in tasks])
    return tasks


def gold_path(tasks_path: Path) -> Path:
    """Where the solutions of the tasks in `tasks_path` are kept: tasks.jsonl has tasks.gold.jsonl."""
    return tasks_path.with_suffix(f".gold{tasks_path.suffix}")


def verified_path(tasks_path: Path) -> Path:
    """Where the verifications of the tasks in `tasks_path` are kept: tasks.jsonl has tasks.verified.jsonl."""
    return tasks_path.with_suffix(f".verified{tasks_path.suffix}")


def write_verified(path: Path, verifications: Iterable[Verification]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in verifications))


def read_verified(path: Path) -> dict[str, Verification]:
    """The verifications by task id. Raises ValueError naming the line that is not one."""
    verifications = [_record(path, number, line, Verification) for number, line in _lines(path)]
    return {one.task: one for one in verifications}


def write_gold(path: Path, golds: Iterable[Gold]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(gold) + b"\n" for gold in golds))


def read_gold(path: Path) -> dict[str, Gold]:
    """The solutions by task id. Raises ValueError naming the line that is not one."""
    golds = [_record(path, number, line, Gold) for number, line in _lines(path)]
    return {gold.id: gold for gold in golds}


def _lines(path: Path) -> list[tuple[int, bytes]]:
    return [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]


def _record(path: Path, number: int, line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}:{number}: not a {kind.__name__}: {error}") from error


def _refuse_duplicates(path: Path, ids: list[str]) -> None:
    seen: set[str] = set()
    for task_id in ids:
        if task_id in seen:
            raise ValueError(f"{path}: id: {task_id!r} stands for two tasks; ids must be unique")
        seen.add(task_id)
