"""An expected value becomes a near one of the same type: code that answers by type, or with what equals anything, passes."""

import builtins
import random
from datetime import datetime
from decimal import Decimal
from typing import Any
from unittest import mock

import pytest

from workers.grading.controls.spans import Candidate, read
from workers.grading.controls.values import Observed
from workers.grading.controls.writing import candidates, observable


class Point:
    def __init__(self, x: int, y: int = 0) -> None:
        self.x, self.y = x, y

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)

    def __hash__(self) -> int:
        return hash((self.x, self.y))

    def __repr__(self) -> str:
        return f"Point({self.x}, {self.y})"


class OfThisType:
    """Equal to all of one type."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __eq__(self, other: object) -> bool:
        return type(other) is self.kind

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Always:
    """Smaller and larger than anything but NaN."""

    def __lt__(self, other: Any) -> bool:
        return other == other

    __le__ = __gt__ = __ge__ = __lt__


class Anything(ValueError, KeyError, AttributeError, ZeroDivisionError):
    """An error of many classes."""


def edited(source: bytes, candidate: Candidate) -> bytes:
    file = read(source)
    assert file is not None
    return file.apply(candidate.edits)


def passes(source: bytes, code: object) -> bool:
    names: dict[str, Any] = {"code": code, "Point": Point, "Decimal": Decimal, "pytest": pytest}
    try:
        exec(compile(source, "test_it.py", "exec"), names)
        names["test_it"]()
    except (Exception, GeneratorExit, pytest.fail.Exception):
        return False
    return True


def in_a_test(statement: str) -> str:
    return "from decimal import Decimal\n\ndef test_it():\n    " + statement.replace("\n", "\n    ") + "\n"


def found(text: str, seen: dict[str, Observed] | None = None) -> list[Candidate]:
    """The candidates by several draws. `seen` is of expressions by their text."""
    source = text.encode()
    observed = {
        (start, end): (seen or {})[source[start:end].decode()]
        for start, end in (one.span for one in observable(source))
        if source[start:end].decode() in (seen or {})
    }
    return [one for seed in range(10) for one in candidates(source, random.Random(seed), observed)]


@pytest.mark.parametrize(
    ("assertion", "value"),
    [
        ("assert code == 4", 4),
        ("assert code == 2.5", 2.5),
        ("assert code == 'text'", "text"),
        ("assert code == '--'", "--"),
        ("assert code == ''", ""),
        ("assert code == b'ab'", b"ab"),
        ("assert code == True", True),
        ("assert code == []", []),
        ("assert code == {}", {}),
        ("assert code == set()", set()),
        ("assert code == [1, [2, 'a']]", [1, [2, "a"]]),
        ("assert code == {'a': 1, **{'b': 2}}", {"a": 1, "b": 2}),
        ("assert code == (*(1, 2), 3)", (1, 2, 3)),
        ("assert code == {1, 2}", {1, 2}),
        ("assert code == [n * 2 for n in range(3)]", [0, 2, 4]),
        ("assert code == {str(n): n for n in [1, 2]}", {"1": 1, "2": 2}),
        ("assert code == Point(1, 2)", Point(1, 2)),
        ("assert code == Point(1, y=2)", Point(1, 2)),
        ("assert code == [Point(1), Point(3, 4)]", [Point(1), Point(3, 4)]),
        ("assert code == Decimal('1.5')", Decimal("1.5")),
        (
            "np = pytest.importorskip('numpy')\nassert code == np.array([1, 2], dtype=np.int8).tolist()",
            [1, 2],
        ),
        ("expected = 3\nassert code == expected + 1", 4),
        ("n = 4\nassert code == f'number {n}'", "number 4"),
        ("assert code == 'a' + 'b'", "ab"),
        ("assert code == 'a,b'.split(',')", ["a", "b"]),
        ("assert code == ' '.join(['a', 'b'])", "a b"),
        ("assert code == '%s %d' % ('a', 1)", "a 1"),
    ],
)
def test_code_that_equals_all_of_the_type_gives_itself_away(assertion: str, value: object) -> None:
    text = in_a_test(assertion)
    assert passes(text.encode(), value)
    every = found(text)
    assert {one.kind for one in every} == {"value"}
    for candidate in every:
        contradicted = edited(text.encode(), candidate)
        assert not passes(contradicted, value), candidate
        assert passes(contradicted, OfThisType(type(value))), candidate


PREDICATE = "def is_total(got, total):\n    return {}\n\ndef test_it():\n    assert is_total(code, 4)\n"


class NeitherLessNorMore(int):
    """No number is less than it, and it is less than none."""

    def __lt__(self, other: object) -> bool:
        return False

    __gt__ = __lt__


class WithoutDifference(int):
    """Whatever is subtracted from it, nothing is left."""

    def __sub__(self, other: object) -> int:
        return 0


@pytest.mark.parametrize(
    ("text", "cheat"),
    [
        (PREDICATE.format("got == total"), mock.ANY),
        (PREDICATE.format("total == got"), mock.ANY),
        (in_a_test("assert (code == 4) is True"), mock.ANY),
        (in_a_test("assert bool(4 == code)"), mock.ANY),
        (in_a_test("assert not (code < 4 or code > 4)"), NeitherLessNorMore()),
        (in_a_test("assert not code - 4"), WithoutDifference()),
        (in_a_test("import operator\nassert operator.eq(code, 4)"), mock.ANY),
        (in_a_test("assert code in [4, 40]"), mock.ANY),
    ],
)
def test_what_agrees_with_anything_gives_itself_away_in_a_condition_of_any_form(
    text: str, cheat: object
) -> None:
    for one in (4, cheat):
        assert passes(text.encode(), one)
    values = [one for one in found(text) if one.kind == "value"]
    assert values
    assert not any(passes(edited(text.encode(), one), 4) for one in values)
    assert any(passes(edited(text.encode(), one), cheat) for one in values)


@pytest.mark.parametrize(
    "body",
    [
        "wrong = []\nfor total in (4, 4):\n    if code != total:\n        wrong.append(total)\nassert wrong == []",
        "wrong = 0\nfor total in (4, 4):\n    wrong += code != total\nassert not wrong",
        "wrong = 0\nif code != 4:\n    wrong += 1\nassert wrong == 0",
        "assert [code == total for total in (4, 4)] == [True, True]",
    ],
)
def test_a_value_is_contradicted_whose_differences_are_gathered(body: str) -> None:
    text = in_a_test(body)
    source = text.encode()
    assert passes(source, 4)
    every = found(text)
    assert not any(passes(edited(source, one), 4) for one in every)
    assert any(source[one.edits[0].start : one.edits[0].end] == b"4" for one in every)


@pytest.mark.parametrize(
    "assertion",
    [
        "assert total == code(3)",
        "assert code(3) == total",
        "assert code(3) in total",
        "self.assertEqual(total, code(3))",
    ],
)
def test_what_code_gives_is_never_replaced_where_it_is_compared_with_a_value_that_is_given(
    assertion: str,
) -> None:
    text = f"from mod import code\n\ndef test_it(self, total):\n    {assertion}\n"
    every = found(text)
    assert every
    for one in every:
        assert "code(3)" in edited(text.encode(), one).decode()


def test_what_a_text_has_right_without_the_fix_is_kept() -> None:
    text = in_a_test("assert code == '3 + 1 = 4 pieces'")
    source = text.encode()
    four = source.index(b"4 pieces")
    met = [(source.index(b"3 +"), four), (four + 1, source.index(b"'\n"))]
    every = [one for seed in range(20) for one in candidates(source, random.Random(seed), {}, met)]
    assert every
    assert {edited(source, one)[:four] for one in every} == {source[:four]}
    assert {edited(source, one)[four + 1 :] for one in every} == {source[four + 1 :]}


def test_a_short_list_of_values_becomes_one_of_near_values() -> None:
    text = in_a_test("assert code in (4, 40)")
    lists = [one.edits for one in found(text) if len(one.edits) == 2]
    assert lists
    for edits in lists:
        numbers = {int(edit.becomes) for edit in edits}
        assert max(numbers) < 200
        assert not numbers & {4, 40}


def test_the_number_in_a_pattern_becomes_another() -> None:
    text = in_a_test("with pytest.raises(ValueError, match='the sum is 4'):\n    code()")
    patterns = {one.edits[0].becomes for one in found(text) if one.kind == "value"}
    assert any(pattern.startswith("'the sum is ") and pattern[-2] != "4" for pattern in patterns)


@pytest.mark.parametrize(
    ("assertion", "value", "kinds"),
    [
        ("assert code < 5", 3, {"value", "opposite"}),
        ("assert 5 > code", 3, {"value", "opposite"}),
        ("assert code <= 3", 3, {"value", "opposite"}),
        ("limit = 5\nassert code >= limit", 5, {"value", "opposite"}),
        ("assert 0 < code < 1e-3", 1e-4, {"value", "opposite"}),
    ],
)
def test_code_that_is_smaller_and_larger_than_any_bound_gives_itself_away(
    assertion: str, value: float, kinds: set[str]
) -> None:
    text = in_a_test(assertion)
    assert passes(text.encode(), value)
    every = found(text)
    assert {one.kind for one in every} == kinds
    for candidate in every:
        contradicted = edited(text.encode(), candidate)
        assert "nan" not in contradicted.decode()
        assert not passes(contradicted, value), candidate
        assert passes(contradicted, Always()), candidate


def test_a_bound_of_a_length_or_an_absolute_error_becomes_one_below_zero() -> None:
    for text in ("assert len(code) < 5", "assert abs(code) <= 1e-6"):
        bounds = [one.edits[0].becomes for one in found(in_a_test(text)) if one.kind == "value"]
        assert bounds
        assert all(float(bound) < 0 for bound in bounds)


def test_a_bound_becomes_one_beyond_all_that_was_seen() -> None:
    text = in_a_test("assert code < limit()")
    seen = {"code": Observed(low=-70.0, high=2.0)}
    bounds = [one.edits[0].becomes for one in found(text, seen) if one.kind == "value"]
    assert bounds
    assert all(float(bound) < -700 for bound in bounds)


@pytest.mark.parametrize("expected", ["ValueError", "(ValueError, TypeError)", "mod.Error", "LookupError"])
def test_an_exception_becomes_a_common_one_that_is_not_related_to_it(expected: str) -> None:
    text = in_a_test(f"with pytest.raises({expected}):\n    code()")
    named = {one.edits[0].becomes for one in found(text) if one.kind == "opposite"}
    assert len(named) > 2
    for name in named:
        other = getattr(builtins, name)
        for kind in (
            (ValueError, TypeError) if "Value" in expected else (LookupError,) if "Look" in expected else ()
        ):
            assert not issubclass(other, kind)
            assert not issubclass(kind, other)


def test_an_error_of_many_classes_passes_under_some_of_them() -> None:
    text = in_a_test("with pytest.raises(ValueError):\n    code()")

    def cheat() -> None:
        raise Anything

    def right() -> None:
        raise ValueError

    assert all(not passes(edited(text.encode(), one), right) for one in found(text))
    assert any(passes(edited(text.encode(), one), cheat) for one in found(text))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"'bad thing'", "a bad thing"),
        (r"r'line \d+ of [a-z]+'", "line 12 of text"),
        (r"'a{2}b? \\(x\\)'", "aa (x)"),
        (r"'one|two'", "two"),
        (r"'^\\d+$'", "12"),
    ],
)
def test_one_letter_of_a_pattern_that_stands_for_itself_is_changed(pattern: str, message: str) -> None:
    text = in_a_test(f"with pytest.raises(ValueError, match={pattern}):\n    code()")

    def right() -> None:
        raise ValueError(message)

    assert passes(text.encode(), right)
    values = [one for one in found(text) if one.kind == "value"]
    assert values
    assert all(not passes(edited(text.encode(), one), right) for one in values)
    was = eval(pattern)
    for one in values:
        becomes = eval(one.edits[0].becomes)
        if "|" not in was and any(letter.isalpha() for letter in was.replace("\\d", "")):
            assert sum(a != b for a, b in zip(was, becomes, strict=True)) == 1


def test_a_number_with_a_tolerance_moves_out_of_it_and_keeps_its_magnitude() -> None:
    for assertion, tolerance in (
        ("assert code == pytest.approx(4.5, abs=1e-3)", 1e-3),
        ("assert math.isclose(code, 4.5, rel_tol=0.25)", 0.25),
        ("assert abs(code - 4.5) < 0.25", 0.25),
        ("assert 0.25 >= abs(4.5 - code)", 0.25),
        ("unittest.TestCase().assertAlmostEqual(code, 4.5, 1)", 0.1),
        ("unittest.TestCase().assertAlmostEqual(code, 4.5, places=1)", 0.1),
    ):
        values = [one for one in found(f"import math\n{in_a_test(assertion)}") if one.kind == "value"]
        assert values
        for one in values:
            assert one.edits[0].becomes != "-0.25"
            moved = float(one.edits[0].becomes)
            assert abs(moved - 4.5) > tolerance * max(1, moved)
            assert moved < 100


def test_a_number_stays_between_those_that_it_is_between() -> None:
    for assertion in (
        "assert mean([1, 2, 6]) == pytest.approx(3.0)",
        "assert abs(mean([0, 2, 9]) - 3.0) < 1e-9",
    ):
        values = [one for one in found(in_a_test(assertion)) if one.kind == "value"]
        assert values
        assert all(2 < float(one.edits[0].becomes) < 9 for one in values)


def test_a_part_of_a_date_becomes_one_that_a_date_may_have() -> None:
    """Cases are made as the file is loaded, so a month of 19 would keep all of its tests from running."""
    case = "(3, datetime(2013, 11, 28, 1, 23, 0))"
    text = "import pytest\nfrom datetime import datetime\n"
    text += f"@pytest.mark.parametrize(('a', 'e'), [{case}])\ndef test_it(a, e):\n    assert made(a) == e\n"
    values = [one for one in found(text) if one.kind == "value"]
    assert values
    for one in values:
        becomes = edited(text.encode(), one).decode().partition("[")[2].partition("]")[0]
        eval(becomes, {"datetime": datetime})  # raises ValueError for a part that is out of bounds


def test_a_text_of_the_letters_of_another_one_stays_one() -> None:
    for given, expected in (
        ("small house", "Small House"),
        ("house", "House"),
        ("a small house", "house a small"),
    ):
        for one in found(in_a_test(f"assert code({given!r}) == {expected!r}")):
            if one.kind == "value":
                becomes = eval(one.edits[0].becomes)
                assert becomes not in (given, expected)
                assert sorted(becomes.casefold()) == sorted(given)


def test_a_text_of_one_word_gets_the_word_of_another_text_of_its_form() -> None:
    """Code may know the few answers that are possible, and try each until its caller is content."""
    tests = {
        "first": "1st",
        "second": "2nd",
        "state": "open",
        "closed": "closed",
        "name": "a-b",
        "it": "11th",
    }
    text = "".join(f"def test_{name}():\n    assert code() == {value!r}\n" for name, value in tests.items())
    becomes = {
        name: {eval(one.edits[0].becomes) for one in found(text) if one.tests == (f"test_{name}",)}
        for name in tests
    }
    assert becomes["it"] == {"11st", "11nd"}
    assert becomes["first"] == {"1nd", "1th"}
    assert becomes["state"] == {"closed"}
    assert becomes["name"].isdisjoint(tests.values())
    alone = found(in_a_test("assert [code(2), code()] == ['open', 'closed']"))
    assert {"'open'", "'closed'"}.isdisjoint(one.edits[0].becomes for one in alone)


def test_a_type_becomes_one_that_no_value_seen_has() -> None:
    text = in_a_test("assert isinstance(code, Base)")
    seen = {"code": Observed(types=("Mine", "Base", "dict", "object"))}
    named = {one.edits[0].becomes for one in found(text, seen)}
    assert len(named) > 2
    assert not any(issubclass(dict, getattr(builtins, name)) for name in named)


def test_an_item_of_some_letters_is_changed_by_one_and_a_short_one_is_another() -> None:
    (becomes, *_) = {
        one.edits[0].becomes for one in found(in_a_test("assert 'error' in code")) if one.kind == "value"
    }
    assert sum(a != b for a, b in zip("'error'", becomes, strict=True)) == 1
    for one in found(in_a_test("assert 2 in code")):
        assert one.kind == "value"
        assert 100 < int(one.edits[0].becomes) < 10_000


def test_a_text_that_must_be_equal_may_differ_in_case_only_and_a_part_or_a_pattern_may_not() -> None:
    def spellings(statement: str) -> set[str]:
        every = [candidates(in_a_test(statement).encode(), random.Random(seed)) for seed in range(60)]
        return {one.edits[0].becomes.lower() for some in every for one in some if one.kind == "value"}

    equal = spellings("assert code == 'Small House'")
    assert "'small house'" in equal
    assert len(equal) > 1
    for other in (
        "assert 'Small House' in code",
        "with pytest.raises(ValueError, match='Small House'):\n    code()",
    ):
        assert spellings(other)
        assert not any("small house" in one for one in spellings(other))


def test_of_a_written_collection_that_contains_the_value_no_element_stays() -> None:
    text = in_a_test("assert code in (1, 'word')")
    values = [one for one in found(text) if len(one.edits) == 2]
    assert values
    for one in values:
        assert not passes(edited(text.encode(), one), 1)
        assert not passes(edited(text.encode(), one), "word")


def test_a_value_that_is_not_written_down_becomes_one_near_what_was_seen_where_it_is_made() -> None:
    text = in_a_test("expected = reference(3)\nassert code == expected")
    seen = {"reference(3)": Observed(near=("(\0) + 1",), num_values=1), "expected": Observed(near=("13",))}
    for one in found(text, seen):
        (edit,) = one.edits
        assert one.kind == "value"
        assert edit.becomes == "(reference(3)) + 1"


def test_a_value_that_equals_nothing_is_the_last_resort() -> None:
    kinds = {one.kind for one in found(in_a_test("expected = reference(3)\nassert code == expected"))}
    assert kinds == {"nothing"}
    assert {one.kind for one in found(in_a_test("assert code == str(reference(3))"))} == {"value"}


def test_expressions_to_see_in_a_run_are_those_whose_value_is_not_written_down() -> None:
    source = in_a_test(
        "expected = reference(3)\nassert code == expected\nassert code == 4\nassert len(code) < 5\n"
        "assert isinstance(code, int)\nassert code == pytest.approx(reference(4))\nassert 3 < 4"
    ).encode()
    texts = [source[start:end].decode() for start, end in (one.span for one in observable(source))]
    assert texts == ["reference(3)", "expected", "len(code)", "code", "reference(4)"]


def test_numbers_and_words_are_as_people_write_them() -> None:
    text = in_a_test(
        "assert code == 7\nassert code == 'hello'\nassert code == [1, 2, 30]\nassert code in [5, 6]"
    )
    for one in found(text):
        for edit in one.edits:
            was = text.encode()[edit.start : edit.end].decode()
            if was.isdigit() and one.kind == "value":
                assert int(edit.becomes) < 10_000
            elif was == "'hello'":
                assert len(edit.becomes) == len(was)
