"""Which expectations of tests a run without the fix meets, though the tests fail."""

import random

import pytest

from tests.workers.attacks.patches import HONEST
from tests.workers.attacks.stage import RunOnce
from tests.workers.claims import make_claim
from tests.workers.conftest import RepoImage
from tests.workers.verify.test_observing import with_files
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes
from workers.verify.calibrating import USELESS, Calibrator
from workers.verify.observing import met

PATH = "tests/test_calc.py"
TESTS = """import pytest
from calc import add, sub


def check(value, expected):
    assert value == expected


def test_two_things():
    assert sub(5, 2) == 3
    expected = 7
    assert add(5, 2) == expected and sub(4, 2) == 2
    check(sub(9, 1), 8)
    check(add(9, 1), 10)
    assert sub(6, 1) == 5


def test_error():
    with pytest.raises(ValueError, match="a sum"):
        raise ValueError("a difference")
    with pytest.raises(KeyError):
        raise IndexError("a sum")
    with pytest.raises(KeyError, match="sum") as caught:
        add(1, 1)
    assert caught.value


@pytest.mark.parametrize("number", [0, 1])
def test_each(number):
    assert add(2, number) == 2 + number
    assert sub(2, number) == 2 - number
"""
UNITTESTS = """import unittest
from calc import add, sub


class Adding(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
        self.assertEqual(sub(1, 2), -1)
        with self.assertRaisesRegex(ValueError, "none"):
            raise ValueError("some")
        self.assertTrue(missing)
        self.assertTrue(sub(2, 1))
"""


PARTS = """import pytest
from calc import add, sub


def test_error():
    text = "no 34"
    with pytest.raises(ValueError, match=text):
        raise ValueError(f"no {add(30, 4)}")


def test_sums():
    total = 34
    assert add(30, 4) == total
    assert sub(30, 4) == 26
    assert add(30, 6) == 36


def test_refusal():
    with pytest.raises(
        ValueError,
        match="no 36",
    ):
        if add(30, 6) == 36:
            raise ValueError("no 36")
"""

# One of many things that a test expects.
MANY = "".join(
    ["\n\ndef test_many():\n", *(f"    assert sub({number}, 1) == {number - 1}\n" for number in range(2, 32))]
)


@pytest.fixture
def grader(sandboxes: DockerSandboxes) -> Grader:
    return Grader(sandboxes)


async def met_in(grader: Grader, image: RepoImage, path: str, text: str, command: str) -> list[str]:
    claim = make_claim(with_files(image, f"{command} {path}", **{path: text}))
    found = await met(grader, claim, USELESS, {path: text.encode()}, "/workspace", claim.request.limits)
    return [text.encode()[start:end].decode() for start, end in found.get(path, [])]


@pytest.mark.docker
async def test_what_a_test_expects_behind_its_failure_is_known(grader: Grader, repo_image: RepoImage) -> None:
    assert await met_in(grader, repo_image, PATH, TESTS, "python3 -m pytest") == [
        "sub(5, 2) == 3",
        "sub(4, 2) == 2",
        "sub(6, 1) == 5",
        "ValueError",
        "sub(2, number) == 2 - number",
    ]


@pytest.mark.docker
async def test_so_it_is_with_unittest(grader: Grader, repo_image: RepoImage) -> None:
    assert await met_in(grader, repo_image, "tests/test_unit.py", UNITTESTS, "python3 -m unittest") == [
        "self.assertEqual(sub(1, 2), -1)",
        "ValueError",
        "self.assertTrue(sub(2, 1))",
    ]


REPORTS = """from unittest import TestCase
from calc import add, sub


class Test(TestCase):
    def test_report(self):
        self.assertEqual([sub(5, 2), add(5, 2)], [3, 7])

    def test_line(self):
        wanted = "2 of 6"
        assert f"{sub(3, 1)} of {add(4, 2)}" == wanted

    def test_mistake(self):
        assert {"sum": add(1, None)} == {"sum": 1}
"""


@pytest.mark.docker
async def test_the_parts_of_a_value_that_hold_are_known(grader: Grader, repo_image: RepoImage) -> None:
    found = await met_in(grader, repo_image, PATH, REPORTS, "python3 -m pytest")
    assert found == ["sub(5, 2)", "3", "2", " ", "o", "f", " "]


@pytest.mark.slow
@pytest.mark.docker
async def test_no_control_contradicts_a_part_that_holds_without_the_fix(
    sandboxes: DockerSandboxes, grader: Grader, repo_image: RepoImage
) -> None:
    """Code that cheats in the other part fails such a control as right code does."""
    tests = f"{PARTS}{MANY}    assert add(1, 1) == 2\n"
    claim = make_claim(with_files(repo_image, f"python3 -m pytest {PATH}", **{PATH: tests}))
    calibrator = Calibrator(RunOnce(grader), sandboxes, num_controls=4, chance=random.Random(1))
    calibration = await calibrator.calibrate(claim, HONEST)
    of_test = {
        name.partition("::")[2]: {
            tests.encode()[: one.changes[0].offset_bytes].count(b"\n") + 1
            for one in calibration.contradictions
            if name in one.fails
        }
        for name in calibration.passing
    }
    assert of_test == {
        "test_error": {6},
        "test_sums": {12, 15},
        "test_refusal": {21},
        "test_many": {tests.count("\n")},
    }
