"""Tasks of fleet-ai's swe-task-generator: `task_*/task.json` beside a Dockerfile and a copy of the eval script, or rows that either of its
two prepare_dataset scripts made from them.

The published eval script runs the tests in the container and does not contain the hidden ones. So the hidden tests (`test_patch`) go into
the verdict, for the grader to apply, and their files are protected. The generator considers any file with "test" in its path a test; a file
that is not one, such as latest.py, becomes part of the solution.
"""

import json
import re
from pathlib import Path

from pipeline.task import ExitCode, Task
from pipeline.taskfile import Gold
from workers.tasksets.importing import (
    Importer,
    Row,
    hidden_tests,
    is_plain_path,
    named_image,
    named_workdir,
)
from workers.tasksets.patches import diff_in, divided, optional_diff_in, paths_of
from workers.tasksets.rows import Fields, read_rows

WORKDIR = "/workspace"  # the generator's images have it; prepared rows do not contain it
HIDDEN_PATHS = ("/eval_script.sh",)  # every image contains a copy
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(.*?)\s*$", re.MULTILINE | re.IGNORECASE)
_FILES_CHANGED = re.compile(
    r"^##[ \t]+files changed\b.*?(?=^#{1,2}[ \t]|\Z)", re.MULTILINE | re.DOTALL | re.IGNORECASE
)
_NO_TESTS = re.compile(r"latest|fastest|greatest|contest|attest|protest|detest", re.IGNORECASE)
_TESTS = re.compile(r"test|(?:^|[/_.-])specs?(?:[/_.-]|$)", re.IGNORECASE)
_PLACED_AS_TEST = re.compile(
    r"(?:^|/)(?:tests?|testing|test[_-]?(?:data|utils?|helpers?)|__tests__|specs?)/|(?:^|/)(?:test_|conftest\.)[^/]*$|(?:[_.-](?:test|spec)|Tests?)\.\w+$"
)


def read(path: Path, split: str | None) -> list[Fields]:
    """The tasks of the directories under `path`, sorted by name; if there are none, the rows of the data set at `path`. Only data sets have
    splits. Raises ValueError naming the path.
    """
    files = sorted(path.glob("task_*/task.json")) or sorted(path.glob("tasks/task_*/task.json"))
    if files and split is not None:
        raise ValueError(f"{path}: --split {split}: task directories have no splits; leave it out")
    if files:
        return [_directory(file) for file in files]
    try:
        return read_rows(path, split)
    except ValueError as error:
        none = f"{path}: no task_*/task.json in it; and as rows: " if path.is_dir() else ""
        raise ValueError(f"{none}{error}") from error


def task_of(fields: Fields) -> tuple[Task, Gold]:
    """The task and its solution. Raises ValueError naming file and field; unknown fields are ignored."""
    fix, tests = _patches(fields)
    listed = (path for path in fields.strings("test_files") if _is_test(path))
    task = Task(
        id=f"fleet:{fields.text('instance_id')}",
        repo=fields.text("repo"),
        base_commit=fields.text("base_commit"),
        image=named_image(fields) or fields.text("image_name"),
        workdir=named_workdir(fields, WORKDIR),
        problem=_without_files_changed(fields),
        verdict=ExitCode(
            eval_script=fields.script("eval_script"),
            test_patch=tests.encode(),
            protected_paths=tuple(dict.fromkeys((*listed, *paths_of(tests)))),
        ),
        hidden_paths=HIDDEN_PATHS,
        user=fields.optional_text("user"),
    )
    return task, Gold(id=task.id, patch=fix, test_patch=tests)


def row_of(task: Task, gold: Gold) -> Row:
    """The row from which `task_of` makes `task`."""
    assert isinstance(task.verdict, ExitCode)
    fix, tests = gold.patch, hidden_tests(task, gold)
    return {
        "instance_id": task.id.partition(":")[2],
        "repo": task.repo,
        "base_commit": task.base_commit,
        "problem_statement": task.problem,
        "gold_patch": fix + tests,
        "fix_patch": fix,
        "test_patch": tests,
        "test_files": list(task.verdict.protected_paths),
        "workdir": task.workdir,
        "user": task.user,
    }


IMPORTER = Importer(
    help="swe-task-generator's task directories, or rows that a prepare_dataset script made of them",
    task_of=task_of,
    row_of=row_of,
    read=read,
    size=("problem_statement", "gold_patch"),
)


def _directory(file: Path) -> Fields:
    """task.json with a `workdir`: its own, otherwise the Dockerfile's last WORKDIR, otherwise "", which means the image's own."""
    try:
        values = json.loads(file.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        return Fields(str(file), {}, broken=f"not JSON: {error}")
    if not isinstance(values, dict):
        return Fields(str(file), {}, broken="must be a JSON object")
    dockerfile = file.with_name("Dockerfile")
    text = dockerfile.read_text("utf-8", "replace") if dockerfile.exists() else ""
    found: list[str] = _WORKDIR.findall(text)
    last = found[-1].strip("\"'") if found else ""
    return Fields(str(file), {"workdir": last if is_plain_path(last) else "", **values})


def _patches(fields: Fields) -> tuple[str, str]:
    """The solution without tests, and the tests. A part that has no field of its own is taken from `gold_patch`."""
    gold = diff_in(fields, "gold_patch")
    listed = fields.strings("test_files")
    tests, no_tests = divided(optional_diff_in(fields, "test_patch"), _is_test)
    if not tests:
        tests, rest = divided(gold, lambda path: _is_test(path) and (path in listed or not listed))
        if not listed and not rest.strip():  # every path contains "test", as in pytest's own src/_pytest
            tests, _ = divided(gold, is_placed_as_test)
    if not tests.strip():
        raise fields.refusal("test_patch", "must be a non-empty string: gold_patch has no tests in it either")
    hidden = paths_of(tests)
    fix = optional_diff_in(fields, "fix_patch")
    if fix:
        return fix + (no_tests if not set(paths_of(no_tests)) & set(paths_of(fix)) else ""), tests
    _, fix = divided(gold, lambda path: path in hidden or (path in listed and _is_test(path)))
    if not fix.strip():
        raise fields.refusal("gold_patch", "has nothing but tests in it")
    return fix, tests


def _is_test(path: str) -> bool:
    """Whether the path may be a test: the generator's own rule, without words that happen to contain "test"."""
    return _TESTS.search(_NO_TESTS.sub("", path)) is not None


def is_placed_as_test(path: str) -> bool:
    """Whether test runners would look for the file, by its name or its directory."""
    return _PLACED_AS_TEST.search(path) is not None


def _without_files_changed(fields: Fields) -> str:
    """The problem without its list of changed files, which reveals the location of the fix."""
    problem = _FILES_CHANGED.sub("", fields.text("problem_statement")).strip()
    if not problem:
        raise fields.refusal("problem_statement", "says nothing but which files changed")
    return problem
