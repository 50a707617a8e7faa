"""Rows of SWE-bench Pro, with the two files that its repository keeps for each: the script that runs the tests, and the parser of their
output.

The rows alone cannot be graded. `--run-scripts DIR` names the repository's folder run_scripts, in which each task has
a folder with run_script.sh and parser.py.
"""

import argparse
import shlex
from pathlib import Path

from pipeline.task import File, Resources, Task, TestsJson
from pipeline.taskfile import Gold
from workers.tasksets.importing import GIT_ENV, Importer, Row, checkout, named_image
from workers.tasksets.patches import diff_in, optional_diff_in, paths_of
from workers.tasksets.rows import Fields

WORKDIR = "/app"
IMAGES = "jefzda/sweap-images"
RUN_SCRIPT = "/workspace/run_script.sh"  # SWE-bench Pro's path of it
RESOURCES = Resources(memory_bytes=16 * 1024**3)  # SWE-bench Pro gives 5 to 30 GiB
# The file of each asset, by the column that may contain it.
ASSETS = {
    "run_script": "run_script.sh",
    "parser": "parser.py",
}
TAG_CHARS = 128  # the longest tag that a registry allows
ELEMENT_WEB = "element-hq/element-web"
_OR_FAIL = " || exit 1"
FULL_ELEMENT_WEB = "instance_element-hq__element-web-ec0f940ef0e8e3b61078f145f34dc40d1938e6c5-vnan"


def task_of(fields: Fields) -> tuple[Task, Gold]:
    """The task and its solution. Raises ValueError naming file, row and field."""
    fail_to_pass = fields.strings("fail_to_pass")
    if not fail_to_pass:
        raise fields.refusal("fail_to_pass", "empty: a patch that does nothing would do")
    base_commit, test_patch = fields.text("base_commit"), optional_diff_in(fields, "test_patch")
    restore = fields.text("before_repo_set_cmd").strip().split("\n")[-1].strip()
    selected = fields.strings("selected_test_files_to_run")
    if not selected:
        raise fields.refusal("selected_test_files_to_run", "empty: there would be nothing to run")
    task = Task(
        id=f"swe-bench-pro:{fields.text('instance_id')}",
        repo=fields.text("repo"),
        base_commit=base_commit,
        image=_image(fields),
        workdir=WORKDIR,
        problem=_problem(fields),
        verdict=TestsJson(
            eval_script=_eval_script(restore, selected),
            parser=_asset(fields, "parser"),
            tests=tuple(dict.fromkeys((*fail_to_pass, *fields.strings("pass_to_pass")))),
            protected_paths=tuple(dict.fromkeys((*paths_of(test_patch), *_restored(fields, restore)))),
            files=(File(path=RUN_SCRIPT, content=_asset(fields, "run_script").encode(), mode=0o755),),
        ),
        setup_script=checkout(base_commit),
        resources=RESOURCES,
    )
    return task, Gold(id=task.id, patch=diff_in(fields, "patch"), test_patch=test_patch)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this source."""
    parser.add_argument(
        "--run-scripts",
        type=Path,
        metavar="DIR",
        help="the folder run_scripts of SWE-bench Pro's repository: a run_script.sh and a parser.py for each task",
    )


def with_run_scripts(rows: list[Fields], options: argparse.Namespace) -> list[Fields]:
    """The rows with the columns `run_script` and `parser`, which are read from the folder if a row has none.

    Raises ValueError if the folder does not exist. A row without files in it is kept, and refused when it is used; so is a
    row without an id, or whose files are not text.
    """
    directory: Path | None = options.run_scripts
    if directory is None:
        return rows
    if not directory.is_dir():
        raise ValueError(f"--run-scripts: {directory}: no such directory")
    return [fields if fields.broken else _with_assets(fields, directory) for fields in rows]


def row_of(task: Task, gold: Gold) -> Row:
    """A row from which `task_of` makes `task` without a folder of scripts."""
    verdict = task.verdict
    assert isinstance(verdict, TestsJson)
    (run_script,) = verdict.files
    *_, restore, run = verdict.eval_script.splitlines()
    return {
        "instance_id": task.id.partition(":")[2],
        "repo": task.repo,
        "base_commit": task.base_commit,
        "image_name": task.image,
        "problem_statement": task.problem,
        "patch": gold.patch,
        "test_patch": gold.test_patch,
        "fail_to_pass": repr(list(verdict.tests)),
        "pass_to_pass": "[]",
        "before_repo_set_cmd": restore.removesuffix(_OR_FAIL),
        "selected_test_files_to_run": repr(shlex.split(run)[-1].split(",")),
        "run_script": run_script.content.decode("utf-8", "surrogateescape"),
        "parser": verdict.parser,
    }


IMPORTER = Importer(
    help="rows of SWE-bench Pro; needs --run-scripts",
    task_of=task_of,
    row_of=row_of,
    complete=with_run_scripts,
    add_options=add_options,
)


def _eval_script(restore: str, selected: tuple[str, ...]) -> str:
    """Checks the hidden tests out of the commit that added them, then runs SWE-bench Pro's own script."""
    return f"""{GIT_ENV}
cd {WORKDIR}
{restore}{_OR_FAIL}
bash {RUN_SCRIPT} {shlex.quote(",".join(selected))}
"""


def _restored(fields: Fields, restore: str) -> list[str]:
    """The paths in `git checkout COMMIT -- PATHS`."""
    try:
        words = shlex.split(restore)
    except ValueError as error:
        raise fields.refusal("before_repo_set_cmd", f"its last line is not a command: {error}") from error
    return words[words.index("--") + 1 :] if words[:2] == ["git", "checkout"] and "--" in words else []


def _problem(fields: Fields) -> str:
    """SWE-bench Pro's prompt: the problem, the requirements, and the names that the tests call."""
    parts = [fields.text("problem_statement")]
    for heading, name in (("Requirements", "requirements"), ("New interfaces introduced", "interface")):
        text = fields.optional_text(name)
        parts += [f"{heading}:\n{text}"] if text.strip() else []
    return "\n\n".join(parts)


def _image(fields: Fields) -> str:
    """The row's own name, otherwise the name by its tag, otherwise the name by the rule for tags."""
    if name := named_image(fields):
        return name
    tag = fields.optional_text("dockerhub_tag").strip() or _tag(fields)
    return f"{IMAGES}:{tag}"


def _tag(fields: Fields) -> str:
    instance_id, repo = fields.text("instance_id"), fields.text("repo").lower()
    owner, slash, name = repo.partition("/")
    if not slash:
        raise fields.refusal(
            "dockerhub_tag", f"absent, and repo is not owner/name, which would tell it: {repo!r}"
        )
    version = instance_id.removeprefix("instance_")
    if instance_id != FULL_ELEMENT_WEB:
        version = version.removesuffix("-vnan")
        name = "element" if repo == ELEMENT_WEB else name
    return f"{owner}.{name}-{version}"[:TAG_CHARS]


def _with_assets(fields: Fields, directory: Path) -> Fields:
    try:
        folder = directory / fields.text("instance_id")
        found = {
            column: _read(fields, column, folder / file)
            for column, file in ASSETS.items()
            if not fields.optional_text(column) and (folder / file).is_file()
        }
    except ValueError as error:
        return fields.broken_by(error)
    return fields.having(**found)


def _read(fields: Fields, column: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not text in UTF-8: {error}"
        raise fields.refusal(column, f"{file}: {reason}") from error


def _asset(fields: Fields, column: str) -> str:
    if not fields.optional_text(column).strip():
        raise fields.refusal(
            column, f"absent: --run-scripts DIR must have {fields.text('instance_id')}/{ASSETS[column]}"
        )
    return fields.text(column)
