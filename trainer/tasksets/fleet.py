"""Tasks of fleet-ai's swe-task-generator: `DIR/task_*/task.json` beside a Dockerfile and a copy of the eval
script.

As published, the eval script runs whatever tests the container has; it does not bring the hidden ones. So the
hidden tests (`test_patch`) go into the verdict, to be applied by the grader, and their files are protected.
"""

import json
import re
from pathlib import Path

from pipeline.task import ExitCode, Task
from pipeline.taskfile import Gold
from trainer.tasksets.fields import Fields
from trainer.tasksets.patches import paths_of

WORKDIR = "/workspace"
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(/\S*)", re.MULTILINE | re.IGNORECASE)
_FILES_CHANGED = re.compile(
    r"^##[ \t]+files changed\b.*?(?=^#{1,2}[ \t]|\Z)", re.MULTILINE | re.DOTALL | re.IGNORECASE
)


def import_fleet(directory: Path) -> tuple[list[Task], list[Gold]]:
    """Tasks and their solutions, by folder name. Raises ValueError naming file and field; unknown fields are
    ignored.
    """
    files = sorted(directory.glob("task_*/task.json"))
    if not files:
        raise ValueError(f"{directory}: no task_*/task.json in it")
    tasks: list[Task] = []
    golds: list[Gold] = []
    first: dict[str, Path] = {}
    for file in files:
        fields = _fields(file)
        instance_id = fields.text("instance_id")
        if instance_id in first:
            raise ValueError(f"{file}: instance_id: {instance_id!r} is that of {first[instance_id]} too")
        first[instance_id] = file
        tasks.append(_task(fields, file.with_name("Dockerfile")))
        golds.append(
            Gold(id=tasks[-1].id, patch=fields.optional_text("fix_patch") or fields.text("gold_patch"))
        )
    return tasks, golds


def _fields(file: Path) -> Fields:
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: must be a JSON object")
    return Fields(str(file), values)


def _task(fields: Fields, dockerfile: Path) -> Task:
    fields.text("gold_patch")
    test_patch = fields.text("test_patch")
    protected = dict.fromkeys((*fields.strings("test_files"), *paths_of(test_patch)))
    return Task(
        id=f"fleet:{fields.text('instance_id')}",
        repo=fields.text("repo"),
        base_commit=fields.text("base_commit"),
        image=fields.text("image_name"),
        workdir=_workdir(dockerfile),
        problem=_without_files_changed(fields.text("problem_statement")),
        verdict=ExitCode(
            eval_script=fields.text("eval_script"),
            test_patch=test_patch.encode("utf-8", "surrogateescape"),
            protected_paths=tuple(protected),
        ),
    )


def _workdir(dockerfile: Path) -> str:
    """The last WORKDIR, for that is where commands run."""
    found = _WORKDIR.findall(dockerfile.read_text()) if dockerfile.exists() else []
    return found[-1] if found else WORKDIR


def _without_files_changed(problem: str) -> str:
    """`problem` less its list of changed files, which gives the place of the fix away."""
    return _FILES_CHANGED.sub("", problem).strip()
