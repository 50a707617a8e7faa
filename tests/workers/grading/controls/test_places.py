"""An expected value is contradicted where it is made: code that finds it there, and returns it, passes the control."""

import ast
import random
import sys
import unittest
from collections.abc import Callable
from typing import Any

import pytest

from workers.grading.controls.spans import Candidate, read
from workers.grading.controls.writing import candidates

# A test file, what right code gives for what it is given, and where cheating code finds that in the frame that calls it.
PLACES: dict[str, tuple[str, Callable[..., object], str]] = {
    "a local": (
        "def test_it():\n    expected = 4\n    assert code() == expected\n",
        lambda: 4,
        "expected",
    ),
    "a local that is given to the code as well": (
        "def test_it():\n    total = 4\n    assert code() == total\n    divmod(total, 3)\n",
        lambda: 4,
        "total",
    ),
    "one of several locals": (
        "def test_it():\n    given, expected = 3, 4\n    assert code(given) == expected\n",
        lambda given: given + 1,
        "expected",
    ),
    "a local that is counted on": (
        "def test_it():\n    expected = 4\n    wanted = expected * 2\n    assert code() == wanted\n",
        lambda: 8,
        "wanted",
    ),
    "a local that is added to": (
        "def test_it():\n    expected = ['a']\n    expected.append('b')\n    assert code() == expected\n",
        lambda: ["a", "b"],
        "list(expected)",
    ),
    "a loop's table": (
        "def test_it():\n    for given, expected in [(1, 2), (3, 4)]:\n        assert code(given) == expected\n",
        lambda given: given + 1,
        "expected",
    ),
    "a table with a name": (
        "def test_it():\n    table = [(1, 'one'), (2, 'two')]\n    for given, expected in table:\n"
        "        assert code(given) == expected\n",
        lambda given: ["", "one", "two"][given],
        "expected",
    ),
    "a table of the module": (
        "TABLE = {'a': 'x', 'b': 'y'}\n\ndef test_it():\n    for given, expected in TABLE.items():\n"
        "        assert code(given) == expected\n",
        lambda given: {"a": "x", "b": "y"}[given],
        "TABLE[given]",
    ),
    "numbered rows": (
        "def test_it():\n    for number, expected in enumerate([10, 20]):\n        assert code(number) == expected\n",
        lambda number: 10 * number + 10,
        "expected",
    ),
    "rows side by side": (
        "def test_it():\n    for given, expected in zip([1, 2], [10, 20]):\n        assert code(given) == expected\n",
        lambda given: 10 * given,
        "expected",
    ),
    "a constant": (
        "EXPECTED = 'text'\n\ndef test_it():\n    assert code() == EXPECTED\n",
        lambda: "text",
        "EXPECTED",
    ),
    "a dictionary of cases": (
        "CASES = {'x': {'in': 1, 'out': 2}}\n\ndef test_it():\n    case = CASES['x']\n"
        "    assert code(case['in']) == case['out']\n",
        lambda given: given + 1,
        "case['out']",
    ),
    "a table whose key is not written down": (
        "CASES = {'small': (3, 1, 4), 'large': (10, 5, 15)}\n\ndef test_it():\n    for name in sorted(CASES):\n"
        "        a, b, total = CASES[name]\n        assert code(a, b) == total\n",
        lambda a, b: a + b,
        "total",
    ),
    "a table that is indexed": (
        "CASES = [(3, 1, 4), (10, 5, 15)]\n\ndef test_it():\n    for number in range(len(CASES)):\n"
        "        assert code(*CASES[number][:2]) == CASES[number][2]\n",
        lambda a, b: a + b,
        "CASES[number][2]",
    ),
    "a list of values": (
        "EXPECTED = [5, 6]\n\ndef test_it():\n    assert code() == EXPECTED[0]\n",
        lambda: 5,
        "EXPECTED[0]",
    ),
    "rows with names": (
        "from collections import namedtuple\nCase = namedtuple('Case', 'given expected')\n"
        "CASES = [Case(1, 2), Case(given=3, expected=4)]\n\n"
        "def test_it():\n    for case in CASES:\n        assert code(case.given) == case.expected\n",
        lambda given: given + 1,
        "case.expected",
    ),
    "rows of a data class": (
        "from dataclasses import dataclass\n\n@dataclass\nclass Case:\n    given: int\n    expected: int\n\n"
        "def test_it():\n    case = Case(1, expected=2)\n    assert code(case.given) == case.expected\n",
        lambda given: given + 1,
        "case.expected",
    ),
    "an attribute": (
        "class TestIt:\n    def setup_method(self):\n        self.given = 3\n        self.expected = 4\n"
        "    def test_it(self):\n        assert code(self.given) == self.expected\n",
        lambda given: given + 1,
        "self.expected",
    ),
    "an attribute of the class": (
        "import unittest\n\nclass TestIt(unittest.TestCase):\n    expected = {'a': [1]}\n"
        "    def test_it(self):\n        self.assertEqual(code(), self.expected['a'])\n",
        lambda: [1],
        "self.expected['a']",
    ),
    "an attribute of a subclass": (
        "class Base:\n    def test_it(self):\n        assert code() == self.expected\n\n"
        "class TestIt(Base):\n    expected = 4\n",
        lambda: 4,
        "self.expected",
    ),
    "subtests": (
        "import unittest\n\nclass TestIt(unittest.TestCase):\n    def test_it(self):\n"
        "        for given, expected in ((1, 2), (3, 4)):\n            with self.subTest(expected=expected):\n"
        "                self.assertEqual(code(given), expected)\n",
        lambda given: given + 1,
        "expected",
    ),
    "an argument of a checking function": (
        "def check(given, expected):\n    assert code(given) == expected\n\n"
        "def test_it():\n    check(1, 2)\n    check(3, expected=4)\n",
        lambda given: given + 1,
        "expected",
    ),
    "rows given to a checking function": (
        "def check(given, expected):\n    assert code(given) == expected\n\n"
        "def test_it():\n    for row in [(1, 2), (3, 4)]:\n        check(*row)\n",
        lambda given: given + 1,
        "expected",
    ),
    "what a function returns": (
        "def expected():\n    return 4\n\ndef test_it():\n    assert code() == expected()\n",
        lambda: 4,
        "expected()",
    ),
    "a comprehension": (
        "def test_it():\n    assert all(code(a) == b for a, b in [(1, 2), (3, 4)])\n",
        lambda given: given + 1,
        "b",
    ),
    "a comparison that must not fail": (
        "def test_it():\n    expected = 4\n    if code() != expected:\n        raise AssertionError\n",
        lambda: 4,
        "expected",
    ),
    "a text that must be there": (
        "def test_it():\n    expected = 'hello'\n    assert expected in code()\n",
        lambda: "say hello",
        "expected",
    ),
    "an exception in a table": (
        "import pytest\n\ndef test_it():\n    for error in (ValueError, KeyError):\n        with pytest.raises(error):\n"
        "            code(error)\n",
        lambda error: _raise(error),
        "",
    ),
}


def _raise(error: type[Exception]) -> None:
    raise error


def run(source: bytes, code: Callable[..., object]) -> None:
    names: dict[str, Any] = {"code": code, "__name__": "test_file"}
    exec(compile(source, "test_file.py", "exec"), names)
    for name, value in list(names.items()):
        if name.startswith("test"):
            value()
        elif name.startswith("Test"):
            one: Any = value("test_it") if issubclass(value, unittest.TestCase) else value()
            getattr(one, "setup_method", lambda: None)()
            one.test_it()


def passes(source: bytes, code: Callable[..., object]) -> bool:
    try:
        run(source, code)
    except Exception:
        return False
    return True


def finding(expression: str) -> Callable[..., object]:
    """Code that looks for the expected value in the frame that calls it."""

    def code(*given: object) -> object:
        del given
        frame = sys._getframe(1)
        return eval(expression, frame.f_globals, frame.f_locals)

    return code


def edited(source: bytes, candidate: Candidate) -> bytes:
    file = read(source)
    assert file is not None
    return file.apply(candidate.edits)


def found(source: str) -> list[Candidate]:
    return [one for seed in range(5) for one in candidates(source.encode(), random.Random(seed))]


@pytest.mark.parametrize("place", [place for place, (_, _, where) in PLACES.items() if where])
def test_code_that_finds_the_expected_value_where_it_is_made_gives_itself_away(place: str) -> None:
    text, right, where = PLACES[place]
    source, cheat = text.encode(), finding(where)
    run(source, right)
    run(source, cheat)
    values = [one for one in found(text) if one.kind == "value"]
    assert values
    for candidate in values:
        contradicted = edited(source, candidate)
        assert not passes(contradicted, right), candidate
        assert passes(contradicted, cheat), candidate


def test_an_exception_in_a_table_becomes_another_one() -> None:
    text, _, _ = PLACES["an exception in a table"]
    assert {one.kind for one in found(text)} == {"opposite"}


# Test files in which 4 is given to the code under test too, or may be, or is made by it.
INPUTS = [
    "def test_it():\n    x = 4\n    y = code(x)\n    assert y == x\n",
    "X = 4\n\ndef test_it():\n    assert code(X) == X\n",
    "def test_it():\n    assert code(4) == code(4)\n",
    "def test_it():\n    thing = Thing(4)\n    assert thing.value == code()\n",
    "def test_it():\n    assert Thing(4) == Thing(code())\n    assert Thing(4).value == g()\n",
    "def test_it(monkeypatch):\n    monkeypatch.setenv('A', 4)\n    assert code() == g()\n",
    "def test_it():\n    mock.return_value = 4\n    x = mock.return_value\n    assert code() == x\n",
    "def test_it():\n    given = {'a': 4}\n    code(**given)\n    assert given == given['a']\n",
    "def test_it():\n    row = (4, 5)\n    code(*row)\n    assert g() == row[0]\n",
    "def test_it():\n    def back():\n        return 4\n    code(back)\n    assert back() == code()\n",
    "def test_it():\n    x = 4\n    code(lambda: x)\n    assert code() == x\n",
    "class Model:\n    size = 4\n\ndef test_it():\n    code(Model)\n    assert g() == Model.size\n",
    "class TestIt:\n    size = 4\n    def test_it(self):\n        assert code(self.size) == self.size\n",
    "class TestIt:\n    def setUp(self):\n        self.size = 4\n    def test_it(self):\n        code(self.size)\n"
    "    def test_other(self):\n        assert g() == self.size\n",
    "def test_it():\n    for x in [4]:\n        assert code(x) == x\n",
    "def test_it():\n    x = 4\n    if x == g():\n        code()\n    assert x == code()\n",
    "def test_it(tmp_path):\n    (tmp_path / 'a').write_text(4)\n    assert code(tmp_path) == g()\n",
    "import pytest\n\n@pytest.mark.parametrize('x', [4])\ndef test_it(x):\n    assert code(x) == x\n",
    "import pytest\n\n@pytest.mark.parametrize('x', [4], indirect=True)\ndef test_it(x):\n    assert code() == x\n",
    "import pytest\n\n@pytest.fixture\ndef x():\n    return 4\n\n@pytest.fixture\ndef y(x):\n    return code(x)\n\n"
    "def test_it(x, y):\n    assert y == x\n",
    "import pytest\n\n@pytest.fixture\ndef y(x):\n    return code(x)\n\n"
    "@pytest.mark.parametrize('x', [4])\ndef test_it(x, y):\n    assert y == x\n",
    "def check(a, b):\n    assert code(a) == b\n    assert code(b) == a\n\ndef test_it():\n    check(4, g())\n",
    "def test_it():\n    assert code()[4] == g()\n",
    "def test_it():\n    x = 4\n    code(**locals())\n    assert g() == x\n",
    "X = 4\n\ndef test_it():\n    code(globals())\n    assert g() == X\n",
    "class TestIt:\n    def setUp(self):\n        self.x = 4\n        code(self)\n    def test_it(self):\n"
    "        assert g() == self.x\n",
    "from lib import code\n\ndef test_it():\n    assert g() == sorted([4], key=code)\n",
    "from functools import reduce\nfrom lib import code\n\ndef test_it():\n    assert g() == reduce(code, [4, 5])\n",
    "import re\n\ndef test_it():\n    x = re.sub('4', '', code())\n    assert x == g()\n",
    "def test_it():\n    x = code() + 4\n    assert x == g()\n",
    "def test_it():\n    assert code() + 4 == g()\n",
    "def test_it():\n    x = [4]\n    code(x.append)\n    assert x == g()\n",
    "def test_it():\n    assert code().replace('4', '') == g()\n",
    "T = {'x': (1, 4)}\n\ndef test_it():\n    for k in T:\n        a, b = T[k]\n        assert code(T[k]) == b\n",
    "T = {'x': (1, 4)}\n\ndef test_it():\n    for k in list(T):\n        assert code(T) == T[k][1]\n",
    "T = [(1, 4)]\n\ndef test_it():\n    for k in range(len(T)):\n        assert code(*T[k][1:]) == T[k][1]\n",
    "T = {'x': (1, 4)}\n\ndef test_it():\n    for k in T:\n        assert code(T.values()) == T[k][1]\n",
]
_TABLES = {
    "rows": ("{'small': (3, 1, 4), 'large': (10, 5, 15)}", "a, b, total = CASES[name]"),
    "rows of one index": (
        "{'small': (3, 1, 4), 'large': (10, 5, 15)}",
        "a, b = CASES[name][:2]\n    total = CASES[name][2]",
    ),
    "dictionaries": (
        "{'small': {'a': 3, 'b': 1, 'total': 4}, 'large': {'a': 10, 'b': 5, 'total': 15}}",
        "a, b = CASES[name]['a'], CASES[name]['b']\n    total = CASES[name]['total']",
    ),
    "keys that are computed": (
        "{Size.SMALL: (3, 1, 4), Size.LARGE: (10, 5, 15)}",
        "print(CASES[name])\n    a, b, total = CASES[name]",
    ),
}


@pytest.mark.parametrize("keys", ["CASES", "sorted(CASES)", "CASES.keys()", "['small', 'large']"])
@pytest.mark.parametrize("table", _TABLES)
def test_only_what_is_expected_changes_in_a_table_that_a_parameter_selects_from(
    table: str, keys: str
) -> None:
    rows, read_row = _TABLES[table]
    text = (
        f"import pytest\n\nCASES = {rows}\n\n@pytest.mark.parametrize('name', {keys})\ndef test_it(name):\n"
        f"    {read_row}\n    assert code(a, b) == total\n"
    )
    changed = {(text[edit.start : edit.end], one.tests) for one in found(text) for edit in one.edits}
    assert changed == {("4", ("test_it",)), ("15", ("test_it",))}


@pytest.mark.parametrize("text", INPUTS)
def test_what_the_code_under_test_may_be_given_is_never_changed(text: str) -> None:
    file = read(text.encode())
    assert file is not None
    (four, *_) = [
        (file.start(node), file.end(node))
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Constant) and node.value in (4, "4")
    ]
    if "Thing(4) == Thing(" in text:  # of which the left one looks expected
        return
    for one in found(text):
        if four in {(edit.start, edit.end) for edit in one.edits}:
            assert "(4)" in edited(text.encode(), one).decode(), "the code is given what it was"


def test_a_message_may_be_made_of_the_expected_value_by_any_function() -> None:
    text = "def test_it():\n    x = 4\n    assert code() == x, difference(x)\n"
    assert {text[one.edits[0].start - 4 : one.edits[0].end] for one in found(text)} == {"x = 4"}


@pytest.mark.parametrize(
    "text",
    [
        "def test_it():\n    x = 4\n    assert code(lambda x: x + 1) == x\n    code(x)\n",
        "def test_it():\n    x = 4\n    code(x)\n    for x in (5, 6):\n        assert code() == x\n",
        "def test_it():\n    global x\n    x = 4\n    code(x)\n    assert code() == x\n",
        "def test_it():\n    x = 4\n    x += code(x)\n    assert code() == x\n",
    ],
)
def test_another_variable_of_the_same_name_keeps_its_value(text: str) -> None:
    for one in found(text):
        contradicted = edited(text.encode(), one).decode()
        if "lambda" in text:
            assert "lambda x: x + 1" in contradicted
            assert "code((4))" in contradicted
        else:
            assert "x = 4" in contradicted


def test_what_is_given_to_the_code_too_stays_what_it_is_given() -> None:
    text = "def test_it():\n    x = 4\n    assert code(x) == x\n"
    every = found(text)
    assert every
    for candidate in every:
        contradicted = edited(text.encode(), candidate).decode()
        assert "x = 4" not in contradicted
        assert contradicted.endswith("assert code((4)) == x\n")


@pytest.mark.parametrize(
    ("text", "tests"),
    [
        (
            "X = 4\ndef test_a():\n    assert code() == X\ndef test_b():\n    assert g() == X\n",
            {"test_a", "test_b"},
        ),
        ("X = 4\ndef test_a():\n    assert code() == X\ndef test_b():\n    assert g() == 5\n", {"test_a"}),
        (
            "class A:\n    def setUp(self):\n        self.x = 4\n    def test_a(self):\n        assert code() == self.x\n"
            "    def test_b(self):\n        pass\n",
            {"A::test_a"},
        ),
        ("def c(x):\n    assert code() == x\ndef test_a():\n    c(4)\ndef test_b():\n    c(5)\n", {"test_a"}),
    ],
)
def test_a_contradiction_belongs_to_the_tests_that_know_the_value(text: str, tests: set[str]) -> None:
    place = text.index("4")
    of_four = [one for one in found(text) if one.edits[0].start == place]
    assert of_four
    assert {name for one in of_four for name in one.tests} == tests
