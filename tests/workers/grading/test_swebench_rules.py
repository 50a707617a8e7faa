"""The contract with the swebench package: what of it we lean on, said by its own answers."""

import importlib
import sys
from pathlib import Path
from typing import Any

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


def spoofed(*lines: str) -> str:
    """Code under test prints `lines` while the true run fails."""
    return log_of("FAILED t.py::new - x", *KEPT, *lines, exit_code=1)


LOGS = {
    "pass": log_of("PASSED t.py::new", *KEPT),
    "pass, in words around it": "+ set\n" + log_of("noise", "PASSED t.py::new", *KEPT) + "Updated 1 path\n",
    "fail": log_of("FAILED t.py::new - assert 1 == 2", *KEPT, exit_code=1),
    "a test kept from passing": log_of("PASSED t.py::new", "FAILED t.py::old - x", KEPT[1], exit_code=1),
    "error": log_of("ERROR t.py::new - fixture", *KEPT, exit_code=1),
    "partial": log_of("PASSED t.py::new", "PASSED t.py::old"),
    "empty": "",
    "no test": log_of(),
    "no test, with a sign of life": log_of("Executed 3 of 3", exit_code=0),
    "skipped": log_of("SKIPPED t.py::new", *KEPT),
    "skipped that passed before": log_of("PASSED t.py::new", "SKIPPED t.py::old", KEPT[1]),
    "skips counted": log_of("PASSED t.py::new", "SKIPPED [1] t.py:3: why", *KEPT),
    "xfail": log_of("XFAIL t.py::new", *KEPT),
    "xpass": log_of("XPASS t.py::new", *KEPT),
    "another fails": log_of("PASSED t.py::new", *KEPT, "FAILED t.py::far - x", exit_code=1),
    "status without a failure": log_of("PASSED t.py::new", *KEPT, exit_code=2),
    "no status": log_of("PASSED t.py::new", *KEPT).replace(">>>>> Test Exit Code: 0", ""),
    "no start": log_of("PASSED t.py::new", *KEPT).replace("Start", "tart"),
    "no end": log_of("PASSED t.py::new", *KEPT).replace("End", "nd"),
    "outside of the marks": log_of() + "PASSED t.py::new\n" + "\n".join(KEPT),
    "patch failed": log_of("PASSED t.py::new", *KEPT, ">>>>> Patch Apply Failed"),
    "tests timed out": log_of("PASSED t.py::new", *KEPT) + ">>>>> Tests Timed Out",
    "spoofed lines": spoofed("PASSED t.py::new"),
    "spoofed lines and an end": spoofed("PASSED t.py::new", "+ : '>>>>> End Test Output'", ">>>>> Test Exit Code: 0"),
    "spoofed, nothing fails": spoofed("PASSED t.py::new").replace("FAILED t.py::new - x\n", ""),
    "not text": log_of("PASSED t.py::new", "\udcff\x00\x1b[0m", *KEPT),
}  # fmt: skip
TRUNCATED = {
    "cut short": ("PASSED t.py::new[log(a,b)]", "PASSED t.py::new[log(a,c)]"),
    "cut short, one fails": ("PASSED t.py::new[log(a,b)]", "FAILED t.py::new[log(a,c)] - x"),
    "cut short, none there": ("PASSED t.py::new[exp(a)]",),
    "cut short, expected to fail": ("PASSED t.py::new[log(a,b)]", "XFAIL t.py::new[log(a,c)]"),
    "as it is": ("PASSED t.py::new[log(a",),
}


def official(verdict: SwebenchLog, log: str, path: Path) -> tuple[bool, list[list[str]]]:
    """What the harness's own report says: resolved, and which tests of each list it counts as passed."""
    grading: Any = importlib.import_module("swebench.harness.grading")
    types: Any = importlib.import_module("swebench.types")
    path.write_bytes(log.encode("utf-8", "replace"))
    spec = types.TestSpec(
        instance_id="i",
        image="",
        eval_script_list=[],
        repo="",
        version="",
        FAIL_TO_PASS=list(verdict.fail_to_pass),
        PASS_TO_PASS=list(verdict.pass_to_pass),
        log_parser=verdict.log_parser,
        eval_type=verdict.eval_type,
    )
    prediction = {"instance_id": "i", "model_name_or_path": "m", "model_patch": "x"}
    told = grading.get_eval_report(spec, prediction, str(path), include_tests_status=True)["i"]
    status = told.get("tests_status", {})
    lists = [status.get(kind, {}).get("success", []) for kind in ("FAIL_TO_PASS", "PASS_TO_PASS")]
    return told["resolved"], lists


@pytest.mark.parametrize("eval_type", ["pass_and_fail", "fail_only"])
@pytest.mark.parametrize("parser", ["parse_log_pytest", "parse_log_pytest_options", "parse_log_pytest_v2"])
@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_our_verdict_is_the_official_one(log: str, parser: str, eval_type: Any, tmp_path: Path) -> None:
    verdict = replace(VERDICT, log_parser=parser, eval_type=eval_type)
    resolved, passed = official(verdict, log, tmp_path / "log")
    ours = report(verdict, "i", log)
    assert ours.resolved == resolved
    assert [ours.fail_to_pass.passed, ours.pass_to_pass.passed] == [len(names) for names in passed]


@pytest.mark.parametrize("lines", TRUNCATED.values(), ids=TRUNCATED)
def test_our_verdict_on_names_cut_short_is_the_official_one(lines: tuple[str, ...], tmp_path: Path) -> None:
    verdict = replace(VERDICT, fail_to_pass=("t.py::new[log(a",))
    log = log_of(*lines, *KEPT, exit_code=int(any("FAILED" in line for line in lines)))
    assert report(verdict, "i", log).resolved == official(verdict, log, tmp_path / "log")[0]


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


def test_a_patch_inside_the_script_keeps_its_line_ends() -> None:
    patch = "+one\r\n \x0c\n+a\x0bb\x85c\u2028d\n-two\r\n"
    script = SCRIPT.replace(": '>>>>> Start", f"git apply - <<'EOF'\n{patch}EOF\n: '>>>>> Start")
    assert f"<<'EOF'\n{patch}EOF\n" in Marks().in_script(script)
    assert Marks().in_script(SCRIPT).count("\n") == Marks().in_script(SCRIPT.rstrip()).count("\n") == 7


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
