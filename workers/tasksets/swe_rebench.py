"""Rows of SWE-rebench: the first (Python, images laid out as SWE-bench's) and V2 (many languages, the repository at
/{project}).

swebench's parsers read the test logs. Among the parsers that SWE-rebench names, some are swebench's own, some differ and
some are not in swebench at all; a row with one of the latter two is refused.
"""

import re
import shlex
from typing import Any, cast

from pipeline.task import SwebenchLog, Task
from pipeline.taskfile import Gold
from workers.tasksets.importing import GIT_ENV, Importer, Row, checkout, named_image
from workers.tasksets.patches import diff_in, paths_of
from workers.tasksets.rows import Fields
from workers.tasksets.swe_bench import END_MARK, ENV, START_MARK, WORKDIR, marked_script

SWE_BENCH_IMAGE = "sweb.eval."

# The parsers of its own that give the same outcomes in swebench 5.x.
PARSERS = (
    "parse_log_ant",
    "parse_log_astroid",
    "parse_log_astropy",
    "parse_log_calypso",
    "parse_log_cargo",
    "parse_log_chart_js",
    "parse_log_cucumber",
    "parse_log_django",
    "parse_log_doctest",
    "parse_log_flask",
    "parse_log_googletest",
    "parse_log_gotest",
    "parse_log_jest",
    "parse_log_jest_json",
    "parse_log_jq",
    "parse_log_karma",
    "parse_log_marked",
    "parse_log_marshmallow",
    "parse_log_matplotlib",
    "parse_log_micropython_test",
    "parse_log_minitest",
    "parse_log_p5js",
    "parse_log_pvlib",
    "parse_log_pydicom",
    "parse_log_pylint",
    "parse_log_pytest",
    "parse_log_pytest_options",
    "parse_log_pytest_v2",
    "parse_log_pyvista",
    "parse_log_redis",
    "parse_log_requests",
    "parse_log_rspec_transformed_json",
    "parse_log_ruby_unit",
    "parse_log_scikit",
    "parse_log_seaborn",
    "parse_log_sphinx",
    "parse_log_sqlfluff",
    "parse_log_sympy",
    "parse_log_tap",
    "parse_log_vitest",
    "parse_log_xarray",
)

_ANSI = re.compile(r"\x1b(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])")
_ACTIVATE = (
    "\n[ -f /opt/miniconda3/bin/activate ] && source /opt/miniconda3/bin/activate && conda activate testbed"
)
_GIT_DIFF = re.compile(r"^diff --git a/.* b/(.*)$(?!\ndeleted file mode)", re.MULTILINE)
_NOT_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_EVAL_SCRIPT = """#!/bin/bash{activate}
{git_env}
cd {workdir}
cat >/tmp/hidden_tests.diff <<'{delimiter}'
{patch}{delimiter}
git apply -v --recount --whitespace=nowarn /tmp/hidden_tests.diff ||
  git apply -v --3way --recount --ignore-space-change --whitespace=nowarn /tmp/hidden_tests.diff || exit 1
echo '{start}'
{commands}
echo '{end}'
"""


def task_of(fields: Fields) -> tuple[Task, Gold]:
    """The task and its solution. Raises ValueError naming file, row and field."""
    fail_to_pass, pass_to_pass = _tests(fields, "FAIL_TO_PASS"), _tests(fields, "PASS_TO_PASS")
    if not fail_to_pass:
        raise fields.refusal("FAIL_TO_PASS", "empty: a patch that does nothing would do")
    image = named_image(fields) or fields.text("docker_image")
    as_swe_bench = SWE_BENCH_IMAGE in image
    workdir = WORKDIR if as_swe_bench else f"/{_project(fields)}"
    base_commit, test_patch = fields.text("base_commit"), diff_in(fields, "test_patch")
    task = Task(
        id=f"swe-rebench:{fields.text('instance_id')}",
        repo=fields.text("repo"),
        base_commit=base_commit,
        image=image,
        workdir=workdir,
        problem=fields.text("problem_statement").strip(),
        verdict=SwebenchLog(
            eval_script=_eval_script(fields, workdir, test_patch, as_swe_bench=as_swe_bench),
            log_parser=_parser(fields),
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            repo=fields.text("repo"),
            version=fields.optional_text("version"),
            protected_paths=paths_of(test_patch),
        ),
        setup_script="" if as_swe_bench else checkout(base_commit),
        env=ENV if as_swe_bench else {},
        builder_commits=as_swe_bench,
    )
    return task, Gold(id=task.id, patch=diff_in(fields, "patch"), test_patch=test_patch)


def row_of(task: Task, gold: Gold) -> Row:
    """A row from which `task_of` makes `task`."""
    verdict = task.verdict
    assert isinstance(verdict, SwebenchLog)
    return {
        "instance_id": task.id.partition(":")[2],
        "repo": task.repo,
        "version": verdict.version,
        "base_commit": task.base_commit,
        "image_name": task.image,
        "problem_statement": task.problem,
        "patch": gold.patch,
        "test_patch": gold.test_patch,
        "FAIL_TO_PASS": list(verdict.fail_to_pass),
        "PASS_TO_PASS": list(verdict.pass_to_pass),
        "install_config": {"log_parser": verdict.log_parser},
        "eval_script": verdict.eval_script,
    }


IMPORTER = Importer(help="rows of SWE-rebench, the first or V2", task_of=task_of, row_of=row_of)


def _tests(fields: Fields, name: str) -> tuple[str, ...]:
    """The ids without terminal colours."""
    return tuple(dict.fromkeys(_ANSI.sub("", test).strip() for test in fields.strings(name)))


def _project(fields: Fields) -> str:
    owner, _, project = fields.text("repo").partition("/")
    if not owner or not project or "/" in project:
        raise fields.refusal("repo", f"must be owner/name, is {fields.text('repo')!r}")
    return project


def _parser(fields: Fields) -> str:
    name = fields.mapping("install_config").get("log_parser")
    if name not in PARSERS:
        raise fields.refusal(
            "install_config", f"log_parser {name!r} is not one that swebench has too: {', '.join(PARSERS)}"
        )
    return name


def _eval_script(fields: Fields, workdir: str, test_patch: str, *, as_swe_bench: bool) -> str:
    """The row's own script if it has one; otherwise one that applies the hidden tests and runs the tests between swebench's markers.

    It installs nothing, although the first SWE-rebench's own script would: that needs the network, and the image already has everything.
    """
    if fields.optional_text("eval_script"):
        return marked_script(fields)
    commands = _commands(fields)
    if as_swe_bench:
        commands[-1] += "".join(f" {shlex.quote(file)}" for file in _test_files(test_patch))
    delimiter = "END_OF_HIDDEN_TESTS"
    while delimiter in test_patch:
        delimiter += "_"
    return _EVAL_SCRIPT.format(
        activate=_ACTIVATE if as_swe_bench else "",
        git_env=GIT_ENV,
        workdir=shlex.quote(workdir),
        delimiter=delimiter,
        patch=test_patch,
        start=START_MARK,
        end=END_MARK,
        commands=commands[0] if len(commands) == 1 else "\n".join(["(set -e", *commands, ")"]),
    )


def _commands(fields: Fields) -> list[str]:
    """The commands that run the tests."""
    found = fields.mapping("install_config").get("test_cmd")
    commands: Any = [found] if isinstance(found, str) else found
    if not isinstance(commands, list) or not all(
        isinstance(one, str) for one in cast(list[object], commands)
    ):
        raise fields.refusal("install_config", "test_cmd must be a command or a list of commands")
    kept = [command.rstrip() for command in cast(list[str], commands) if command.strip()]
    if not kept:
        raise fields.refusal("install_config", "test_cmd is empty: there would be nothing to run")
    return kept


def _test_files(test_patch: str) -> list[str]:
    """The files that the hidden tests add or change, which SWE-bench's command gets as arguments."""
    files = [file for file in _GIT_DIFF.findall(test_patch) if not file.endswith(_NOT_TESTS)]
    return list(dict.fromkeys(files))
