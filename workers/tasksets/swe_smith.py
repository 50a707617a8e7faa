"""Rows of SWE-smith datasets: working code and the `patch` that breaks it; the solution reverses the patch.

The published way fetches a branch for each task when it is played. Here the patch is the task's set-up, in the image of the working code,
and nothing is fetched. A test that is missing from the log counts as failed.

Names of pytest's tests say their files: the agent's container lacks those of tests that the bug breaks, the grader's container has them.
Repositories in other languages are run as the swesmith package's profile says. Few of their names of tests say a file: the agent sees all
tests.
"""

import re
import shlex

from pipeline.task import Resources, SwebenchLog, Task
from pipeline.taskfile import Gold
from workers.grading import swe_smith
from workers.grading.packages import NotInPackage
from workers.tasksets.importing import Importer, Row, named_image
from workers.tasksets.patches import Irreversible, diff_in, reversed_patch
from workers.tasksets.rows import Fields
from workers.tasksets.swe_bench import END_MARK, ENV, START_MARK, WORKDIR

RESOURCES = Resources(memory_bytes=10 * 1024**3)  # SWE-smith's own limit for a container
# The publisher of the images while rows still had the names under which they were built
OLD_OWNER = "jyangballin"
OWNER = "swebench"
AS_BUILT = "swesmith."  # prefix of the names of images that SWE-smith builds, before they have a publisher

_INSTANCE_ID = re.compile(r"(?P<owner>.+?)__(?P<repo>.+)\.(?P<commit>[0-9a-f]{8})\.[^.]+")
_PYTEST_ID = re.compile(r"[^:\s/-][^:\0]*\.py::[^\0]+", re.DOTALL)
_EVAL_SCRIPT = """#!/bin/bash
cd {workdir}
{commands}
echo '{end}'
"""
# The last line of a name counts: pytest prints outcomes in the order of these letters, failures last.
_PYTEST = """[ -f /opt/miniconda3/bin/activate ] && source /opt/miniconda3/bin/activate && conda activate testbed
echo '{start}'
pytest --disable-warnings --color=no --tb=no -rpsxXEf {files}"""
_OF_PROFILE = """echo '{start}'
(
{command}
)"""


def task_of(fields: Fields) -> tuple[Task, Gold]:
    """The task and its solution, the reverse of the row's patch. Raises ValueError naming file, row and field."""
    fail_to_pass, pass_to_pass = fields.strings("FAIL_TO_PASS"), fields.strings("PASS_TO_PASS")
    if not fail_to_pass:
        raise fields.refusal("FAIL_TO_PASS", "empty: the bug breaks no test")
    for name, tests in (("FAIL_TO_PASS", fail_to_pass), ("PASS_TO_PASS", pass_to_pass)):
        if not all(tests):
            raise fields.refusal(name, "a test has no name")
    bug = diff_in(fields, "patch")
    repository = fields.text("instance_id").rpartition(".")[0]
    log_parser = f"{swe_smith.PREFIX}{repository}"
    if swe_smith.is_parser(log_parser):
        hidden = files = ()
        commands = _OF_PROFILE.format(start=START_MARK, command=_command(fields, repository))
    else:
        hidden = _files(fields, "FAIL_TO_PASS", fail_to_pass)
        files = tuple(dict.fromkeys((*hidden, *_files(fields, "PASS_TO_PASS", pass_to_pass))))
        commands = _PYTEST.format(start=START_MARK, files=shlex.join(files))
        log_parser = "parse_log_pytest"
    task = Task(
        id=f"swe-smith:{fields.text('instance_id')}",
        repo=fields.text("repo"),
        base_commit="",  # the image has the working code checked out; the row's own commit is only published elsewhere
        image=_image(fields),
        workdir=WORKDIR,
        problem=fields.text("problem_statement").strip(),
        verdict=SwebenchLog(
            eval_script=_EVAL_SCRIPT.format(workdir=WORKDIR, commands=commands, end=END_MARK),
            log_parser=log_parser,
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            repo=fields.text("repo"),
            protected_paths=files,
        ),
        setup_patch=bug.encode(),
        hidden_paths=hidden,
        resources=RESOURCES,
        env=ENV,
    )
    return task, Gold(id=task.id, patch=_solution(fields, bug))


def row_of(task: Task, gold: Gold) -> Row:
    """The row from which `task_of` makes `task`."""
    assert isinstance(task.verdict, SwebenchLog)
    return {
        "instance_id": task.id.partition(":")[2],
        "repo": task.repo,
        "patch": task.setup_patch.decode("utf-8", "surrogateescape"),
        "FAIL_TO_PASS": list(task.verdict.fail_to_pass),
        "PASS_TO_PASS": list(task.verdict.pass_to_pass),
        "image_name": task.image,
        "problem_statement": task.problem,
        "eval_script": task.verdict.eval_script,
    }


IMPORTER = Importer(
    help="rows of SWE-smith, in Python or another language",
    task_of=task_of,
    row_of=row_of,
    size=("problem_statement", "patch"),
)


def _command(fields: Fields, repository: str) -> str:
    try:
        return swe_smith.command(repository, fields.values)
    except NotInPackage as error:
        raise fields.refusal("instance_id", str(error)) from error


def _files(fields: Fields, name: str, tests: tuple[str, ...]) -> tuple[str, ...]:
    for test in tests:
        if not _PYTEST_ID.fullmatch(test) or {"..", ".git"}.intersection(test.split("::")[0].split("/")):
            raise fields.refusal(
                name,
                f"{test!r} names no test file (path.py::name), and swesmith has no profile in another language for instance_id",
            )
    return tuple(dict.fromkeys(test.split("::", 1)[0] for test in tests))


def _image(fields: Fields) -> str:
    """The row's own name, with its publisher if it is the name of a local build; otherwise the name by the rule."""
    name = named_image(fields)
    if name.startswith(AS_BUILT) and "/" not in name:
        return f"{OLD_OWNER}/{name.replace('__', '_1776_')}"
    if name:
        return name
    found = _INSTANCE_ID.fullmatch(fields.text("instance_id"))
    if not found:
        raise fields.refusal(
            "image_name", "absent, and instance_id is not owner__repo.commit.bug, which would tell it"
        )
    return f"{OWNER}/swesmith.x86_64.{found['owner']}_1776_{found['repo']}.{found['commit']}".lower()


def _solution(fields: Fields, bug: str) -> str:
    try:
        return reversed_patch(bug)
    except Irreversible as error:
        raise fields.refusal("patch", f"cannot be taken back: {error}") from error
