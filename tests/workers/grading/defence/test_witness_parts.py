"""What the witness notes of the test runner: whatever has become something else is named. Each time in a new Python."""

import json
import subprocess
import sys

import pytest

from workers.grading.defence.witness_plugin.run import as_json

COMPARED = """
import builtins, math, sys, unittest, unittest.case
from workers.grading.defence.witness_plugin.parts import note_parts, replaced_parts
note_parts()
{change}
sys.stdout.write(" ".join(name for name, _ in replaced_parts()))
"""


def replaced(change: str) -> set[str]:
    """Names of the parts that are found to have changed after these lines of Python."""
    command = [sys.executable, "-c", COMPARED.format(change=change)]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    "change",
    [
        "pass",
        "unittest.case.counted = 1",
        "unittest.TestCase.longMessage = False",
        "unittest.TestCase.assertSame = print",
    ],
)
def test_nothing_is_found_where_no_part_has_changed(change: str) -> None:
    assert replaced(change) == set()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("case.fail = print", "unittest.case.TestCase.fail"),
        ("case.fail.__code__ = (lambda *_: None).__code__", "unittest.case.TestCase.fail"),
        ("case.fail.__defaults__ = (3, 4)", "unittest.case.TestCase.fail"),
        ("case.fail.__kwdefaults__ = {'msg': 4}", "unittest.case.TestCase.fail"),
        ("del case.fail", "unittest.case.TestCase.fail"),
        ("case.none = case.fail; del case.fail", "unittest.case.TestCase.fail"),
        ("case.__getattribute__ = lambda *_: print", "unittest.case.TestCase.__getattribute__"),
        ("case.__module__ = 'elsewhere'; case.fail = print", "unittest.case.TestCase.fail"),
        ("unittest.case.TestCase = type('TestCase', (), {})", "unittest.case.TestCase"),
        ("unittest.case.TestCase = type('TestCase', (case,), {})", "unittest.case.TestCase"),
        ("sys.modules['unittest.case'] = type(sys)('unittest.case')", "unittest.case"),
        ("del sys.modules['unittest.case']", "unittest.case"),
        ("math.isclose = print", "math.isclose"),
    ],
)
def test_what_has_changed_is_named(change: str, name: str) -> None:
    assert name in replaced(f"case = unittest.TestCase\n{change}")


def test_a_function_that_was_exchanged_is_named_alone() -> None:
    code = "unittest.TestCase.fail.__code__ = unittest.TestCase.assertTrue.__code__"
    assert replaced(code) == {"unittest.case.TestCase.fail"}


@pytest.mark.parametrize("name", ["all", "id", "isinstance", "len", "list", "map", "vars", "zip"])
def test_a_function_of_pythons_that_was_replaced_hides_nothing(name: str) -> None:
    change = f"builtins.{name} = lambda *_: True\nunittest.TestCase.fail = print"
    assert replaced(change) >= {f"builtins.{name}", "unittest.case.TestCase.fail"}


@pytest.mark.parametrize(
    "value",
    [
        {"status": None, "outcomes": {"a\n\t\"b\\c'\x00\x1f\x7f": "PASSED"}, "finished": -1},
        [[], {}, "", "é😀\u2028", ("a", "b"), [["x", ["y"]]], True],
    ],
)
def test_json_is_pythons(value: object) -> None:
    assert json.loads(as_json(value)) == json.loads(json.dumps(value))
