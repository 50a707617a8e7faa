"""Rows of Multi-SWE-bench and Multi-SWE-RL: pull requests in C, C++, Go, Java, JavaScript, Rust, TypeScript and more.

The multi-swe-bench package knows the image of each pull request, the script that runs its tests, and the parser of the log. The image has
solution and hidden tests in /home. They are removed from every container, and the eval script puts the hidden tests there again.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pipeline.task import SwebenchLog, Task
from pipeline.taskfile import Gold
from workers.grading import multi_swe_bench
from workers.grading.multi_swe_bench import Environment
from workers.grading.packages import NotInPackage
from workers.tasksets.importing import GIT_ENV, Importer, Row, named_image
from workers.tasksets.patches import diff_in, paths_of
from workers.tasksets.rows import Fields
from workers.tasksets.swe_bench import END_MARK, START_MARK, marked_script

TEST_PATCH, FIX_PATCH = "/home/test.patch", "/home/fix.patch"
# Tests that pass with the solution, and failed, were skipped or did not exist without it.
FAIL_TO_PASS = ("f2p_tests", "s2p_tests", "n2p_tests")
_ENTERED = re.compile(r"^\s*cd\s+(/\S+)", re.MULTILINE)
_APPLIES = re.compile(rf"git (?:-C \S+ )?apply [^\n;&|]*{re.escape(TEST_PATCH)}")
_EVAL_SCRIPT = """#!/bin/bash
{git_env}
cd {workdir}
cat >{test_patch} <<'{delimiter}'
{patch}{delimiter}
{applied}
echo '{start}'
(
{commands}
)
echo '{end}'
"""


def task_of(fields: Fields) -> tuple[Task, Gold]:
    """The task and its solution. Raises ValueError naming file, row and field."""
    org, repo, number = fields.text("org"), fields.text("repo"), _number(fields)
    fail_to_pass = tuple(name for column in FAIL_TO_PASS for name in _tests(fields, column))
    if not fail_to_pass:
        raise fields.refusal(
            "f2p_tests", "empty, as s2p_tests and n2p_tests are: a patch that does nothing would do"
        )
    registered = _registered(fields)
    try:
        environment = multi_swe_bench.environment(org, repo, number, registered)
    except NotInPackage as error:
        raise fields.refusal("repo", str(error)) from error
    if len(_APPLIES.findall(environment.test_run)) != 1:
        raise fields.refusal("repo", f"the script of {org}/{registered} does not apply {TEST_PATCH} once")
    entered = _ENTERED.search(environment.test_run)
    workdir = entered[1].rstrip(";") if entered else f"/home/{repo}"
    test_patch = diff_in(fields, "test_patch")
    task = Task(
        id=f"multi-swe-bench:{id_of(fields)}",
        repo=f"{org}/{repo}",
        base_commit=_base_commit(fields),
        image=named_image(fields) or environment.image,
        workdir=workdir,
        problem=_problem(fields),
        verdict=SwebenchLog(
            eval_script=marked_script(fields)
            if fields.optional_text("eval_script")
            else _eval_script(environment, workdir, test_patch),
            log_parser=f"{multi_swe_bench.PREFIX}{org}/{registered}",
            fail_to_pass=fail_to_pass,
            pass_to_pass=_tests(fields, "p2p_tests"),
            repo=f"{org}/{repo}",
            version=str(number),
            protected_paths=paths_of(test_patch),
        ),
        # Code under test must not find the solution either, so the grader's container lacks it, too.
        setup_script=f"rm -f {FIX_PATCH} {TEST_PATCH}\n",
        hidden_paths=(FIX_PATCH, TEST_PATCH),
    )
    return task, Gold(id=task.id, patch=diff_in(fields, "fix_patch"), test_patch=test_patch)


def row_of(task: Task, gold: Gold) -> Row:
    """A row from which `task_of` makes `task`."""
    verdict = task.verdict
    assert isinstance(verdict, SwebenchLog)
    org, _, repo = task.repo.partition("/")
    registered = verdict.log_parser.rpartition("/")[2]
    return {
        "org": org,
        "repo": repo,
        "number": int(verdict.version),
        "number_interval": "" if registered == repo else registered,
        "instance_id": task.id.partition(":")[2],
        "base": {"sha": task.base_commit},
        "image_name": task.image,
        "eval_script": verdict.eval_script,
        "problem_statement": task.problem,
        "fix_patch": gold.patch,
        "test_patch": gold.test_patch,
        "f2p_tests": {name: {} for name in verdict.fail_to_pass},
        "p2p_tests": {name: {} for name in verdict.pass_to_pass},
    }


def id_of(fields: Fields) -> str:
    """The package's name of the pull request. Raises ValueError."""
    return f"{fields.text('org')}__{fields.text('repo')}-{_number(fields)}"


IMPORTER = Importer(
    help="rows of Multi-SWE-bench or Multi-SWE-RL",
    task_of=task_of,
    row_of=row_of,
    id_of=id_of,
    size=("body", "fix_patch", "test_patch"),
)


def _number(fields: Fields) -> int:
    number = fields.value("number")
    if not isinstance(number, int) or isinstance(number, bool):
        raise fields.refusal("number", f"must be the number of the pull request, is {number!r}")
    return number


def _registered(fields: Fields) -> str:
    """The name of the class in the package: for some repositories there is one for each range of pull requests, or for each release."""
    if interval := fields.optional_text("number_interval"):
        return interval
    tag = fields.optional_text("tag")
    return f"{fields.text('repo')}_{tag.replace('.', '_')}" if tag else fields.text("repo")


def _base_commit(fields: Fields) -> str:
    commit = fields.mapping("base").get("sha")
    if not isinstance(commit, str) or not commit:
        raise fields.refusal("base", f"sha must be the commit before the pull request, is {commit!r}")
    return commit


def _tests(fields: Fields, name: str) -> tuple[str, ...]:
    """The names of tests: the keys of an object, or the list `name` of an object of lists, as Arrow stores the same."""
    found = fields.mapping(name)
    # Arrow gives each row the keys of all rows, without a value.
    keys = [key for key, value in found.items() if value is not None]
    names = found["name"] if isinstance(found.get("name"), list) else keys
    if not all(isinstance(one, str) and one for one in cast(list[object], names)):
        raise fields.refusal(name, "its names of tests must be strings that are not empty")
    return tuple(dict.fromkeys(cast(list[str], names)))


def _problem(fields: Fields) -> str:
    """The row's own problem, if it has one as exported rows do; otherwise the issues that the pull request resolves, each with its title
    and text.
    """
    if given := fields.optional_text("problem_statement").strip():
        return given
    found: Any = fields.value("resolved_issues")
    if isinstance(found, Mapping):
        columns: list[Any] = [cast(Mapping[str, Any], found).get(part) for part in ("title", "body")]
        if not all(isinstance(column, list) for column in columns) or len({*map(len, columns)}) > 1:
            raise fields.refusal("resolved_issues", "title and body must be lists of the same length")
        found = [{"title": title, "body": body} for title, body in zip(*columns, strict=True)]
    if not isinstance(found, Sequence) or not all(
        isinstance(one, Mapping) for one in cast(Sequence[Any], found)
    ):
        raise fields.refusal("resolved_issues", "must be a list of issues, each with title and body")
    issues = cast(Sequence[Mapping[str, Any]], found)
    texts = [
        "\n\n".join(str(one.get(part) or "").strip() for part in ("title", "body")).strip() for one in issues
    ]
    problem = "\n\n".join(text for text in texts if text)
    if not problem:
        raise fields.refusal("resolved_issues", "says nothing: the agent would not know what to do")
    return problem


def _eval_script(environment: Environment, workdir: str, test_patch: str) -> str:
    """The package's script; the hidden tests are applied before its log begins."""
    delimiter = "END_OF_HIDDEN_TESTS"
    while delimiter in test_patch:
        delimiter += "_"
    return _EVAL_SCRIPT.format(
        git_env=GIT_ENV,
        workdir=shlex.quote(workdir),
        test_patch=TEST_PATCH,
        delimiter=delimiter,
        patch=test_patch,
        applied=f"{_APPLIES.findall(environment.test_run)[0]} || exit 1",
        start=START_MARK,
        commands=_APPLIES.sub("true", environment.test_run).strip(),
        end=END_MARK,
    )
