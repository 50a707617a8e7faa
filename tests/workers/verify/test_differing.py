"""Which parts of an expected value a run without the fix meets: the other parts are what a control has to contradict."""

import ast
from unittest import mock

import pytest

from workers.grading.controls.spans import read
from workers.verify.differing import Difference, equal_operands, met_parts
from workers.verify.recorder.meeting import MOST_PARTS, differences


class Point:
    def __init__(self, x: object, y: object) -> None:
        self.x, self.y = x, y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and vars(self) == vars(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def met(test: str, got: object, expected: object) -> list[str]:
    """The parts of the second operand of a file's first check that are met if `got` is compared with `expected`."""
    text = test.encode()
    file = read(text)
    assert file is not None
    check = next(node for node in ast.walk(file.tree) if isinstance(node, ast.expr) and equal_operands(node))
    found: list[Difference] = list(differences(got, expected, (), [MOST_PARTS]))
    spans = met_parts(text, [((file.start(check), file.end(check)), found)])
    start = file.start(equal_operands(check)[1])
    return [text[first:end].decode() for first, end in sorted(spans) if first >= start or "wanted" in test]


@pytest.mark.parametrize(
    ("expression", "got", "parts"),
    [
        ("{'a': 1, 'b': 2}", {"a": 1, "b": 3}, ["'a'", "1", "'b'"]),
        ("{'a': 1, 'b': 2}", {"a": 1}, ["'a'", "1"]),
        ("[1, {'b': (2, 3)}]", [1, {"b": (2, 4)}], ["1", "'b'", "2"]),
        ("[1, 2, 3]", [1, 3], ["1", "3"]),
        ("[1, 2, 3]", [1, 2, 2, 3], ["1", "2"]),
        ("Point(1, y=[2, 3])", Point(1, [2, 4]), ["1", "2"]),
        ("'a plain text'", "a plane text", ["a", " ", "p", "l", "a", " ", "t", "e", "x", "t"]),
        (r"'a\n4\n'", "a\n2\n", ["a", r"\n", r"\n"]),
        (r"r'\n4'", r"\n2", ["\\", "n"]),
        ("('a'  # 'one'\n    '4' \"b\")", "a2b", ["a", "b"]),
        ("4", 2, []),
        ("mock.call('a', 1, key=[2, 3])", mock.call("a", 1, key=[2, 4]), ["'a'", "1", "2"]),
        ("pytest.approx([0.3, 2.5])", [0.1 + 0.2, 3.5], ["0.3"]),
        ("pytest.approx({'a': 0.3, 'b': 2.5})", {"a": 0.1 + 0.2, "b": 3.5}, ["'a'", "0.3", "'b'"]),
        ("[1, 2]", (1, 2), []),
    ],
)
def test_the_parts_that_agree_are_met(expression: str, got: object, parts: list[str]) -> None:
    expected = eval(expression)
    assert got != expected
    assert met(f"def test_it():\n    assert f() == {expression}\n", got, expected) == parts
    assert (
        met(f"def test_it():\n    wanted = {expression}\n    assert f() == wanted\n", got, expected) == parts
    )


def test_nothing_is_met_of_values_that_could_not_be_made_or_compared() -> None:
    text = b"def test_it():\n    assert f() == [1, 2]\n"
    whole: list[Difference] = [(0, ()), (1, ())]
    assert met_parts(text, [((24, 37), whole)]) == []
    assert met_parts(text, [((24, 37), [])]) == []
    assert met_parts(b"def test_it(:", [((0, 4), whole)]) == []


def test_a_part_that_one_of_two_checks_does_not_meet_is_not_met() -> None:
    text = b"def test_it():\n    wanted = [1, 2, 3]\n    assert f() == wanted\n    assert g() == wanted\n"
    first, second = text.index(b"f()"), text.index(b"g()")
    checks: list[tuple[tuple[int, int], list[Difference]]] = [
        ((first, first + 13), [(1, (("from", 0, 1),))]),
        ((second, second + 13), [(1, (("from", 2, 3),))]),
    ]
    assert {text[start:end] for start, end in met_parts(text, checks)} == {b"2"}
