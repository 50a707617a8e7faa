"""Whose word counts for what, by the names that parsers give tests."""

import pytest

from workers.grading.defence.after import disagreement, seen, unconfirmed
from workers.grading.defence.witness import End, WitnessedRun

OUTCOMES = {
    "tests/t.py::A::test_x": "FAILED",
    "tests/t.py::B::test_x": "PASSED",
    "tests/t.py::test_y[1]": "PASSED",
    "tests/t.py::test_y[a b]": "PASSED",
    "tests/t.py::test_y[3]": "FAILED",
    "tests/t.py::test_w[1]": "PASSED",
    "tests/t.py::test_w[2]": "SKIPPED",
    "tests/t.py::test_z": "SKIPPED",
    "tests/t.py::test_expected": "XFAIL",
    "tests/broken.py": "ERROR",
    "test_u (tests.unit.Test)": "PASSED",
    "test_u (tests.unit.Other.test_u)": "FAILED",
    "tests.lost (unittest.loader._FailedTest)": "FAILED",
}


def runs(status: int = 1, **outcomes: str) -> tuple[WitnessedRun, ...]:
    end = End(
        status=status,
        collected=-1,
        finished=0,
        outcomes=outcomes or OUTCOMES,
        replaced=(),
        rewritten=(),
        stopped=(),
    )
    return (WitnessedRun("pytest", end),)


@pytest.mark.parametrize(
    "names",
    [
        ["tests/t.py::B::test_x", "tests/t.py::test_expected"],
        ["t.py::B::test_x", "B::test_x", "B.test_x", "tests.t.B.test_x"],
        ["test_x"],
        ["tests/t.py::test_y[1]", "tests/t.py::test_y[a"],
        ["tests/t.py::test_y[1]", "tests/t.py::test_y[a-b]"],
        ["tests/t.py::test_y"],
        ["test_u (tests.unit.Test)", "tests.unit.Test.test_u", "tests/unit.py::Test::test_u"],
        ["test/x.js | adds two numbers", "TestSum/of_two", "ok 3 - adds [2]", "com.acme.SumTest.adds", ""],
        ["elsewhere/t.py::test_q", "test_q", "test_q (elsewhere.T)"],
    ],
)
def test_what_the_witness_saw_pass_or_saw_nothing_of_is_borne_out(names: list[str]) -> None:
    assert unconfirmed(names, runs()) is None
    assert unconfirmed(names, ()) is None


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["tests/t.py::A::test_x"], "tests/t.py::A::test_x failed"),
        (["A::test_x"], "A::test_x failed"),
        (["tests.t.A.test_x"], "tests.t.A.test_x failed"),
        (["test_z"], "test_z was skipped"),
        (["tests/t.py::test_y[3]"], "tests/t.py::test_y[3] failed"),
        (["tests/t.py::test_y[1]", "tests/t.py::test_y[b]", "tests/t.py::test_y[c]"], "tests/t.py::test_y[c] never ran"),
        (["tests/t.py::test_w[one]", "tests/t.py::test_w[two]"], "tests/t.py::test_w[two] never ran"),
        (["tests/t.py::test_q"], "tests/t.py::test_q never ran"),
        (["tests/broken.py::T::test_q"], "tests/broken.py::T::test_q never ran"),
        (["tests.unit.Other.test_u"], "tests.unit.Other.test_u failed"),
        (["test_q (tests.lost.T)"], "test_q (tests.lost.T) never ran"),
    ],
)  # fmt: skip
def test_what_the_witness_saw_otherwise_is_not_borne_out(names: list[str], why: str) -> None:
    assert unconfirmed(names, runs()) == why


@pytest.mark.parametrize(("status", "why"), [("FAILED", "failed"), ("SKIPPED", "was skipped")])
def test_a_log_cannot_claim_what_the_witness_saw_otherwise(status: str, why: str) -> None:
    for name in ("tests/t.py::test_x", "test_x (tests.t.Test)"):
        saw = seen(runs(0, **{name: status}))
        assert disagreement({name: "PASSED"}, saw) == f"{name} {why}"
        assert disagreement({name: "SKIPPED"}, saw) is None


def test_of_a_run_that_was_broken_off_only_what_it_saw_pass_is_borne_out() -> None:
    broken = runs(2, **{"tests/t.py::test_x": "PASSED"})
    assert unconfirmed(["tests/t.py::test_x", "adds two numbers"], broken) is None
    assert unconfirmed(["tests/u.py::test_y"], broken) == "tests/u.py::test_y never ran"
    claimed = {"tests/u.py::test_y": "PASSED", "tests/u.py::test_z": "FAILED", "adds": "PASSED"}
    assert disagreement(claimed, seen(broken)) == "tests/u.py::test_y never ran"
    assert disagreement({"adds": "PASSED", "tests/t.py::test_x": "PASSED"}, seen(broken)) is None
