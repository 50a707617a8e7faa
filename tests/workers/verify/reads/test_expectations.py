"""Tests whose cases or references the package under test provides."""

import pytest

from workers.verify.reads import imported_by, sources

MODULES = (
    "src/pkg/__init__.py",
    "src/pkg/cases.py",
    "src/pkg/core.py",
    "src/pkg/slow.py",
    "src/pkg/testing/_reference.py",
    "tests/helper.py",
    "tests/test_it.py",
)
OWN = ("tests/helper.py", "tests/test_it.py")
IMPORTS = """import pytest
import pkg
from pkg import core, slow
from pkg.core import TABLE, add
from pkg.slow import add as slow_add
from pkg.testing._reference import expected_sum
from . import helper


"""


def provided(text: str, helper: str = "") -> tuple[str, ...]:
    texts = {"tests/test_it.py": (IMPORTS + text).encode(), "tests/helper.py": helper.encode()}
    return sources(texts, MODULES, OWN)["tests/test_it.py"].provided


@pytest.mark.parametrize(
    "text",
    [
        "@pytest.mark.parametrize('a, b, total', TABLE)\ndef test_it(a, b, total): assert add(a, b) == total",
        "@pytest.mark.parametrize('case', sorted(pkg.CASES.items()))\ndef test_it(case): pass",
        "@pytest.mark.parametrize('case', [*TABLE, (1, 2, 3)])\ndef test_it(case): pass",
        "def test_it():\n    for a, b, total in TABLE:\n        assert add(a, b) == total",
        "def test_it():\n    assert all(add(a, b) == total for a, b, total in core.TABLES['add'])",
        "def test_it():\n    cases = core.TABLE\n    for a, b, total in cases:\n        assert add(a, b) == total",
        "def test_it():\n    assert add(3, 1) == slow_add(3, 1)",
        "def test_it():\n    expected = slow.add(3, 1)\n    assert core.add(3, 1) == expected",
        "def test_it(self):\n    self.assertEqual(add(3, 1), slow_add(3, 1))",
        "def test_it():\n    assert add(3, 1) == expected_sum(1)",
        "@pytest.mark.parametrize('a, b, total', TABLE)\nclass TestAll:\n    def test_it(self, a, b, total): pass",
        "@pytest.fixture(params=TABLE)\ndef case(request): return request.param\n\ndef test_it(case): pass",
    ],
)
def test_what_the_package_provides_is_found(text: str) -> None:
    (test,) = provided(f"{text}\n\n\ndef test_other():\n    assert add(3, 1) == 4\n")
    assert test in ("test_it", "TestAll::test_it")


@pytest.mark.parametrize(
    "text",
    [
        "def test_it():\n    assert add(3, 1) == core.FOUR",
        "def test_it():\n    assert add(3, 1) == add(1, 3)",
        "def test_it():\n    assert core.Sum(3, 1) == core.Sum(3, 1)",
        "def test_it():\n    for token in core.tokens('a b'):\n        assert token",
        "@pytest.mark.parametrize('kind', [core.A, core.B])\ndef test_it(kind): assert kind",
        "def test_it():\n    with pytest.raises(core.Wrong):\n        add(1, None)",
        "def test_it():\n    slow = core.Slow()\n    for number in slow:\n        assert number == 4",
        "def test_it():\n    for case in helper.CASES:\n        assert case",
    ],
)
def test_ordinary_expectations_are_not_flagged(text: str) -> None:
    assert provided(text) == ()


def test_a_helper_hands_on_what_the_package_provides() -> None:
    helper = "from pkg.cases import CASES\n\n\ndef check_all(add):\n    for a, b, total in CASES:\n        assert add(a, b) == total\n"
    text = "def test_it():\n    helper.check_all(add)\n\n\ndef test_other():\n    assert add(3, 1) == 4\n"
    assert provided(text, helper) == ("test_it",)


@pytest.mark.parametrize(
    ("text", "files"),
    [
        (
            "@pytest.mark.parametrize('a, b, total', TABLE)\ndef test_it(a, b, total): pass",
            ["src/pkg/core.py"],
        ),
        ("CASES = sorted(TABLE)\n\ndef test_it():\n    for case in CASES: pass", ["src/pkg/core.py"]),
        (
            "def test_it():\n    expected = slow.add(3, 1)\n    assert core.add(3, 1) == expected",
            ["src/pkg/core.py", "src/pkg/slow.py"],
        ),
        ("def test_it():\n    assert add(3, 1) == expected_sum(1)", ["src/pkg/testing/_reference.py"]),
        ("def test_it():\n    slow = core.Slow()\n    for number in slow:\n        assert number", []),
        ("def test_it():\n    assert add(3, 1) == core.FOUR", []),
    ],
)
def test_the_files_that_provide_it_are_named(text: str, files: list[str]) -> None:
    texts = {"tests/test_it.py": (IMPORTS + text).encode()}
    assert list(sources(texts, MODULES, OWN)["tests/test_it.py"].providing) == files


def test_what_each_module_of_the_package_imports_is_known() -> None:
    modules = ("pkg/__init__.py", "pkg/cases.py", "pkg/core.py")
    texts = {
        "pkg/__init__.py": b"",
        "pkg/core.py": b"def later():\n    from . import cases\n",
        "pkg/cases.py": b"(",
    }
    assert imported_by(texts, modules) == {
        "pkg/__init__.py": frozenset(),
        "pkg/core.py": frozenset({"pkg/cases.py"}),
    }


def test_imports_lead_to_files() -> None:
    text = (
        b"from ..pkg import core\nimport pkg.slow\nfrom . import helper\nfrom pkg import nothing\nimport os\n"
    )
    modules = ("pkg/__init__.py", "pkg/core.py", "pkg/slow.py", "tests/helper.py")
    found = sources({"tests/test_it.py": text}, modules, ())["tests/test_it.py"].imported
    assert found == modules


def test_a_module_of_python_is_not_one_of_the_package() -> None:
    modules = ("pkg/__init__.py", "pkg/json.py", "tests/test_it.py")
    text = b"import json\nfrom pkg import json as own\n"
    assert sources({"tests/test_it.py": text}, modules, ())["tests/test_it.py"].imported == ("pkg/json.py",)


def test_what_cannot_be_read_provides_nothing() -> None:
    assert sources({"tests/test_it.py": b"def test_it(:\n"}, MODULES, OWN) == {}
