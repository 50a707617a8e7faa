"""Task files: one `pipeline.task.Task` a line as JSON, bytes in base64.

Beside tasks.jsonl are tasks.gold.jsonl, the solutions, which stay with the owners of the tasks, tasks.verified.jsonl, the grader's
results about them, and for tasks that were made from a repository tasks.provenance.jsonl. The directory of a run has a tasks.jsonl of its
own, with the run's facts about its tasks from their verification. It contains only their standing and numbers of tests and patches,
nothing that would reveal the known fix or the hidden tests, so anybody who may see the problems may read it.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from pipeline.intervals import wilson_interval
from pipeline.task import BestControl, File, Task

T = TypeVar("T")


class Gold(msgspec.Struct, frozen=True, kw_only=True):
    """The known solution of the task `id`, hidden tests left out; and the hidden tests, as far as they are a diff."""

    id: str
    patch: str
    test_patch: str = ""
    # The directory that the task was imported from, for a source whose export writes it back as it was: files by their paths in it, with
    # the type of file in the mode, so that there may be links and empty directories.
    directory: tuple[File, ...] = ()
    directory_of: str = ""  # the fingerprint that the task had when it was imported from `directory`


State = Literal["empty", "useless", "tests_only", "gold", "agent"]
Found = Literal[0, 1, "infrastructure"]
EXPECTED: dict[State, Found] = {"empty": 0, "useless": 0, "tests_only": 0, "gold": 1, "agent": 1}


class Strength(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts of a task's tests on partial fixes: patches made from the known fix, each with a part of it undone or changed."""

    num_partial_fixes: int  # number of graded partial fixes
    # Partial fixes that passed all the same, one line each: "calc.py:12: == becomes !=".
    passing: tuple[str, ...]

    @property
    def weakness(self) -> float | None:
        """The share of the partial fixes that passed; None if there were none, because then nothing is known."""
        return len(self.passing) / self.num_partial_fixes if self.num_partial_fixes else None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the weakness: 0 to 0.79 if the only partial fix does not pass, 0 to 1 without any."""
        return (0.0, 1.0) if self.weakness is None else wilson_interval(self.weakness, self.num_partial_fixes)


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The production grader's results for one task's five states, each the worst of all repeats."""

    task: str  # its id
    fingerprint: str  # the fingerprint of the task as it was verified
    states: dict[State, Found]
    ok: bool
    reason: str  # "" if ok
    verdict_kind: str
    seconds: float
    agent_s: float = 0.0  # how many of them the state `agent` took
    verified_at: float  # Unix seconds
    warning: str = ""  # a warning about a task that is ok nevertheless; "" if there is none
    calibration: bytes = b""  # packed, as it travels in a task; `pipeline.task.Calibration`
    num_tests: int = 0  # number of tests that the known fix passes in every run
    num_controlled: int = 0  # how many of `num_tests` a contradiction can make fail
    num_needing_fix: int = 0  # how many of `num_tests` do not pass without the fix
    num_uncontrolled: int = 0  # number of tests that need the fix and fail under no contradiction
    control: BestControl = "none"
    strength: Strength | None = None  # None: it was not measured
    # Files that hold the answer; they are removed from the agents' containers.
    leaking_paths: tuple[str, ...] = ()
    # Tests that a patch may change, and tests that get what they expect from the package under test: see `Calibration`.
    in_fix: tuple[str, ...] = ()
    from_package: tuple[str, ...] = ()

    @property
    def weakness(self) -> float | None:
        """The share of wrong patches that pass its tests; None if that was not measured, or if none could be made."""
        return None if self.strength is None else self.strength.weakness

    @property
    def weakness_interval(self) -> tuple[float, float] | None:
        """The interval of that share at 95 %; None if it was not measured."""
        return None if self.strength is None else self.strength.interval


class TaskProvenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where a task that was made from a repository is from."""

    task: str  # its id
    repository: str
    commit: str
    num_commits: int
    authored: str  # ISO 8601
    licence: str  # path of the licence file at the commit
    problem_source: str
    versions_before: str
    bugs: tuple[str, ...] = ()  # kinds of planted bugs
    seed: int | None = None  # of the choice of planted bugs


def fingerprint(task: Task) -> str:
    """A digest that changes with every other field of the task, because a verification counts only for the task it was made for.

    It does not cover the calibration and the leaking paths, which are results of the verification.
    """
    said = msgspec.structs.replace(task, calibration=b"", leaking_paths=())
    return hashlib.sha256(msgspec.json.encode(said, order="deterministic")).hexdigest()


def standing(verifications: Mapping[str, Verification], task: Task) -> Verification | None:
    """The verification of the task in its present form; None if it was never verified in every state, or has changed since."""
    found = verifications.get(task.id)
    if found is None or found.fingerprint != fingerprint(task) or found.states.keys() != EXPECTED.keys():
        return None
    return found


def as_verified(task: Task, known: Verification | None) -> Task:
    """The task with the results of its verification: the calibration and the leaking paths."""
    if known is None:
        return msgspec.structs.replace(task, calibration=b"", leaking_paths=())
    return msgspec.structs.replace(task, calibration=known.calibration, leaking_paths=known.leaking_paths)


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
    """The file with the solutions of the tasks in `tasks_path`: tasks.gold.jsonl for tasks.jsonl."""
    return tasks_path.with_suffix(f".gold{tasks_path.suffix}")


def verified_path(tasks_path: Path) -> Path:
    """The file with the verifications of the tasks in `tasks_path`: tasks.verified.jsonl for tasks.jsonl."""
    return tasks_path.with_suffix(f".verified{tasks_path.suffix}")


def provenance_path(tasks_path: Path) -> Path:
    """The file that says where the tasks in `tasks_path` are from: tasks.provenance.jsonl for tasks.jsonl."""
    return tasks_path.with_suffix(f".provenance{tasks_path.suffix}")


def write_provenance(path: Path, provenance: Iterable[TaskProvenance]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in provenance))


def read_provenance(path: Path) -> dict[str, TaskProvenance]:
    """The provenance by task id. Raises ValueError naming the line that is none."""
    provenance = [_record(path, number, line, TaskProvenance) for number, line in _lines(path)]
    return {one.task: one for one in provenance}


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
            raise ValueError(f"{path}: id: two tasks have the id {task_id!r}; ids must be unique")
        seen.add(task_id)


FILE = "tasks.jsonl"

Standing = Literal["ok", "never", "changed", "wrong"]
"""ok: verified in its present form. never: not verified. changed: the task has changed since its verification. wrong: verification found
its grader wrong.
"""


class TaskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A run's facts about one task. The numbers are 0 if the task was never verified, or has changed since."""

    task_id: str
    verified: Standing
    num_tests: int = 0  # number of tests that the known fix passes in every run
    num_controlled: int = 0  # how many of `num_tests` a contradiction can make fail
    control: BestControl = "none"  # what a control can say at best of a pass
    num_flaky: int = 0  # tests that passed in some runs of the known fix only
    num_partial_fixes: int = 0  # wrong patches, made of the known fix, that were graded
    weakness: float | None = None  # the share of them that passed; None: not measured, or none was graded
    weakness_interval: tuple[float, float] | None = None  # the interval of `weakness` at 95 %


def write_facts(run_dir: Path, facts: Iterable[TaskFacts]) -> None:
    """Replaces the facts that an earlier process of the run wrote."""
    partial = run_dir / f".{FILE}.{os.getpid()}"
    partial.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in facts))
    partial.replace(run_dir / FILE)


def read_facts(run_dir: Path) -> dict[str, TaskFacts]:
    """The facts by task id; empty for a run that is older than this file, or whose file is damaged."""
    try:
        lines = (run_dir / FILE).read_bytes().splitlines()
        return {one.task_id: one for one in (msgspec.json.decode(line, type=TaskFacts) for line in lines)}
    except (OSError, msgspec.DecodeError):
        return {}
