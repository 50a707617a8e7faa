"""What a verification leaves on disk besides TASKS.verified.jsonl: --json, --passing and --logs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeline.task import Task
from pipeline.taskfile import (
    Found,
    Gold,
    State,
    Verification,
    gold_path,
    verified_path,
    write_gold,
    write_tasks,
    write_verified,
)
from workers.unqueued.outputs import LogDirectory, must_be_writable, writing

if TYPE_CHECKING:
    from workers.verify.states import Tries


class JsonTry(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict on one state. `tests` has the outcome of each test by name, "" for one that the log does not mention."""

    found: Found
    why: str
    tests: dict[str, str]


class JsonLine(msgspec.Struct, frozen=True, kw_only=True):
    """One element of --json's list. `tries` is empty for a task that --new left out. `weakness` is the share of partial fixes that
    pass, None if it was not measured.
    """

    task: str
    states: dict[State, Found]
    ok: bool
    reason: str
    warning: str
    verdict_kind: str
    seconds: float
    num_tests: int  # that the known fix passes in every run
    num_controlled: int  # of these, tests that can be made to fail by a contradiction
    tries: dict[State, list[JsonTry]]
    weakness: float | None
    num_partial_fixes: int
    passing_partial_fixes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where results go; None: nowhere."""

    json: Path | None
    passing: Path | None
    logs: LogDirectory

    def check(self) -> None:
        """Raises Unwritable for anything that could not be written later. Makes the directory for logs, writes nothing else."""
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
        """A task file of the tasks that are ok, with their solutions and verifications."""
        if self.passing:
            passing = [(task, one) for task, one in zip(tasks, found, strict=True) if one.ok]
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
        num_tests=one.num_tests,
        num_controlled=one.num_controlled,
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
    )
