"""SWE-bench (full, Lite, Verified, Multilingual): rows, or the task repository that swebench 5.x keeps on disk.

Rows of 5.x have `image`, `eval_script`, `log_parser` and `eval_type`. Older rows lack them: the id determines the image's name, the
repository determines how a log is judged, and swebench 4.1.0 renders the rest once, at import.
"""

import difflib
import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any, cast, get_args

from pipeline.task import EvalType, SwebenchLog, Task
from pipeline.taskfile import Gold
from workers.tasksets.importing import Importer, Row, hidden_tests, named_image, named_workdir
from workers.tasksets.patches import diff_in, paths_of
from workers.tasksets.rendering import rendered
from workers.tasksets.rows import Fields, read_rows

# fmt: off
_FORMATS = (
    # python
    "astroid", "astropy", "django", "flask", "marshmallow", "matplotlib", "pvlib", "pydicom", "pylint",
    "pytest", "pytest_options", "pytest_v2", "pyvista", "requests", "scikit", "seaborn", "sphinx",
    "sqlfluff", "sympy", "xarray",
    # javascript
    "bpmn_js", "calypso", "carbon", "chart_js", "eslint", "grommet", "highlightjs", "immutable_js", "jest",
    "jest_json", "karma", "lighthouse", "marked", "next", "openlayers", "p5js", "prismjs", "quarto_cli",
    "react_pdf", "tap", "vitest",
    # c
    "doctest", "googletest", "jq", "micropython_test", "redis",
    # go, java, php, ruby, rust
    "ant", "cargo", "cucumber", "gotest", "gradle_custom", "jekyll", "maven", "minitest", "phpunit",
    "rspec_transformed_json", "ruby_unit",
)
# fmt: on
LOG_PARSERS = frozenset(f"parse_log_{name}" for name in _FORMATS)
# A test that the log of such a repository does not name counts as passed (eval_type fail_only).
FAIL_ONLY_REPOS = frozenset(
    {
        "bpmn-io/bpmn-js",
        "chartjs/Chart.js",
        "eslint/eslint",
        "markedjs/marked",
        "openlayers/openlayers",
        "processing/p5.js",
    }
)


def known_parser(fields: Fields, name: str) -> str:
    """`name`; raises ValueError if swebench has no parser with this name."""
    if name in LOG_PARSERS:
        return name
    near = difflib.get_close_matches(name, LOG_PARSERS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(LOG_PARSERS))}"
    raise fields.refusal("log_parser", f"swebench has no {name!r}; {hint}")


WORKDIR = "/testbed"
# This file activates the environment that the tests need, in images that have one.
ENV = {"BASH_ENV": "/root/.bashrc"}
START_MARK = ">>>>> Start Test Output"
END_MARK = ">>>>> End Test Output"
_ENTERED = re.compile(r"^\s*cd\s+[\"']?(/[\w.+-][\w./+-]*)", re.MULTILINE)
EVAL_TYPES: dict[str, EvalType] = {name: name for name in get_args(EvalType)}
_FILES = {  # columns that a task repository keeps in files of their own
    "patch": "gold.patch",
    "test_patch": "test.patch",
    "eval_script": "eval.sh",
    "problem_statement": "problem_statement.md",
}


def read(path: Path, split: str | None) -> list[Fields]:
    """The rows, or the published tasks of a task repository. Raises ValueError naming the path."""
    if (path / "sweb.yaml").exists() or any(path.glob("tasks/*/task.yaml")):
        return _task_repository(path, split)
    return read_rows(path, split)


def complete(rows: list[Fields], options: Namespace) -> list[Fields]:
    """`rows` with the columns of 5.x rows. Raises ValueError if they have to be rendered and that is impossible here."""
    lacking = {number: row for number, row in enumerate(rows) if _lacks_grader(row)}
    made = dict(zip(lacking, rendered(list(lacking.values())), strict=True))
    return [made.get(number, row) for number, row in enumerate(rows)]


def task_of(fields: Fields) -> tuple[Task, Gold]:
    """The task and its solution. Raises ValueError naming file, row and field."""
    instance_id = fields.text("instance_id")
    task = Task(
        id=f"swe-bench:{instance_id}",
        repo=fields.text("repo"),
        base_commit=fields.text("base_commit"),
        image=named_image(fields) or image_of(instance_id),
        workdir=workdir_of(fields),
        problem=fields.text("problem_statement"),
        verdict=log_verdict(fields, fields.text("log_parser")),
        env=ENV,
        builder_commits=True,
    )
    return task, Gold(id=task.id, patch=diff_in(fields, "patch"), test_patch=diff_in(fields, "test_patch"))


def row_of(task: Task, gold: Gold) -> Row:
    """The row from which `task_of` makes `task`, in swebench 5.x's format."""
    verdict = task.verdict
    row = {
        "instance_id": task.id.partition(":")[2],
        "repo": task.repo,
        "base_commit": task.base_commit,
        "problem_statement": task.problem,
        "patch": gold.patch,
        "test_patch": hidden_tests(task, gold),
        "image": task.image,
        "workdir": task.workdir,
    }
    if isinstance(verdict, SwebenchLog):
        row |= {
            "version": verdict.version,
            "FAIL_TO_PASS": list(verdict.fail_to_pass),
            "PASS_TO_PASS": list(verdict.pass_to_pass),
            "log_parser": verdict.log_parser,
            "eval_type": verdict.eval_type,
        }
    return row


def marked_script(fields: Fields) -> str:
    """The row's own eval script. Raises ValueError if it does not print both marks around the output of its tests."""
    script = fields.script("eval_script")
    for mark in (END_MARK, START_MARK):
        if mark not in script:
            raise fields.refusal("eval_script", f"does not print {mark!r}: no log of it would be accepted")
    return script


IMPORTER = Importer(
    help="rows of SWE-bench (full, Lite, Verified, Multilingual), or a task repository of swebench 5.x",
    task_of=task_of,
    row_of=row_of,
    read=read,
    complete=complete,
)


def log_verdict(fields: Fields, log_parser: str) -> SwebenchLog:
    """The row's eval script, judged by its log. Raises ValueError for one that would pass or fail any patch."""
    eval_script = marked_script(fields)
    by_repo = "fail_only" if fields.text("repo") in FAIL_ONLY_REPOS else "pass_and_fail"
    named = fields.optional_text("eval_type").strip() or by_repo
    eval_type = EVAL_TYPES.get(named)
    if eval_type is None:
        raise fields.refusal("eval_type", f"must be one of {', '.join(EVAL_TYPES)}, is {named!r}")
    assets = fields.mapping("image_assets")
    if assets.get("test_patch") or assets.get("patch"):
        raise fields.refusal(
            "image_assets", "binary files for the tests cannot be staged: leave this row out"
        )
    fail_to_pass = fields.strings("FAIL_TO_PASS")
    if not fail_to_pass:
        raise fields.refusal("FAIL_TO_PASS", "empty: a patch that does nothing would do")
    return SwebenchLog(
        eval_script=eval_script,
        log_parser=known_parser(fields, log_parser),
        fail_to_pass=fail_to_pass,
        pass_to_pass=fields.strings("PASS_TO_PASS"),
        eval_type=eval_type,
        repo=fields.text("repo"),
        version=fields.optional_text("version"),
        protected_paths=paths_of(diff_in(fields, "test_patch")),
    )


def image_of(instance_id: str) -> str:
    """The published image's name, by rule."""
    return f"docker.io/swebench/sweb.eval.x86_64.{instance_id.replace('__', '_1776_')}:latest".lower()


def workdir_of(fields: Fields) -> str:
    """The row's own `workdir`, otherwise the directory that its eval script enters first. A script that enters none runs in the image's own
    directory, if the row names the image, and otherwise in WORKDIR. Raises ValueError.
    """
    entered = _ENTERED.search(fields.text("eval_script"))
    return named_workdir(
        fields, entered[1].rstrip("/") if entered else "" if named_image(fields) else WORKDIR
    )


def _lacks_grader(row: Fields) -> bool:
    return not row.broken and not all(row.values.get(name) for name in ("eval_script", "log_parser"))


def _task_repository(path: Path, split: str | None) -> list[Fields]:
    """Tasks in the splits that sweb.yaml publishes, or in `split`, by name."""
    tasks = {file: _task(file) for file in sorted(path.glob("tasks/*/task.yaml"))}
    published = _yaml(path / "sweb.yaml").get("splits", ["test"]) if (path / "sweb.yaml").exists() else None
    wanted = published if split is None else [split]
    chosen = [
        _with_files(file.parent, task)
        for file, task in tasks.items()
        if task.broken or wanted is None or task.values.get("split") in wanted
    ]
    if not chosen:
        known = {str(task.values.get("split")) for task in tasks.values()}
        raise ValueError(
            f"{path}: no task of split {' or '.join(wanted or ())} in it; there are {', '.join(sorted(known))}"
        )
    return chosen


def _task(file: Path) -> Fields:
    try:
        return Fields(str(file.parent), _yaml(file))
    except ValueError as error:
        return Fields(str(file.parent), {}, broken=str(error).removeprefix(f"{file.parent}/"))


def _with_files(directory: Path, task: Fields) -> Fields:
    if task.broken:
        return task
    try:
        texts = {column: _text(directory / name) for column, name in _FILES.items()}
        return task.having(**_tests(directory / "tests.json"), **texts)
    except ValueError as error:
        return Fields(task.where, {}, broken=str(error).removeprefix(f"{directory}/"))


def _tests(file: Path) -> dict[str, Any]:
    try:
        tests: Any = json.loads(_text(file).removeprefix("\ufeff"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON: {error}") from error
    if not isinstance(tests, dict):
        raise ValueError(f"{file}: must be a JSON object")
    return cast(dict[str, Any], tests)


def _yaml(file: Path) -> dict[str, Any]:
    """The content of a YAML file, every scalar as its text: version 3.10 is not 3.1."""
    import yaml

    try:
        value: Any = yaml.load(_text(file), yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: must be a YAML mapping")
    return cast(dict[str, Any], value)


def _text(file: Path) -> str:
    """The text with its line ends unchanged: a patch may need them."""
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{file}: cannot be read: {reason}") from error
