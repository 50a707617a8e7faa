import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.task import R2eExpected
from workers.tasksets.r2e_gym import EVAL_SCRIPT, SETUP_SCRIPT, TELLTALES, VAULT, id_of, task_of
from workers.tasksets.rows import Fields, read_rows

FIXTURES = Path(__file__).with_name("fixtures")


def row(**change: Any) -> Fields:
    (fields,) = read_rows(FIXTURES / "r2e_gym/rows.jsonl")
    return fields.having(**change)


def commit(**change: Any) -> dict[str, Any]:
    return row().mapping("parsed_commit_content") | change


def test_a_row_is_judged_by_what_each_test_is_expected_to_say() -> None:
    task, _ = task_of(row())
    assert task.id == f"r2e-gym:units__{row().text('commit_hash')}" == f"r2e-gym:{id_of(row())}"
    assert (task.repo, task.workdir, task.base_commit) == ("units", "/testbed", "")
    assert task.image == row().text("docker_image")
    assert task.verdict == R2eExpected(
        eval_script=EVAL_SCRIPT,
        expected={
            "test_in_metres[3m-3.0]": "PASSED",
            "test_in_metres[2km-2000.0]": "PASSED",
            "test_longest": "PASSED",
            "test_longest_of_nothing": "PASSED",
            "test_longest_of_words": "FAILED",
        },
        protected_paths=("r2e_tests", "run_tests.sh"),
    )


def test_of_two_names_that_are_one_when_cut_short_the_later_counts_as_r2e_gym_has_it() -> None:
    expected = {"test_a - second": "PASSED", "test_a - first": "FAILED"}
    task, _ = task_of(row(expected_output_json=expected))
    assert isinstance(task.verdict, R2eExpected)
    assert task.verdict.expected == {"test_a": "PASSED"}


def test_hidden_tests_and_what_the_builder_left_are_taken_from_the_agent() -> None:
    task, _ = task_of(row())
    assert task.setup_script == SETUP_SCRIPT
    assert set(task.hidden_paths) == {VAULT, *TELLTALES, *(f"/{name}" for name in TELLTALES)}


def test_what_a_patch_puts_into_the_environment_is_never_found_before_the_systems_own() -> None:
    task, _ = task_of(row())
    places = task.env["PATH"].split(":")
    assert places[-1] == "/testbed/.venv/bin"
    assert not any(place.startswith("/testbed") for place in places[:-1])


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("[ISSUE]\n  It is wrong.\n[/ISSUE]", "It is wrong."),
        ("before [ISSUE]It is [/ISSUE] wrong.[/ISSUE] after", "It is [/ISSUE] wrong."),
        ("It is wrong.\n", "It is wrong."),
        ("[ISSUE] never closed", "[ISSUE] never closed"),
    ],
)
def test_the_problem_is_what_stands_between_the_tags(statement: str, problem: str) -> None:
    assert task_of(row(problem_statement=statement))[0].problem == problem


def test_the_commit_becomes_two_diffs_that_git_applies(tmp_path: Path) -> None:
    _, gold = task_of(row())
    repository = tmp_path / "repository"
    subprocess.run(["cp", "-r", FIXTURES / "repository", repository], check=True)
    for patch in (gold.patch, gold.test_patch):
        command = ["git", "apply", "-v", "-"]
        subprocess.run(command, input=patch.encode(), cwd=repository, check=True, capture_output=True)
    assert "max(found, default=default)" in (repository / "src/units/lengths.py").read_text()
    assert (repository / "CHANGES").read_text() == "first"
    assert (repository / "setup.cfg").stat().st_mode & 0o111
    assert "test_longest_of_nothing" in (repository / "tests/test_lengths.py").read_text()
    assert "logo.png" not in gold.patch
    assert "tests/" not in gold.patch


def test_a_row_without_its_commit_has_no_solution() -> None:
    _, gold = task_of(row(parsed_commit_content=None))
    assert (gold.patch, gold.test_patch) == ("", "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"docker_image": None}, "docker_image: must be a non-empty string, is absent"),
        ({"docker_image": "slimshetty/swebench-verified:x"}, "docker_image: .* import it as swe-bench"),
        ({"repo_name": ""}, "repo_name: must be a non-empty string"),
        ({"commit_hash": ""}, "commit_hash: must be a non-empty string"),
        ({"problem_statement": " \n"}, "problem_statement: must be a non-empty string"),
        ({"problem_statement": "[ISSUE] \n [/ISSUE]"}, "problem_statement: nothing between"),
        ({"expected_output_json": None}, "expected_output_json: no test is expected to pass"),
        ({"expected_output_json": "{}"}, "expected_output_json: no test is expected to pass"),
        ({"expected_output_json": {"t": "FAILED"}}, "expected_output_json: no test is expected to pass"),
        ({"expected_output_json": "{t"}, "expected_output_json: neither JSON nor"),
        ({"expected_output_json": "[1]"}, "expected_output_json: must be an object"),
        ({"expected_output_json": {"t": True}}, "expected_output_json: must say PASSED, FAILED"),
        ({"parsed_commit_content": "[]"}, "parsed_commit_content: must be an object"),
        (
            {"parsed_commit_content": commit(file_diffs=[{"header": 1}])},
            "parsed_commit_content: not the parts",
        ),
        ({"parsed_commit_content": commit(file_diffs=[1])}, "parsed_commit_content: not the parts"),
        ({"parsed_commit_content": commit(file_diffs=commit()["file_diffs"][-1:])}, "nothing but tests"),
    ],
)
def test_a_row_that_will_not_do_is_refused_by_row_and_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: .*{message}"):
        task_of(row(**change))


def test_a_line_of_a_kind_that_no_diff_has_is_refused() -> None:
    content = json.loads(row().text("parsed_commit_content"))
    content["file_diffs"][-1]["hunks"][0]["line_group"]["all_lines"][0]["type"] = "moved"
    with pytest.raises(ValueError, match=r"parsed_commit_content: not the parts .*'moved'"):
        task_of(row(parsed_commit_content=content))
