"""How evidence becomes a verdict, without a container."""

import pytest
from msgspec.structs import replace

from pipeline import task as tasks
from pipeline.errors import TaskBroken
from pipeline.task import ExitCode, R2eExpected, SwebenchLog, Verdict
from tests.workers.claims import make_task
from workers.grading.defence.after import Evidence, each_must_pass
from workers.grading.defence.witness import End, WitnessedRun
from workers.grading.verdicts import MOST_OUTCOMES, Remains, check, decoded, judge, judged, r2e_statuses

END = End(
    status=0,
    collected=2,
    finished=2,
    outcomes={"tests/t.py::new": "PASSED", "tests/t.py::old": "PASSED"},
    replaced=(),
    rewritten=(),
    stopped=(),
)
PATCH = b"--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-x\n+    pytest.skip('no')\n"
EXIT_CODE = ExitCode(eval_script="pytest\n", protected_paths=("tests/t.py",))
SWEBENCH = SwebenchLog(
    eval_script=": '>>>>> End Test Output'\n",
    log_parser="parse_log_pytest",
    fail_to_pass=("tests/t.py::new",),
    pass_to_pass=("tests/t.py::old",),
    protected_paths=("tests/t.py",),
)
R2E = R2eExpected(
    eval_script="pytest\n", expected={"new": "PASSED", "T.old": "FAILED"}, protected_paths=("tests",)
)
TESTS_JSON = tasks.TestsJson(
    eval_script="pytest\n",
    parser="...",
    tests=("new", "old"),
    files=(tasks.File(path="tests/t.py", content=b""),),
)
PASSED = "=== test session starts ===\n=== 2 passed in 0.05s ===\n"
MARKED = ">>>>> Start Test Output\n{}>>>>> End Test Output\n>>>>> Test Exit Code: {}\n"
BOTH_PASSED = MARKED.format("PASSED tests/t.py::new\nPASSED tests/t.py::old\n", 0)


def decided(verdict: Verdict, log: str = PASSED, exit_code: int = 0, **evidence: object) -> tuple[float, str]:
    fields = {"patch": PATCH, "runs": (WitnessedRun("pytest", END),), **evidence}
    reward = judge(
        make_task("image", verdict=verdict),
        Evidence(exit_code=exit_code, log=log, **fields),  # type: ignore[arg-type]
    )
    return reward.value, reward.decided_by


def test_an_exit_status_is_believed_as_far_as_the_witness_bears_it_out() -> None:
    assert decided(EXIT_CODE) == (1.0, "exit status 0")
    for status in (1, 2, 5, 137):
        assert decided(EXIT_CODE, exit_code=status) == (0.0, f"exit status {status}")
    assert decided(EXIT_CODE, log="") == (1.0, "exit status 0")
    assert decided(EXIT_CODE, log="", runs=()) == (0.0, "exit status 0, but pytest did not report its end")
    assert decided(EXIT_CODE, runs=()) == (1.0, "exit status 0")


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (None, "pytest was cut short"),
        (replace(END, unfailing=("assert",)), "pytest let a test pass that must fail, by assert"),
        (replace(END, finished=1), "pytest ended after 1 of 2 tests"),
        (replace(END, replaced=(("runner.x", "/repo/calc.py"),)), "the patch replaced runner.x of pytest"),
        (replace(END, replaced=(("runner.x", "<string>"),)), "the patch replaced runner.x of pytest"),
        (
            replace(END, stopped=(("tests/t.py::new", "/repo/calc.py", "pytest.skip('no')"),)),
            "the patch skipped tests/t.py::new",
        ),
        (replace(END, rewritten=("/repo/tests/t.py",)), "/repo/tests/t.py was written while pytest ran"),
    ],
)
def test_tampering_takes_every_kind_of_verdict_down(end: End | None, why: str) -> None:
    runs = (WitnessedRun("pytest", END), WitnessedRun("pytest", end))
    short = "short test summary info\nPASSED tests/t.py::new\n"
    parsed = b'{"tests": [{"name": "new", "status": "PASSED"}]}'
    kinds = [
        decided(EXIT_CODE, runs=runs),
        decided(SWEBENCH, BOTH_PASSED, runs=runs),
        decided(replace(R2E, expected={"new": "PASSED"}), short, runs=runs),
        decided(replace(TESTS_JSON, tests=("new",)), runs=runs, parsed=parsed),
    ]
    assert [value for value, _ in kinds] == [0.0] * 4
    assert all(decided_by.endswith(f", but {why}") for _, decided_by in kinds)


@pytest.mark.parametrize(
    "end",
    [
        replace(END, status=None, outcomes={}, collected=-1, finished=0),
        replace(END, ways=("assert",)),
        replace(END, replaced=(("runner.x", "/usr/lib/python3/dist-packages/plugin.py"),)),
        replace(END, stopped=(("tests/t.py::new", "/repo/calc.py", "pytest.skip('as ever')"),)),
        replace(END, stopped=(("tests/t.py::new", "/repo/tests/t.py", "pytest.skip('no')"),)),
        replace(END, stopped=(("calc.py::new", "/repo/calc.py", "pytest.skip('no')"),)),
        replace(END, rewritten=("/repo/tests/made/t.py",)),
    ],
)
def test_what_the_patch_did_not_do_is_not_held_against_it(end: End) -> None:
    runs = (WitnessedRun("pytest", end), WitnessedRun("pytest", END))
    assert decided(EXIT_CODE, runs=runs) == (1.0, "exit status 0")
    assert decided(SWEBENCH, BOTH_PASSED, runs=runs) == (1.0, "swebench: RESOLVED_FULL")


@pytest.mark.parametrize(
    "log",
    ["", f"{PASSED}=== test session starts ===\n=== 1 failed in 0.01s ===\n"],
    ids=["no log", "the log of tests that run pytest"],
)
def test_a_log_says_nothing_of_a_run_that_the_witness_reported(log: str) -> None:
    runs = (WitnessedRun("pytest", END),)
    assert decided(EXIT_CODE, log, runs=runs) == (1.0, "exit status 0")
    assert decided(EXIT_CODE, log, runs=())[0] == 0.0


CODE = ("tests/t.py::new", "/repo/dir/caf\u00e9.py", "raise Wrong")


@pytest.mark.parametrize(
    ("patch", "end"),
    [
        (b'+++ "b/dir/caf\\303\\251.py"\n+raise Wrong\n', replace(END, stopped=(CODE,))),
        (b'rename to "dir/caf\\303\\251.py"\n+raise Wrong\n', replace(END, stopped=(CODE,))),
        (b'diff --git "a/dir/caf\\303\\251.py" "b/dir/caf\\303\\251.py"\nGIT binary patch\n', replace(END, stopped=(CODE,))),
        (b"diff --git a/two words.py b/two words.py\nGIT binary patch\n", replace(END, replaced=(("x", "/repo/two words.py"),))),
        (b"diff --git a/x.zip b/x.zip\nGIT binary patch\n", replace(END, replaced=(("x", "/repo/x.zip/y.py"),))),
    ],
)  # fmt: skip
def test_a_patch_is_known_by_every_way_to_write_a_name(patch: bytes, end: End) -> None:
    runs = (WitnessedRun("pytest", end),)
    assert decided(EXIT_CODE, runs=runs, patch=patch)[0] == 0.0
    assert decided(EXIT_CODE, runs=runs, patch=b"--- a/other.py\n+++ b/other.py\n+x\n--- \n")[0] == 1.0


def test_the_first_of_two_runs_counts_where_the_script_would_have_ended_with_it() -> None:
    failed = replace(END, status=1, outcomes={"tests/t.py::new": "FAILED"})
    runs = (
        WitnessedRun("pytest", failed),
        WitnessedRun("pytest", replace(END, outcomes={"tests/u.py::old": "PASSED"})),
    )
    for script, value in (
        ("set -e\npytest tests/t.py\npytest tests/u.py\n", 0.0),
        ("pytest tests/t.py\npytest tests/u.py\n", 1.0),
        ("set -e\npytest tests/t.py || true\npytest tests/u.py\n", 1.0),
        ("set -e\nbash ci/test.sh\npytest tests/u.py\n", 1.0),
    ):
        assert decided(replace(EXIT_CODE, eval_script=script), runs=runs)[0] == value


@pytest.mark.parametrize(
    ("outcomes", "why"),
    [
        ({"tests/t.py::new": "FAILED", "tests/t.py::old": "PASSED"}, "tests/t.py::new failed"),
        ({"tests/t.py::new": "SKIPPED", "tests/t.py::old": "PASSED"}, "tests/t.py::new was skipped"),
        ({"tests/t.py::old": "PASSED"}, "tests/t.py::new never ran"),
        ({"tests/t.py": "ERROR"}, "tests/t.py::new never ran"),
        ({"tests/__init__.py": "SKIPPED"}, "tests/t.py::new never ran"),
    ],
)
def test_result_lines_that_no_test_stands_behind_are_not_believed(outcomes: dict[str, str], why: str) -> None:
    runs = (WitnessedRun("pytest", replace(END, outcomes=outcomes)),)
    log = MARKED.format("PASSED tests/t.py::new\nPASSED tests/t.py::old\nFAILED tests/t.py::decoy\n", 1)
    assert decided(SWEBENCH, log, runs=runs) == (0.0, f"swebench: RESOLVED_FULL, but {why}")
    parsed = b'{"tests": [{"name": "tests/t.py::new", "status": "PASSED"}]}'
    verdict = replace(TESTS_JSON, tests=("tests/t.py::new",))
    assert decided(verdict, runs=runs, parsed=parsed) == (0.0, f"tests_json: 1 of 1 tests passed, but {why}")


def test_a_run_that_came_to_no_test_bears_nothing_out() -> None:
    runs = (WitnessedRun("pytest", replace(END, status=-1, collected=-1, finished=0, outcomes={})),)
    log = MARKED.format("PASSED tests/t.py::new\nPASSED tests/t.py::old\nFAILED tests/t.py::decoy\n", 1)
    short = "short test summary info\nPASSED r2e_tests/t.py::new\n"
    assert decided(SWEBENCH, log, runs=runs)[0] == 0.0
    assert decided(replace(R2E, expected={"new": "PASSED"}), short, runs=runs)[0] == 0.0


def test_names_that_only_the_log_knows_are_left_to_the_log() -> None:
    verdict = replace(SWEBENCH, fail_to_pass=("[100%]", "tests/t.py::new[a"))
    log = MARKED.format("PASSED [100%]\nPASSED tests/t.py::new[a b]\nPASSED tests/t.py::old\n", 0)
    outcomes = {
        "tests/t.py::new[a b]": "PASSED",
        "tests/t.py::new[a c]": "FAILED",
        "tests/t.py::old": "PASSED",
    }
    runs = (WitnessedRun("pytest", replace(END, outcomes=outcomes)),)
    assert decided(verdict, log, runs=runs) == (1.0, "swebench: RESOLVED_FULL")


def test_r2e_asks_for_exactly_what_it_expects() -> None:
    log = "noise\n=== short test summary info ===\n\x1b[32mPASSED\x1b[0m r2e_tests/t.py::new\r\n{}\n=== 2 in 1s ===\n"
    as_expected = log.format("FAILED r2e_tests/t.py::T::old - assert 1 == 2")
    assert r2e_statuses(as_expected) == {"new": "PASSED", "T.old": "FAILED"}
    assert decided(R2E, as_expected, runs=()) == (1.0, "r2e: 2 tests as expected")
    for line in ("PASSED r2e_tests/t.py::T::old", "", "FAILED t.py::T::old\nPASSED t.py::one_more"):
        value, decided_by = decided(R2E, log.format(line), runs=())
        assert (value, decided_by) == (0.0, "r2e: 1 tests otherwise than the 2 expected")
    assert decided(R2E, "", runs=())[0] == 0.0


def test_r2e_reads_the_first_word_of_a_line() -> None:
    log = "short test summary info\nFAILED t.py::new - RuntimeError: PASSED\nERROR t.py - PASSED\nnot PASSED t.py::x\n"
    assert r2e_statuses(log) == {"new": "FAILED", "": "ERROR"}


def test_r2e_reads_the_first_summary_of_a_log_only() -> None:
    summary = "=== short test summary info ===\n{} r2e_tests/t.py::new\n"
    assert r2e_statuses(summary.format("FAILED") + summary.format("PASSED")) == {"new": "FAILED"}


def test_r2e_takes_no_line_for_which_no_test_ran() -> None:
    runs = (WitnessedRun("pytest", replace(END, outcomes={"r2e_tests/t.py::new": "FAILED"})),)
    verdict = replace(R2E, expected={"new": "PASSED"})
    log = "short test summary info\nPASSED r2e_tests/t.py::new\n"
    assert decided(verdict, log, runs=runs) == (0.0, "r2e: 1 tests as expected, but new failed")


@pytest.mark.parametrize(
    ("parsed", "value", "decided_by"),
    [
        ('[{"name":"new","status":"PASSED"},{"name":"old","status":"PASSED"},{"name":"x","status":"FAILED"}]', 1.0,
         "tests_json: 2 of 2 tests passed"),
        ('[{"name":"new","status":"PASSED"},{"name":"old","status":"FAILED"}]', 0.0, "tests_json: 1 of 2 tests passed"),
        ('[{"name":"new","status":"PASSED"},{"name":"old","status":"PASSED"},{"name":"old","status":"SKIPPED"}]', 1.0,
         "tests_json: 2 of 2 tests passed"),
        ('[{"name":"new","status":"PASSED"},{"name":"old","status":"FAILED"},{"name":"old","status":"PASSED"}]', 1.0,
         "tests_json: 2 of 2 tests passed"),
        ("[]", 0.0, "tests_json: 0 of 2 tests passed"),
        ("[3]", 0.0, "tests_json: the parser made nothing of the log"),
    ],
)  # fmt: skip
def test_tests_json_asks_for_every_test(parsed: str, value: float, decided_by: str) -> None:
    assert decided(TESTS_JSON, parsed=f'{{"tests": {parsed}}}'.encode()) == (value, decided_by)
    assert decided(TESTS_JSON, parsed=None) == (0.0, "tests_json: the parser made nothing of the log")


def test_every_verdict_keeps_the_outcome_of_the_tests_that_it_asks_for() -> None:
    def tests(verdict: Verdict, log: str, parsed: bytes | None = None) -> dict[str, str]:
        evidence = Evidence(
            patch=PATCH, exit_code=0, log=log, runs=(WitnessedRun("pytest", END),), parsed=parsed
        )
        return judge(make_task("image", verdict=verdict), evidence).tests

    assert tests(EXIT_CODE, "") == END.outcomes
    half = MARKED.format("SKIPPED tests/t.py::old\n", 0)
    assert tests(SWEBENCH, half) == {"tests/t.py::new": "", "tests/t.py::old": "SKIPPED"}
    assert tests(R2E, "short test summary info\nERROR x.py::T::old - x\n") == {"new": "", "T.old": "ERROR"}
    assert tests(TESTS_JSON, "", b'{"tests":[{"name":"old","status":"ERROR"}]}') == {
        "new": "",
        "old": "ERROR",
    }


@pytest.mark.parametrize(
    ("verdict", "why"),
    [
        (replace(EXIT_CODE, eval_script=" \n"), "eval_script is empty"),
        (replace(R2E, eval_script=""), "eval_script is empty"),
        (replace(R2E, expected={}), "lets no test pass"),
        (replace(R2E, expected={"a": "FAILED"}), "lets no test pass"),
        (replace(R2E, expected={"a": "PASSED", "b": "MAYBE"}), "'MAYBE' is never read"),
        (replace(R2E, protected_paths=("/etc",)), "not a path inside"),
        (replace(TESTS_JSON, tests=()), "tests is empty"),
        (replace(TESTS_JSON, parser="\n"), "parser is empty"),
        (replace(SWEBENCH, fail_to_pass=(), pass_to_pass=()), "any patch would do"),
    ],
)
def test_a_verdict_that_means_nothing_is_refused(verdict: Verdict, why: str) -> None:
    with pytest.raises(TaskBroken, match=why):
        check(make_task("image", verdict=verdict))


@pytest.mark.parametrize(
    ("script", "num_runs", "must"),
    [
        ("#!/bin/bash\nset -euo pipefail\ncd x\npytest a\npython -m unittest b\n", 2, True),
        ("set -e\npytest a\n", 2, False),
        ("pytest a\npytest b\n", 2, False),
        ("set -e\npytest a | tee log\npytest b\n", 2, False),
        ("set -e\npytest a && echo well\npytest b\n", 2, False),
        ("set -e\nset +e\npytest a\npytest b\n", 2, False),
        ("set -e\nif pytest a; then pytest b; fi\n", 2, False),
    ],
)
def test_a_run_must_pass_only_where_the_script_tolerates_nothing(
    script: str, num_runs: int, must: bool
) -> None:
    assert each_must_pass(script, num_runs) is must


def test_of_a_runner_that_the_witness_does_not_see_the_log_names_the_tests() -> None:
    verdict = ExitCode(eval_script="go test ./...\n")
    lines = "".join(f"--- PASS: Test{number} (0.00s)\n" for number in range(MOST_OUTCOMES + 1))
    log = f"{lines}--- FAIL: TestLast (0.00s)\nok  \tm\t0.1s\n".encode()
    found = judged(make_task("image", verdict=verdict), Remains(PATCH, 0, log, b"", None))
    assert (found.reward.resolved, len(found.reward.tests)) == (True, MOST_OUTCOMES)
    known = decoded(bytes(found.outcomes))
    assert (len(known.by_name), known.witnessed) == (MOST_OUTCOMES + 2, False)
    assert known.failed("m.TestLast")
    assert known.passed("m.Test1000")


def test_a_log_that_looks_like_another_languages_names_no_test_of_a_script_without_its_runner() -> None:
    verdict = ExitCode(eval_script="pytest\n")
    log = f"--- PASS: TestA (0.00s)\n{PASSED}".encode()
    found = judged(make_task("image", verdict=verdict), Remains(PATCH, 0, log, b"", None))
    assert decoded(bytes(found.outcomes)).by_name == {}
