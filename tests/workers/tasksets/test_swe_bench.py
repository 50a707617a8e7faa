import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.task import SwebenchLog
from tests.workers.tasksets.published import FIXTURES, fixture_rows, imported, write_lines
from workers.grading import swebench_rules
from workers.tasksets import rendering, swe_bench
from workers.tasksets.__main__ import main
from workers.tasksets.rows import Fields

ROWS = FIXTURES / "swe_bench"
REPOSITORY = ROWS / "task_repository"


def changed(**changes: Any) -> dict[str, Any]:
    return fixture_rows("swe_bench/verified.jsonl")[0] | changes


def test_a_row_of_5_x_is_judged_by_its_own_script_and_parser(tmp_path: Path) -> None:
    row = changed()
    task, gold = imported(tmp_path, "swe-bench", ROWS / "verified.jsonl")["acme__units-14"]
    assert (task.id, task.workdir, task.image) == ("swe-bench:acme__units-14", "/testbed", row["image"])
    assert task.env == {"BASH_ENV": "/root/.bashrc"}
    assert task.verdict == SwebenchLog(
        eval_script=row["eval_script"],
        log_parser="parse_log_pytest",
        fail_to_pass=("tests/test_lengths.py::test_longest_of_nothing",),
        pass_to_pass=("tests/test_lengths.py::test_longest",),
        repo="acme/units",
        version="1.0",
        protected_paths=("tests/test_lengths.py",),
    )
    assert (gold.patch, gold.test_patch) == (row["patch"], row["test_patch"])


def test_a_misspelt_parser_is_refused_with_the_one_meant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", changed(log_parser="parse_log_pytests"))
    assert main(["import", "swe-bench", str(rows), "--out", str(tmp_path / "t.jsonl")]) == 1
    told = capsys.readouterr().err
    assert (
        "rows.jsonl:1: log_parser: swebench has no 'parse_log_pytests'; did you mean 'parse_log_pytest'?"
        in told
    )


def test_the_parsers_that_may_be_named_are_those_that_grade() -> None:
    assert swe_bench.LOG_PARSERS == swebench_rules.LOG_PARSERS


def test_repositories_whose_logs_list_failures_alone_are_those_of_the_grader() -> None:
    constants = importlib.import_module("swebench.harness.constants")  # as the grader has it
    assert constants.FAIL_ONLY_REPOS == swe_bench.FAIL_ONLY_REPOS


@pytest.mark.parametrize(
    ("repo", "change", "eval_type"),
    [
        ("chartjs/Chart.js", {"eval_type": None}, "fail_only"),
        ("markedjs/marked", {"eval_type": " "}, "fail_only"),
        ("markedjs/marked", {"eval_type": "pass_and_fail"}, "pass_and_fail"),
        ("acme/units", {"eval_type": None}, "pass_and_fail"),
        ("acme/units", {"eval_type": "fail_only"}, "fail_only"),
    ],
)
def test_a_row_that_does_not_say_how_its_log_is_judged_is_judged_as_its_repository_is(
    tmp_path: Path, repo: str, change: dict[str, Any], eval_type: str
) -> None:
    rows = write_lines(tmp_path / "a.jsonl", changed(repo=repo, **change))
    ((task, _),) = imported(tmp_path, "swe-bench", rows).values()
    assert isinstance(task.verdict, SwebenchLog)
    assert task.verdict.eval_type == eval_type


def test_an_older_row_is_rendered_by_the_release_that_knows_it(tmp_path: Path) -> None:
    tasks = imported(tmp_path, "swe-bench", ROWS / "lite.jsonl")
    task, _ = tasks["psf__requests-14"]
    assert isinstance(task.verdict, SwebenchLog)
    assert task.image == "docker.io/swebench/sweb.eval.x86_64.psf_1776_requests-14:latest"
    assert task.verdict.log_parser == "parse_log_pytest_options"
    script = task.verdict.eval_script
    assert script.startswith("#!/bin/bash\nset -uxo pipefail\nsource /opt/miniconda3/bin/activate\n")
    assert "+def test_longest_of_nothing():" in script
    assert (
        ": '>>>>> Start Test Output'\npytest -rA tests/test_lengths.py\n: '>>>>> End Test Output'\n" in script
    )
    other, _ = tasks["gin-gonic__gin-1805"]
    assert isinstance(other.verdict, SwebenchLog)
    assert other.verdict.log_parser == "parse_log_gotest"


def test_what_a_row_has_is_kept_and_only_the_rest_is_rendered(tmp_path: Path) -> None:
    row = fixture_rows("swe_bench/lite.jsonl")[0] | {"log_parser": "parse_log_pytest", "image": "here:1"}
    task, _ = imported(tmp_path, "swe-bench", write_lines(tmp_path / "a.jsonl", row))["psf__requests-14"]
    assert isinstance(task.verdict, SwebenchLog)
    assert (task.verdict.log_parser, task.image) == ("parse_log_pytest", "here:1")


def test_image_names_follow_the_rule_in_lower_case(tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "a.jsonl", changed(image=None, instance_id="Acme__Units__x-1"))
    task, _ = imported(tmp_path, "swe-bench", rows)["Acme__Units__x-1"]
    assert task.image == "docker.io/swebench/sweb.eval.x86_64.acme_1776_units_1776_x-1:latest"


def test_the_task_repository_gives_what_it_publishes(tmp_path: Path) -> None:
    tasks = imported(tmp_path, "swe-bench", REPOSITORY)
    assert list(tasks) == ["acme__units-12"]
    task, gold = tasks["acme__units-12"]
    folder = REPOSITORY / "tasks/acme__units-12"
    assert isinstance(task.verdict, SwebenchLog)
    assert task.verdict.version == "1.10"  # not 1.1
    assert task.verdict.eval_script == (folder / "eval.sh").read_text()
    assert task.verdict.fail_to_pass[0] == "tests/test_lengths.py::test_in_metres[3M-3.0]"
    assert (gold.patch, gold.test_patch) == (
        (folder / "gold.patch").read_text(),
        (folder / "test.patch").read_text(),
    )
    assert task.problem == (folder / "problem_statement.md").read_text()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("task.yaml", "a: [", "task.yaml: not YAML"),
        ("task.yaml", "- a\n", "task.yaml: must be a YAML mapping"),
        ("tests.json", "{", "tests.json: not JSON"),
        ("tests.json", "[]", "tests.json: must be a JSON object"),
        ("gold.patch", None, "gold.patch: cannot be read: No such file"),
        ("eval.sh", "echo\n", "eval_script: does not print"),
    ],
)
def test_a_broken_task_of_a_repository_is_refused_by_directory_and_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, message: str
) -> None:
    shutil.copytree(REPOSITORY, tmp_path / "r")
    file = tmp_path / "r/tasks/acme__units-12" / name
    file.unlink() if content is None else file.write_text(content)
    assert main(["import", "swe-bench", str(tmp_path / "r"), "--out", str(tmp_path / "t.jsonl")]) == 1
    assert f"tasks/acme__units-12: {message}" in capsys.readouterr().err


def test_a_split_that_no_task_of_a_repository_is_in_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "t.jsonl")
    assert main(["import", "swe-bench", str(REPOSITORY), "--split", "dev", "--out", out]) == 2
    assert "no task of split dev in it; there are deprecated, test" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repo": None}, "repo: must be a non-empty string, is absent"),
        ({"patch": ""}, "patch: must be a non-empty string"),
        ({"test_patch": "none"}, "test_patch: not a diff"),
        ({"eval_type": "both"}, "eval_type: must be one of pass_and_fail, fail_only, is 'both'"),
        ({"patch": "see the pull request"}, "patch: not a diff: it names no file"),
        ({"eval_script": ": '>>>>> End Test Output'\n"}, "eval_script: does not print '>>>>> Start Test Output'"),
        ({"eval_script": "set -e\r\npytest\r\n"}, "eval_script: its lines end in CRLF"),
        ({"eval_script": "pytest\n"}, "eval_script: does not print '>>>>> End Test Output'"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: empty: a patch that does nothing would do"),
        ({"FAIL_TO_PASS": "t::a"}, "FAIL_TO_PASS: neither JSON"),
        ({"image_assets": '{"test_patch": [{"path": "a.png"}]}'}, "image_assets: binary files"),
        ({"eval_script": None}, "eval_script: absent, and cannot be made: repo: swebench 4.1.0 has no tests for"),
        ({"log_parser": "", "repo": "psf/requests"}, "log_parser: absent, and cannot be made: version: swebench 4.1.0 knows"),
        ({"log_parser": None, "version": None}, "version: must be a non-empty string"),
        ({"instance_id": "other"}, "id: 'swe-bench:other' is that of"),
    ],
)  # fmt: skip
def test_a_row_that_will_not_do_is_refused_by_line_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", changed(instance_id="other"), changed(**change))
    assert main(["import", "swe-bench", str(rows), "--out", str(tmp_path / "t.jsonl")]) == 1
    assert f"rows.jsonl:2: {message}" in capsys.readouterr().err
    assert not (tmp_path / "t.jsonl").exists()


@pytest.mark.slow
def test_a_release_that_cannot_be_installed_is_named_with_the_command_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "REQUIREMENTS", (str(tmp_path / "swebench-4.1.0-py3-none-any.whl"),))
    row = Fields("rows.jsonl:1", json.loads((ROWS / "lite.jsonl").read_text().splitlines()[0]))
    with pytest.raises(ValueError, match=rf"run: .* -m pip .* install .*--target {tmp_path}/new"):
        rendering.rendered([row], tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
