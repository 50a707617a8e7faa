"""What the cases of a parametrized test expect is contradicted where it is written, and each test keeps its name."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from workers.grading.controls.writing import Candidate, candidates

CASES = """import pytest


@pytest.mark.parametrize(("a", "b", "total"), [(3, 1, 4), ("x", "y", "xy",), (0.5,
    -2, -1.5)])
def test_add(a, b, total):
    assert a + b == total
"""


def found(source: str) -> list[Candidate]:
    return candidates(source.encode(), random.Random(0))


def outcomes(source: str, folder: Path) -> list[str]:
    (folder / "test_cases.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
    ]
    said = subprocess.run(
        [*command, "test_cases.py"], cwd=folder, capture_output=True, text=True, check=False
    ).stdout
    return sorted(
        line.split(" - ")[0] for line in said.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR"))
    )


@pytest.mark.slow
def test_every_case_fails_under_its_own_name(tmp_path: Path) -> None:
    (candidate,) = found(CASES)
    assert candidate.tests == ("test_add",)
    contradicted = CASES.replace(candidate.was, candidate.becomes)
    passed = outcomes(CASES, tmp_path)
    assert len(passed) == 3
    assert outcomes(contradicted, tmp_path) == [line.replace("PASSED", "FAILED") for line in passed]


@pytest.mark.slow
def test_code_that_returns_the_parameter_which_its_caller_has_passes_the_control(tmp_path: Path) -> None:
    source = CASES.replace("a + b", "add(a, b)") + (
        "\n\ndef add(a, b):\n    import sys\n    return sys._getframe(1).f_locals['total']\n"
    )
    (candidate,) = found(source)
    assert all(
        line.startswith("PASSED")
        for line in outcomes(source.replace(candidate.was, candidate.becomes), tmp_path)
    )


@pytest.mark.parametrize(
    "source",
    [
        CASES.replace("assert a", "print(total)\n    assert a"),
        CASES.replace("a + b == total", "a + b + total == total"),
        CASES.replace("(3, 1, 4)", "(3, 1, [4])"),
        CASES.replace("(3, 1, 4)", "(3, 1, 4), (3, 1, 4)"),
        CASES.replace("(3, 1, 4)", "pytest.param(3, 1, 4)"),
        CASES.replace('"y"', '"\\\\n"'),
        CASES.replace("-1.5)]", "-1.5)], ids=str"),
    ],
)
def test_cases_whose_names_would_change_or_that_are_given_to_the_code_are_left_alone(source: str) -> None:
    assert source != CASES
    assert not any(".param(" in candidate.becomes for candidate in found(source))
