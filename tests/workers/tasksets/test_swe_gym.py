from pathlib import Path
from typing import Any

import pytest

from pipeline.task import ExitCode, SwebenchLog
from tests.workers.tasksets.published import FIXTURES, fixture_rows, imported, write_lines
from workers.tasksets.__main__ import main

SUBSET = FIXTURES / "swe_gym/subset.jsonl"


def changed(**changes: Any) -> dict[str, Any]:
    return fixture_rows("swe_gym/subset.jsonl")[0] | changes


def test_how_a_task_is_judged_follows_from_its_script(tmp_path: Path) -> None:
    tasks = imported(tmp_path, "swe-gym", SUBSET)
    scripts = {row["instance_id"]: row["eval_script"] for row in fixture_rows("swe_gym/subset.jsonl")}
    reset, marked, plain = (tasks[f"getmoto__moto-{number}"][0] for number in (14, 15, 16))
    assert isinstance(marked.verdict, SwebenchLog)
    assert marked.verdict.log_parser == "parse_log_pytest"
    assert marked.verdict.fail_to_pass == ("tests/test_lengths.py::test_longest_of_nothing",)
    assert isinstance(plain.verdict, ExitCode)
    assert plain.verdict.eval_script == scripts["getmoto__moto-16"]
    assert isinstance(reset.verdict, ExitCode)
    assert reset.verdict.eval_script.startswith(scripts["getmoto__moto-14"].rpartition("git checkout")[0])
    assert reset.verdict.eval_script.endswith('exit "$SWERVE_TESTS_STATUS"\n')
    for task in (reset, plain):
        assert task.verdict.protected_paths == ("tests/test_lengths.py",)
        assert isinstance(task.verdict, ExitCode)
        assert task.verdict.test_patch == b""  # the script brings it


def test_an_explicit_image_is_taken_before_the_rule_in_lower_case(tmp_path: Path) -> None:
    rows = write_lines(
        tmp_path / "a.jsonl", changed(instance_id="Project-MONAI__MONAI-1"), changed(image_name="a:1")
    )
    by_rule, named = (task for task, _ in imported(tmp_path, "swe-gym", rows).values())
    assert by_rule.image == "docker.io/xingyaoww/sweb.eval.x86_64.project-monai_s_monai-1:latest"
    assert named.image == "a:1"
    assert (named.workdir, named.env) == ("/testbed", {"BASH_ENV": "/root/.bashrc"})


def test_hidden_tests_that_the_script_does_not_bring_are_left_to_the_grader(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "a.jsonl", changed(eval_script="#!/bin/bash\npytest tests\n"))
    task, gold = imported(tmp_path, "swe-gym", rows)["getmoto__moto-14"]
    assert isinstance(task.verdict, ExitCode)
    assert task.verdict.test_patch.decode() == changed()["test_patch"] == gold.test_patch


MARKED = "#!/bin/bash\n: '>>>>> Start Test Output'\npytest -rA\n: '>>>>> End Test Output'\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eval_script": None}, "eval_script: absent: it takes SWE-Gym's fork of the harness"),
        ({"eval_script": "echo hello\n"}, "eval_script: runs no tests"),
        ({"eval_script": MARKED, "repo": "acme/units"}, "repo: no log parser is known for 'acme/units'"),
        ({"eval_script": MARKED, "FAIL_TO_PASS": []}, "FAIL_TO_PASS: empty"),
        ({"test_patch": "none"}, "test_patch: not a diff"),
        ({"patch": None}, "patch: must be a non-empty string, is absent"),
    ],
)
def test_a_row_that_will_not_do_is_refused_by_line_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", changed(instance_id="other"), changed(**change))
    assert main(["import", "swe-gym", str(rows), "--out", str(tmp_path / "t.jsonl")]) == 1
    assert f"rows.jsonl:2: {message}" in capsys.readouterr().err


def test_every_row_of_the_full_dataset_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = FIXTURES / "swe_gym/full.jsonl"
    assert main(["import", "swe-gym", str(full), "--out", str(tmp_path / "t.jsonl")]) == 1
    assert "make_test_spec(row).eval_script" in capsys.readouterr().err
