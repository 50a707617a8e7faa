"""Rows of SWE-bench datasets in the form of swebench 5.x: with `image`, `eval_script`, `log_parser` and
`eval_type`.

Older rows lack these four; the swebench 4.x package renders them, in an environment of its own.
"""

import json
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pipeline.task import SwebenchLog, Task
from pipeline.taskfile import Gold
from trainer.tasksets.fields import Fields
from trainer.tasksets.patches import paths_of

WORKDIR = "/testbed"
ENV = {"BASH_ENV": "/root/.bashrc"}  # where these images activate the environment that the tests need
EVAL_TYPES = get_args(get_type_hints(SwebenchLog)["eval_type"])


def import_swe_bench(file: Path) -> tuple[list[Task], list[Gold]]:
    """Tasks and their solutions, one a row of a JSONL file. Raises ValueError naming line and field."""
    tasks: list[Task] = []
    golds: list[Gold] = []
    seen: set[str] = set()
    for number, line in enumerate(file.read_text().split("\n"), 1):
        if not line.strip():
            continue
        fields = Fields(f"{file}:{number}", _row(file, number, line))
        task = _task(fields)
        if task.id in seen:
            raise ValueError(f"{fields.where}: instance_id: {fields.text('instance_id')!r} was there before")
        seen.add(task.id)
        tasks.append(task)
        golds.append(Gold(id=task.id, patch=fields.text("patch")))
    return tasks, golds


def _row(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}:{number}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{file}:{number}: must be a JSON object")
    return row


def _task(fields: Fields) -> Task:
    eval_type = fields.text("eval_type")
    if eval_type not in EVAL_TYPES:
        raise ValueError(f"{fields.where}: eval_type: must be one of {EVAL_TYPES}, is {eval_type!r}")
    fail_to_pass, pass_to_pass = fields.strings("FAIL_TO_PASS"), fields.strings("PASS_TO_PASS")
    if not fail_to_pass and not pass_to_pass:
        raise ValueError(f"{fields.where}: FAIL_TO_PASS: empty, and so is PASS_TO_PASS: any patch would do")
    return Task(
        id=f"swe-bench:{fields.text('instance_id')}",
        repo=fields.text("repo"),
        base_commit=fields.text("base_commit"),
        image=fields.text("image"),
        workdir=WORKDIR,
        problem=fields.text("problem_statement"),
        verdict=SwebenchLog(
            eval_script=fields.text("eval_script"),
            log_parser=fields.text("log_parser"),
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            eval_type=eval_type,
            repo=fields.text("repo"),
            version=fields.optional_text("version"),
            protected_paths=paths_of(fields.text("test_patch")),
        ),
        env=ENV,
    )
