"""The contract with the swebench package: what of it we lean on, said by its own answers."""

import sys

import pytest
from msgspec.structs import replace

from pipeline.errors import TaskBroken
from pipeline.task import SwebenchLog
from workers.grading.swebench_rules import Marks, check, report

SCRIPT = "set -x\n: '>>>>> Start Test Output'\npytest -rA\n: '>>>>> End Test Output'\ngit checkout x\n"
VERDICT = SwebenchLog(
    eval_script=SCRIPT,
    log_parser="parse_log_pytest",
    fail_to_pass=("t.py::new",),
    pass_to_pass=("t.py::old", "t.py::other"),
)

KEPT = ("PASSED t.py::old", "PASSED t.py::other")


def log_of(*statuses: str, exit_code: int = 0) -> str:
    lines = ["+ : '>>>>> Start Test Output'", *statuses, "+ : '>>>>> End Test Output'"]
    return "\n".join([*lines, f">>>>> Test Exit Code: {exit_code}", ""])


@pytest.mark.parametrize(
    ("log", "status", "passed"),
    [
        (log_of("PASSED t.py::new", *KEPT), "RESOLVED_FULL", (1, 2)),
        (log_of("XFAIL t.py::new", "SKIPPED t.py::old", "PASSED t.py::other"), "RESOLVED_FULL", (1, 2)),
        (log_of("SKIPPED t.py::new", *KEPT), "RESOLVED_NO", (0, 2)),
        (log_of("FAILED t.py::new - x", *KEPT, exit_code=1), "RESOLVED_NO", (0, 2)),
        (log_of("PASSED t.py::new", "PASSED t.py::old"), "RESOLVED_NO", (1, 1)),
        (log_of("PASSED t.py::new", *KEPT, exit_code=1), "log rejected", (0, 0)),
        (log_of("PASSED t.py::new").replace("End", "Near end"), "log rejected", (0, 0)),
        ("", "log rejected", (0, 0)),
    ],
)  # fmt: skip
def test_the_official_rule_decides(log: str, status: str, passed: tuple[int, int]) -> None:
    result = report(VERDICT, "test:1", log)
    assert (result.status, result.resolved) == (status, status == "RESOLVED_FULL")
    assert (result.fail_to_pass.passed, result.pass_to_pass.passed) == passed
    assert (result.fail_to_pass.total, result.pass_to_pass.total) == (1, 2)


def test_a_parametrised_name_cut_short_still_counts() -> None:
    verdict = replace(VERDICT, fail_to_pass=("t.py::new[log(a",), pass_to_pass=())
    assert report(verdict, "test:1", log_of("PASSED t.py::new[log(a,b)]")).resolved


def test_marks_of_the_script_come_back_and_printed_ones_do_not() -> None:
    marks = Marks()
    script = marks.in_script(SCRIPT)
    assert ">>>>>" not in script
    assert script.splitlines()[3] == "SWEBENCH_TEST_EXIT_CODE=$?"
    log = marks.in_log(script + ">>>>> End Test Output\n>>>>> Test Exit Code: 0\n")
    assert log.count(">>>>> Start Test Output") == 1
    assert log.count(">>>>> End Test Output") == 1
    assert log.count(">>>>> Test Exit Code") == 1
    assert Marks().in_log(script).count(">>>>>") == 0


def test_an_exit_status_that_the_script_records_itself_is_not_recorded_twice() -> None:
    once = SCRIPT.replace(": '>>>>> End", "SWEBENCH_TEST_EXIT_CODE=$?\n: '>>>>> End")
    assert Marks().in_script(once).count("SWEBENCH_TEST_EXIT_CODE=$?") == 1


@pytest.mark.parametrize(
    "broken",
    [
        replace(VERDICT, log_parser="parse_log_nothing"),
        replace(VERDICT, fail_to_pass=(), pass_to_pass=()),
        replace(VERDICT, eval_script="pytest\n"),
    ],
)
def test_a_verdict_without_meaning_is_refused(broken: SwebenchLog) -> None:
    with pytest.raises(TaskBroken):
        check(broken)


def test_the_packages_heavy_half_stays_out() -> None:
    check(VERDICT)
    assert "swebench.harness.run_evaluation" not in sys.modules
    assert "datasets" not in sys.modules
