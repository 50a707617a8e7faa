"""The files of a verification: the results in TASKS.verified.jsonl, written after every change, and the files of --json, --passing and
--logs.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from pipeline.task import BEST_CONTROLS, BestControl, Task
from pipeline.taskfile import (
    Found,
    Gold,
    State,
    Verification,
    gold_path,
    read_verified,
    standing,
    verified_path,
    write_gold,
    write_tasks,
    write_verified,
)
from workers.unqueued import LogDirectory, must_be_writable, writing

if TYPE_CHECKING:
    from workers.verify.states import Tries


@dataclass(slots=True)
class Book:
    """The verifications of a task file by task id."""

    path: Path
    entries: dict[str, Verification] = field(default_factory=dict[str, Verification])

    @classmethod
    def beside(cls, tasks: Path) -> "Book":
        """The book of the task file `tasks`. Raises Unwritable if nothing can be stored beside it, ValueError if it is damaged."""
        path = verified_path(tasks)
        with writing("TASKS.jsonl", path):
            tempfile.TemporaryFile(dir=path.parent).close()
        return cls(path, read_verified(path) if path.exists() else {})

    def stands(self, task: Task, *, measured: bool) -> bool:
        """Whether `task` in its present form was found to be ok; and, if wanted, whether its strength was `measured`."""
        entry = standing(self.entries, task)
        return entry is not None and entry.ok and (entry.strength is not None or not measured)

    def enter(self, new: Verification) -> None:
        """Records `new`. For the same version of a task, an infrastructure failure does not replace an earlier verdict, and a strength that
        was measured earlier is kept.

        Raises Unwritable; earlier results then remain.
        """
        old = self.entries.get(new.task)
        if old is not None and old.fingerprint == new.fingerprint:
            if is_broken(new) and not is_broken(old):
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


def is_broken(verification: Verification) -> bool:
    """Whether an infrastructure failure prevented a verdict on a state of the task."""
    return "infrastructure" in verification.states.values()


class JsonTry(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict on one state. `tests` contains the outcome of each test by name, "" for one that the log does not mention."""

    found: Found
    why: str
    tests: dict[str, str]


class JsonLine(msgspec.Struct, frozen=True, kw_only=True):
    """One element of --json's list. `tries` is empty for a task that --new left out. `weakness` is the share of partial fixes that pass,
    None if it was not measured or none could be made; `weakness_interval` is its interval at 95 %.
    """

    task: str
    states: dict[State, Found]
    ok: bool
    reason: str
    warning: str
    verdict_kind: str
    seconds: float
    agent_s: float  # how many of them the state `agent` took
    num_tests: int  # number of tests that the known fix passes in every run
    num_controlled: int  # number of these tests that fail under at least one contradiction
    num_needing_fix: int  # number of these tests that do not pass without the fix
    num_uncontrolled: int  # number of tests that need the fix and fail under no contradiction
    control: BestControl  # the strongest result that a control can have for a pass
    tries: dict[State, list[JsonTry]]
    weakness: float | None
    num_partial_fixes: int
    passing_partial_fixes: tuple[str, ...]
    weakness_interval: tuple[float, float] | None
    # Tests that a patch may change, and tests that get what they expect from the package under test.
    in_fix: tuple[str, ...]
    from_package: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The destinations of the results; None: nowhere."""

    json: Path | None
    passing: Path | None
    min_control: BestControl  # the smallest `control` of a task that is copied to `passing`
    logs: LogDirectory

    def check(self) -> None:
        """Raises Unwritable for any file that could not be written later. Makes the directory for logs, writes nothing else."""
        if self.json:
            must_be_writable(self.json, "--json")
        if self.passing:
            for beside in (Path, gold_path, verified_path):
                must_be_writable(beside(self.passing), "--passing")
        self.logs.check()

    def keep(self, task: Task, state: State, number: int, log: str) -> None:
        """Writes the whole log of one try to LOGS/TASK/STATE.log, of a repeat to STATE-NUMBER.log; nothing if it is empty."""
        self.logs.write(task.id, f"{state}.log" if number == 1 else f"{state}-{number}.log", log)

    def write_json(self, found: Sequence[Verification], tries: Mapping[str, "Tries"]) -> None:
        """`tries` by task id."""
        if self.json:
            lines = [_json_line(one, tries.get(one.task)) for one in found]
            with writing("--json", self.json):
                self.json.write_bytes(msgspec.json.format(msgspec.json.encode(lines)))

    def write_passing(
        self, tasks: Sequence[Task], golds: Mapping[str, Gold], found: Sequence[Verification]
    ) -> None:
        """Writes a task file of the tasks that are ok and have the wanted controls, with their solutions and verifications."""
        if self.passing:
            wanted = BEST_CONTROLS.index(self.min_control)
            passing = [
                (task, one)
                for task, one in zip(tasks, found, strict=True)
                if one.ok and BEST_CONTROLS.index(one.control) >= wanted
            ]
            with writing("--passing", self.passing):
                write_tasks(self.passing, [task for task, _ in passing])
                write_gold(gold_path(self.passing), [golds[task.id] for task, _ in passing])
                write_verified(verified_path(self.passing), [one for _, one in passing])


def _json_line(one: Verification, tries: "Tries | None") -> JsonLine:
    return JsonLine(
        task=one.task,
        states=one.states,
        ok=one.ok,
        reason=one.reason,
        warning=one.warning,
        verdict_kind=one.verdict_kind,
        seconds=one.seconds,
        agent_s=one.agent_s,
        num_tests=one.num_tests,
        num_controlled=one.num_controlled,
        num_needing_fix=one.num_needing_fix,
        num_uncontrolled=one.num_uncontrolled,
        control=one.control,
        tries={
            state: [
                JsonTry(found=each.found, why=each.why, tests=each.reward.tests if each.reward else {})
                for each in made
            ]
            for state, made in (tries or {}).items()
        },
        weakness=one.weakness,
        num_partial_fixes=one.strength.num_partial_fixes if one.strength else 0,
        passing_partial_fixes=one.strength.passing if one.strength else (),
        weakness_interval=one.weakness_interval,
        in_fix=one.in_fix,
        from_package=one.from_package,
    )
