from pathlib import Path
from typing import Any

import pytest

from pipeline.task import SwebenchLog
from workers.grading import swebench_rules
from workers.tasksets.rows import Fields, read_rows
from workers.tasksets.swe_rebench import PARSERS, task_of

FIXTURES = Path(__file__).with_name("fixtures") / "swe_rebench"


def row(**change: Any) -> Fields:
    """One of the first SWE-rebench."""
    return read_rows(FIXTURES / "first.jsonl")[0].having(**change)


def v2_row(**change: Any) -> Fields:
    return read_rows(FIXTURES / "v2.json")[0].having(**change)


def log_verdict(fields: Fields) -> SwebenchLog:
    verdict = task_of(fields)[0].verdict
    assert isinstance(verdict, SwebenchLog)
    return verdict


def config(**change: Any) -> dict[str, Any]:
    return {"install_config": row().mapping("install_config") | change}


def test_a_row_of_the_first_is_run_as_swe_bench_would() -> None:
    task, gold = task_of(row())
    verdict = log_verdict(row())
    assert task.id == "swe-rebench:acme__units-21"
    assert (task.image, task.workdir) == (row().text("docker_image"), "/testbed")
    assert task.env == {"BASH_ENV": "/root/.bashrc"}
    assert task.setup_script == ""
    test_cmd = row().mapping("install_config")["test_cmd"]
    assert f"\n{test_cmd} tests/test_lengths.py\n" in verdict.eval_script
    assert "conda activate testbed" in verdict.eval_script
    assert (verdict.version, verdict.log_parser) == ("1.2", "parse_log_pytest")
    assert verdict.protected_paths == ("tests/test_lengths.py",)
    assert (gold.patch, gold.test_patch) == (row().text("patch"), row().text("test_patch"))


def test_a_row_of_v2_is_run_where_its_image_has_the_project() -> None:
    task, _ = task_of(v2_row())
    assert (task.image, task.workdir) == ("docker.io/swerebenchv2/acme-units:22-a2f37cf", "/units")
    assert f"git checkout -q --force {v2_row().text('base_commit')}\n" in task.setup_script
    assert task.env == {}
    script = log_verdict(v2_row()).eval_script
    assert "\n(set -e\nexport PYTHONHASHSEED=0\npython -m pytest -rA --color=no\n)\n" in script


def test_ids_lose_the_colours_of_the_terminal_that_they_were_read_from() -> None:
    verdict = log_verdict(v2_row())
    assert verdict.pass_to_pass == (
        "tests/test_lengths.py::test_in_metres[3m-3.0]",
        "tests/test_lengths.py::test_in_metres[2km-2000.0]",
        "tests/test_lengths.py::test_longest",
    )


def test_both_spellings_of_a_row_say_the_same() -> None:
    spelt = {name: repr(row().value(name)) for name in ("FAIL_TO_PASS", "PASS_TO_PASS", "install_config")}
    assert task_of(row(**spelt)) == task_of(row())


def test_the_given_name_of_an_image_comes_first() -> None:
    assert task_of(row(image_name="mirror/sweb.eval.x:1"))[0].image == "mirror/sweb.eval.x:1"


def test_hidden_tests_are_in_the_script_whatever_they_contain() -> None:
    patch = row().text("test_patch").rstrip("\n").replace("default=1.0", "'END_OF_HIDDEN_TESTS'")
    script = log_verdict(row(test_patch=patch)).eval_script
    assert f"<<'END_OF_HIDDEN_TESTS_'\n{patch}\nEND_OF_HIDDEN_TESTS_\n" in script


def test_only_test_files_that_are_there_are_run() -> None:
    patch = (
        "diff --git a/tests/data.json b/tests/data.json\n--- a/tests/data.json\n+++ b/tests/data.json\n"
        "@@ -1 +1 @@\n-1\n+2\n"
        "diff --git a/tests/gone.py b/tests/gone.py\ndeleted file mode 100644\n--- a/tests/gone.py\n"
        "+++ /dev/null\n@@ -1 +0,0 @@\n-1\n"
        "diff --git a/tests/new name.py b/tests/new name.py\nnew file mode 100644\n--- /dev/null\n"
        "+++ b/tests/new name.py\n@@ -0,0 +1 @@\n+1\n"
    )
    verdict = log_verdict(row(test_patch=patch))
    assert "-W ignore::DeprecationWarning 'tests/new name.py'\n" in verdict.eval_script
    assert verdict.protected_paths == ("tests/data.json", "tests/gone.py", "tests/new name.py")


def test_a_script_that_the_row_brings_is_taken_as_it_is() -> None:
    script = "echo '>>>>> Start Test Output'\npytest\necho '>>>>> End Test Output'\n"
    assert log_verdict(row(eval_script=script)).eval_script == script


def test_every_parser_that_is_let_through_is_one_that_the_grader_has() -> None:
    assert set(PARSERS) <= swebench_rules.LOG_PARSERS
    for fields in (row(), v2_row()):
        swebench_rules.check(log_verdict(fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: ""}, f"{name}: must be a non-empty string") for name in (
            "instance_id", "repo", "base_commit", "patch", "test_patch", "problem_statement",
        )),
        ({"docker_image": None}, "docker_image: must be a non-empty string, is absent"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: empty: a patch that does nothing would do"),
        ({"FAIL_TO_PASS": "t::a"}, "FAIL_TO_PASS: neither JSON nor"),
        ({"install_config": None}, "install_config: test_cmd must be a command or a list"),
        (config(log_parser=None), "install_config: log_parser None is not one that swebench has"),
        ({"install_config": "{"}, "install_config: neither JSON nor"),
        (config(log_parser="parse_log_haskell"), "install_config: log_parser 'parse_log_haskell' is not .*, parse_log_vitest"),
        (config(log_parser="parse_log_maven"), "install_config: log_parser 'parse_log_maven' is not one"),
        (config(log_parser=["parse_log_pytest"]), "install_config: log_parser .* is not one"),
        (config(test_cmd=None), "install_config: test_cmd must be a command or a list"),
        (config(test_cmd=[1]), "install_config: test_cmd must be a command or a list"),
        (config(test_cmd=[" "]), "install_config: test_cmd is empty"),
        (config(test_cmd=""), "install_config: test_cmd is empty"),
        ({"docker_image": "x:1", "repo": "units"}, "repo: must be owner/name"),
        ({"eval_script": "pytest\n"}, "eval_script: does not print"),
    ],
)  # fmt: skip
def test_a_row_that_will_not_do_is_refused_by_row_and_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"first\.jsonl:1: {message}"):
        task_of(row(**change))
