"""A runner that is added to the table as one row is known to all that have to know runners."""

import json
import re

import pytest

from pipeline import runners
from pipeline.command_effects import failed, verdict_of_tests
from pipeline.runners import Closing, Runner
from pipeline.task import ExitCode
from pipeline.trajectory import Action, Observation
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from workers.grading.defence import witness
from workers.grading.defence.after import each_must_pass
from workers.grading.defence.governing import GoverningFiles, runner_modules, same_runner_settings
from workers.grading.defence.survey import Surveyed, Surveys
from workers.sandbox.docker import DockerSandboxes
from workers.tasksets.eval_scripts import with_status_of_tests

SCRIPT = "cd lib\nzest --all\n"
ROW = Runner(
    name="zest",
    language="python",
    commands=("zest",),
    scripts=("runzest.py",),
    governed_by=("zest.cfg",),
    governed_by_if_used=(".zestrc", "*/zests/__init__.py"),
    settings={"pyproject.toml": ("tool.zest",), "package.json": ("zest",), "setup.cfg": ("zest:*",)},
    commands_in=("zest.txt",),
    entry_points="zest_plugins",
    own_modules=("_zest",),
    closing=Closing(
        line=re.compile(r"^zest: .*$", re.MULTILINE),
        passed=re.compile(r"\d+ fine"),
        failed=re.compile(r"\d+ bad"),
    ),
    witnessed_as="unittest",
)


@pytest.fixture(autouse=True)
def added_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "RUNNERS", (*runners.RUNNERS, ROW))


def ran(output: str, exit_code: int, command: str = "zest --all") -> Action:
    observation = Observation(output=output, exit_code=exit_code, dropped_chars=0, wall_s=1.0)
    return Action(command=command, observation=observation)


def test_what_a_command_of_it_came_to_is_read_from_its_report() -> None:
    assert verdict_of_tests(ran("zest: 3 fine", 0)) == "passed"
    assert verdict_of_tests(ran("zest: 3 fine, 1 bad", 0, "zest | tail -1")) == "failed"
    assert not failed(ran("zest: 1 bad", 1))
    assert failed(ran("zesty: no such file", 1, "zesty"))


def test_a_script_that_runs_it_keeps_the_status_of_its_tests() -> None:
    assert "exit" in with_status_of_tests(f"{SCRIPT}rm -rf build\n")


def test_its_closing_line_has_to_agree_with_a_status_of_0() -> None:
    assert runners.closing_fault(SCRIPT, "zest: 3 fine\n") is None
    assert runners.closing_fault(SCRIPT, "all is well\n") == "zest did not report its end"
    assert runners.closing_fault(SCRIPT, "zest: 3 fine, 1 bad\n") == "zest reported zest: 3 fine, 1 bad"
    assert each_must_pass(f"set -e\n{SCRIPT}", 1)


@pytest.mark.parametrize(
    ("path", "only_if_used"), [("zest.cfg", False), ("lib/.zestrc", True), ("lib/zests/__init__.py", True)]
)
def test_files_that_govern_it_are_put_back(path: str, only_if_used: bool) -> None:
    header = f"+++ b/{path}\n".encode()
    assert GoverningFiles(SCRIPT, Surveyed()).touched_by(header)
    assert GoverningFiles("pytest\n", Surveyed()).touched_by(header) is not only_if_used


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", "[tool.zest]\nonly = 'x'\n"),
        ("pyproject.toml", "[project.entry-points.zest_plugins]\nevil = 'evil'\n"),
        ("package.json", json.dumps({"zest": {"only": "x"}})),
        ("setup.cfg", "[zest:run]\nonly = x\n"),
        ("setup.cfg", "[options.entry_points]\nzest_plugins =\n  evil = evil\n"),
    ],
)
def test_its_part_of_other_files_is_the_runners(name: str, text: str) -> None:
    assert not same_runner_settings(name, None, text.encode())


@pytest.mark.docker
async def test_the_file_with_its_commands_is_the_runners(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    for script, is_named in ((SCRIPT, True), ("cd lib\npytest\n", False)):
        task = make_task(
            repo_image.tag,
            setup_script="mkdir lib && touch lib/zest.txt\n",
            verdict=ExitCode(eval_script=script),
        )
        async with sandboxes.open(make_claim(task), role="grade") as sandbox:
            surveyed = await Surveys().survey(sandbox, task, hidden=(), under_test=())
        assert ("lib/zest.txt" in surveyed.paths) is is_named


def test_no_patch_brings_a_program_or_a_module_of_its_name() -> None:
    assert re.search(
        r"^PROGRAMS=\(.*\bzest\)", GoverningFiles(SCRIPT, Surveyed()).step("find_left_out"), re.MULTILINE
    )
    assert "_zest" in runner_modules()


def test_the_witness_is_at_the_start_of_a_process_that_runs_it() -> None:
    assert any(r"runzest.py\0" in text for text in witness.installed()["TEXTS"])
