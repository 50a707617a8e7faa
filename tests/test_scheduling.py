"""What a worker of xdist is given at a time, which costs more or less and changes no outcome."""

import ast
from pathlib import Path

import pytest

from tests.scheduling import FIRST, SINGLY, rank, unit

ROOT = Path(__file__).parent.parent


def test_the_tests_of_a_file_stay_together() -> None:
    file = "tests/pipeline/test_queue.py"
    assert {unit(f"{file}::test_one"), unit(f"{file}::test_two[a]")} == {file}


def test_an_attack_that_needs_no_calibration_is_a_unit() -> None:
    test = "tests/workers/attacks/test_attacks.py::test_one[asserts]"
    assert unit(test) == test


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("families.py::test_one[close]", "knowing.py::test_two[close]"),
        ("knowing.py::test_one[a-point]", "knowing.py::test_two[9-a-point]"),
        ("families.py::test_one[asserts]", "fuzz.py::test_two"),
        ("families.py::test_one[unittest]", "families.py::test_two[8]"),
        ("families.py::test_one[tests_json]", "knowing.py::test_two"),
    ],
)
def test_tests_that_share_a_calibration_share_a_worker(first: str, second: str) -> None:
    place = "tests/workers/attacks/test_"
    assert unit(place + first) == unit(place + second) != unit(f"{place}families.py::test_one[raises]")


def test_no_fixture_of_a_module_is_made_once_for_each_of_its_tests() -> None:
    made = {
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for folder in SINGLY
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.keyword) and node.arg == "scope" and ast.unparse(node.value) != "'session'"
    }
    assert made == set()


def test_what_takes_longest_comes_first_and_is_there() -> None:
    assert rank(FIRST[0]) == 0
    assert rank("tests/docs/test_pages.py::test_one") == len(FIRST)
    assert [start for start in FIRST if not (ROOT / start).exists()] == []
