"""What two runs of the tests say of a pass together."""

import pytest
from msgspec.structs import replace

from pipeline.task import Calibration
from tests.workers.contradictions import changing
from workers.grading.controls.drawing import Outcomes, outcomes, shortfall, strays, survivors, unsteady
from workers.grading.defence.witness import End, WitnessedRun

CALIBRATION = Calibration(passing=("a", "b"), witnessed=True)


def run(*, collected: int = 2, **by_name: str) -> Outcomes:
    return Outcomes(by_name, witnessed=True, stopped_early=len(by_name) < collected, finished=True)


def test_a_pass_has_all_tests_of_the_known_fix() -> None:
    assert shortfall(run(a="PASSED", b="PASSED"), CALIBRATION) is None
    assert shortfall(run(a="PASSED", b="PASSED", c="FAILED"), CALIBRATION) is None


@pytest.mark.parametrize("outcome", ["SKIPPED", "XFAIL", "XPASS", "FAILED", "ERROR", ""])
def test_a_pass_lacks_what_did_not_pass(outcome: str) -> None:
    assert shortfall(run(a="PASSED", b=outcome), CALIBRATION) == "b did not pass, as with the known fix"


def test_a_pass_lacks_tests_that_did_not_run() -> None:
    assert shortfall(run(), CALIBRATION) == "a, b did not pass, as with the known fix"
    many = Calibration(passing=tuple("abcde"))
    assert shortfall(run(), many) == "a, b, c and 2 more did not pass, as with the known fix"


def test_a_pass_lacks_a_witness_if_the_known_fix_had_one() -> None:
    unseen = Outcomes({"a": "PASSED", "b": "PASSED"}, witnessed=False, finished=True)
    assert shortfall(unseen, CALIBRATION) == "no test run was witnessed, as those of the known fix were"
    assert shortfall(unseen, Calibration(passing=("a", "b"))) is None


def test_what_the_known_fix_changed_of_the_runner_too_does_not_count() -> None:
    changed = Outcomes(
        {"a": "PASSED", "b": "PASSED"}, witnessed=True, replaced=frozenset({"pytest.raises", "open"})
    )
    why = "the test runner was changed otherwise than with the known fix: pytest.raises"
    assert shortfall(changed, Calibration(passing=("a",), witnessed=True, replaced=("open", "x"))) == why
    assert shortfall(changed, Calibration(witnessed=True, replaced=("open", "pytest.raises"))) is None


def test_a_few_tests_that_do_not_need_the_fix_may_have_failed_by_chance_if_those_that_need_it_passed() -> None:
    known = Calibration(passing=tuple("abcdef"), needing_fix=("a", "b"))
    fixed = dict.fromkeys("abcdef", "PASSED")
    assert unsteady(run(**fixed), known) == []
    assert unsteady(run(**fixed | {"d": "FAILED", "f": ""}), known) == ["d", "f"]
    assert unsteady(run(**fixed | dict.fromkeys("cdef", "FAILED")), known) == []
    assert unsteady(run(**fixed | {"b": "FAILED", "d": "FAILED"}), known) == []
    assert unsteady(run(**fixed | {"d": "FAILED"}), replace(known, needing_fix=())) == []


AB = changing("t.py", 0, "4", "5", "a", "b")


@pytest.mark.parametrize("outcome", ["PASSED", "SKIPPED", "XFAIL", "XPASS", ""])
def test_a_contradicted_test_that_did_not_fail_survived(outcome: str) -> None:
    assert survivors([AB], run(a="FAILED", b=outcome), CALIBRATION) == ["b"]


def test_a_contradicted_test_that_did_not_run_survived() -> None:
    assert survivors([AB], run(a="ERROR"), CALIBRATION) == ["b"]
    assert survivors([AB], run(), CALIBRATION) == ["a", "b"]


def test_a_contradicted_test_is_known_by_the_name_that_it_has_then() -> None:
    renamed = replace(AB, fails=("a",), renamed={"a": "a2"})
    assert survivors([renamed], run(a2="FAILED"), CALIBRATION) == []
    assert survivors([renamed], run(a="FAILED", a2="PASSED"), CALIBRATION) == ["a"]


def test_where_the_script_ends_at_the_first_failure_one_must_have_failed() -> None:
    stops = Calibration(passing=("a", "b"), stops_early=True)
    assert survivors([AB], run(a="FAILED"), stops) == []
    assert survivors([AB], run(a="PASSED"), stops) == ["a", "b"]
    assert survivors([AB], run(a="PASSED", b="FAILED"), stops) == ["a"]


def test_each_of_two_contradicted_tests_must_fail_under_the_name_that_it_has_then() -> None:
    two = [replace(AB, fails=("a",)), replace(AB, fails=("b",), renamed={"b": "b2"})]
    assert survivors(two, run(a="FAILED", b2="FAILED"), CALIBRATION) == []
    assert survivors(two, run(a="FAILED", b2="PASSED"), CALIBRATION) == ["b"]
    assert survivors(two, run(a="PASSED", b="FAILED"), CALIBRATION) == ["a", "b"]


def test_a_test_that_one_of_two_contradictions_concerns_has_not_strayed() -> None:
    two = [replace(AB, fails=("a",)), replace(AB, fails=("b",), renamed={"c": "c2"})]
    needing = Calibration(passing=("a", "b", "c"), needing_fix=("a", "b", "c"))
    assert strays(two, run(a="FAILED", b="FAILED", c2="PASSED"), needing) == []
    assert strays(two, run(a="FAILED", b="FAILED", c="PASSED"), needing) == ["c"]


def test_a_test_that_needs_the_fix_and_fails_without_being_contradicted_has_strayed() -> None:
    of_a = replace(AB, fails=("a",), may_fail=("c",))
    needing = Calibration(passing=("a", "b", "c", "d"), needing_fix=("a", "b", "c"))
    assert strays([of_a], run(a="FAILED", b="PASSED", c="FAILED", d="FAILED"), needing) == []
    assert strays([of_a], run(a="FAILED", b="FAILED", c="PASSED"), needing) == ["b"]
    assert strays([of_a], run(a="FAILED", c="PASSED"), needing) == ["b"]
    assert strays([of_a], run(a="FAILED"), replace(needing, stops_early=True)) == []
    may_end = replace(of_a, may_end=True)
    assert strays([may_end], run(a="FAILED"), needing) == []
    assert strays([may_end], run(a="FAILED", b="FAILED"), needing) == ["b"]


def test_outcomes_are_the_witnesses_where_it_reported() -> None:
    end = End(
        status=0,
        collected=2,
        finished=1,
        outcomes={"test_a.py::test_a": "PASSED"},
        replaced=(),
        rewritten=(),
        stopped=(),
    )
    seen = outcomes((WitnessedRun("pytest", end),), {"test_a": "PASSED"})
    assert seen == Outcomes(
        {"test_a.py::test_a": "PASSED"}, witnessed=True, stopped_early=True, finished=True
    )


def test_outcomes_are_the_logs_where_no_run_was_witnessed() -> None:
    read = outcomes((), {"test_a": "PASSED", "test_b": ""})
    assert read == Outcomes({"test_a": "PASSED"}, witnessed=False, finished=True)
