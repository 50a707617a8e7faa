"""What a run knows of its tasks from their verification: `tasks.jsonl` in the directory of the run.

Only how a task stands and how many tests and patches there were: nothing that would tell the known fix or the hidden tests, so it
can be read by anybody who may see the problems.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

FILE = "tasks.jsonl"

Standing = Literal["ok", "never", "changed", "wrong"]
"""ok: verified as it is. never: not verified. changed: since it was verified. wrong: verification found its grader wrong."""


class TaskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one task. The numbers are 0 where it was never verified, or has changed since."""

    task_id: str
    verified: Standing
    num_tests: int = 0  # that the known fix passes in every run
    num_controlled: int = 0  # of these, tests that can be made to fail by a contradiction
    num_flaky: int = 0  # tests that passed in some runs of the known fix only
    num_partial_fixes: int = 0  # wrong patches, made of the known fix, that were graded
    weakness: float | None = None  # the share of them that passed; None: it was not measured


def write_facts(run_dir: Path, facts: Iterable[TaskFacts]) -> None:
    """Replaces what an earlier process of the run wrote."""
    partial = run_dir / f".{FILE}.{os.getpid()}"
    partial.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in facts))
    partial.replace(run_dir / FILE)


def read_facts(run_dir: Path) -> dict[str, TaskFacts]:
    """By task id. None of a run that is older than this file, or whose file is damaged."""
    try:
        lines = (run_dir / FILE).read_bytes().splitlines()
        return {one.task_id: one for one in (msgspec.json.decode(line, type=TaskFacts) for line in lines)}
    except (OSError, msgspec.DecodeError):
        return {}
