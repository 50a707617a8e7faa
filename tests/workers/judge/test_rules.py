"""The built-in rule "commands" scores by what commands came to, and abstains where that says nothing."""

import pytest

from pipeline.trajectory import Action
from tests.workers.judge.rollouts import ran, turn
from workers.judge.functions import RULES

PASSED = "..\n2 passed in 0.01s\n"
SCORES = {
    "a command that fails": (ran("cat nowhere", exit_code=1), -1.0),
    "a command that is not there": (ran("pyhton x.py", exit_code=127), -1.0),
    "a command that is stopped at its limit": (ran("sleep 1000", exit_code=None), -1.0),
    "a command that ends well": (ran("ls"), None),
    "a command that was not run": (Action(command="ls"), None),
    "a search that finds nothing": (ran("cd src && grep -rn foo .", exit_code=1), None),
    "a search in a place that is not there": (ran("grep foo nowhere", exit_code=2), -1.0),
    "two files that differ": (ran("diff a b", exit_code=1), None),
    "tests that pass": (ran("python -m pytest -q", PASSED), 1.0),
    "tests that pass in a directory": (ran("cd src && PYTHONPATH=. pytest -q tests 2>&1", PASSED), 1.0),
    "tests that pass behind a pipe": (ran("pytest -q | tail -n 3", PASSED), 1.0),
    "tests that fail": (ran("pytest -q", "1 failed, 2 passed in 0.1s", exit_code=1), None),
    "tests that fail behind a pipe": (ran("pytest -q | tail -n 3", "1 failed, 2 passed in 0.1s"), None),
    "no test that is run": (ran("pytest --collect-only -q", "3 tests collected\n"), None),
    "the version of pytest": (ran("pytest --version", "pytest 8.0\n"), None),
    "unittest that passes": (ran("python3 -m unittest", "..\nRan 2 tests in 0.001s\n\nOK\n"), 1.0),
    "unittest without tests": (ran("python3 -m unittest", "\nRan 0 tests in 0.000s\n\nOK\n"), None),
    "tests of another language": (ran("cd lib && go test ./..."), 1.0),
    "tests of another language, their status lost": (ran("go test ./... | tail"), None),
    "a check by hand that holds": (
        ran('python3 -c "from calc import add; print(add(1, 1) == 2)" 2>&1 | tail -n 1', "True\n"),
        1.0,
    ),
    "a check by hand that does not hold": (
        ran('python3 -c "from calc import add; print(add(1, 1) == 2)"', "False\n"),
        None,
    ),
    "a check of nothing": (ran('python3 -c "print(True)"', "True\n"), None),
}


@pytest.mark.parametrize(("action", "score"), SCORES.values(), ids=list(SCORES))
def test_a_step_is_scored_by_its_command(action: Action, score: float | None) -> None:
    assert RULES["commands"]("an issue", [turn(action)], 0) == score


def test_one_command_that_fails_decides_a_step_of_several() -> None:
    turns = [turn(ran("pytest -q", PASSED), ran("cat nowhere", exit_code=1)), turn(ran("ls"))]
    assert RULES["commands"]("an issue", turns, 0) == -1.0
    assert RULES["commands"]("an issue", turns, 1) is None
