"""Expressions for other values of a value's type, as the recorder finds them where the value is."""

import collections
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import uuid
from typing import Any

import numpy as np
import pytest

from workers.verify.recorder.near_values import HOLE, LONGEST_CHARS, MOST_NEAR, near_values
from workers.verify.recorder.recording import SeenValues


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Only:
    """A copy of it is itself."""

    def __init__(self) -> None:
        self.number = 1

    def __copy__(self) -> "Only":
        return self


ONLY = Only()


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    names: tuple[str, ...] = ()


class Equal:
    """Only `second` takes part in equality."""

    def __init__(self, first: object, second: object) -> None:
        self.first = first
        self.second = second

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.second == other.second

    def __repr__(self) -> str:
        return f"Equal({self.first!r}, {self.second!r})"

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Text(str):
    """A kind of text."""


Pair = collections.namedtuple("Pair", "left right")

VALUES: list[Any] = [
    *(
        0,
        13,
        -1,
        2.5,
        1e-9,
        float("nan"),
        float("inf"),
        2 + 1j,
        True,
        "abc",
        "",
        "\n",
        "a" * 1000,
        b"abc",
        b"\xff",
    ),
    *(
        [1, 2],
        [],
        (1,),
        (),
        {"a": 1},
        {},
        {1},
        set(),
        frozenset({"a"}),
        [None],
        {"a": None},
        {1: [{"b": (2,)}]},
    ),
    *(
        list(range(1000)),
        {number: "x" for number in range(1000)},
        Text("abc"),
        Pair(1, "x"),
        [Point(1), Point(2)],
    ),
    *(collections.OrderedDict(a=1), collections.Counter("ab"), collections.deque([1])),
    *(
        decimal.Decimal("1.1"),
        fractions.Fraction(1, 3),
        uuid.UUID(int=3),
        pathlib.Path("/a/b"),
        re.compile("a"),
    ),
    *(datetime.datetime(2020, 1, 1), datetime.date(2020, 1, 1), datetime.time(3), datetime.timedelta(1)),
    *(
        Colour.RED,
        range(3),
        slice(1, 2),
        bytearray(b"a"),
        Point(1, ("a",)),
        Equal(1, [Point(2)]),
        ValueError("abc", 1),
    ),
    *(np.int64(3), np.float32(1.5), np.bool_(True), np.datetime64("2020-01-01"), np.dtype("int64")),
    *(np.arange(3), np.array([True]), np.array(["a", "b"]), np.array(3), np.zeros(100_000), [np.arange(2)]),
    {"a": np.arange(2)},
]


def with_hole(text: str, value: object) -> Any:
    return eval(text.replace(HOLE, "value"), {"value": value})


def is_equal(one: object, other: object) -> bool:
    try:
        np.testing.assert_equal(one, other)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("value", VALUES, ids=[f"{number}" for number in range(len(VALUES))])
def test_each_is_another_value_of_the_same_type_and_the_value_stays(value: Any) -> None:
    before = copy.deepcopy(value)
    found = near_values(value)
    assert 0 < len(found) <= MOST_NEAR
    for text in found:
        other = with_hole(text, value)
        assert len(text) <= LONGEST_CHARS
        assert text.count(HOLE) <= 1
        assert "\n" not in text
        assert isinstance(value, np.dtype) or type(other) is type(value)
        assert not is_equal(other, value)
    assert is_equal(repr(value), repr(before))


@pytest.mark.parametrize("value", [None, object(), len, iter([]), ONLY, ..., pathlib], ids=type)
def test_of_some_values_no_other_is_made(value: object) -> None:
    assert near_values(value) == []
    assert ONLY.number == 1


def test_literals_are_as_people_write_them() -> None:
    assert near_values(13)[:2] == ["14", "12"]
    assert near_values("abc")[0] == "'abd'"
    assert near_values([1, "ab"])[:2] == ["[1, 'ac']", "[2, 'ab']"]
    assert near_values({"a": 1, "b": 2})[0] == "{'a': 1, 'b': 3}"
    assert near_values(0.5)[0] == "1.5"


def test_of_long_values_a_part_is_changed() -> None:
    assert near_values("a" * 1000)[0] == "(\0).replace('a', 'b', 1)"
    assert near_values(list(range(1000)))[0] == "[*(\0)[:-1], 1000]"


def test_a_class_becomes_an_unrelated_one() -> None:
    assert near_values(ValueError)[0] == "KeyError"
    assert near_values(LookupError)[0] == "ZeroDivisionError"
    assert near_values(int)[0] == "str"


def test_an_attribute_that_takes_part_in_equality_is_changed() -> None:
    (first, *_) = near_values(Equal(1, 2))
    assert with_hole(first, Equal(1, 2)).first == 1
    assert with_hole(first, Equal(1, 2)).second != 2


def seen_of(*values: object) -> SeenValues:
    seen = SeenValues()
    for value in values:
        seen.look(value)
    return seen


def test_what_equals_any_value_that_was_seen_is_left_out() -> None:
    seen = seen_of(*range(12))
    assert seen.near
    assert all(with_hole(text, value) != value for text in seen.near for value in range(12))
    assert len(seen.values) == 12
    assert (seen.low, seen.high) == (0, 11)


def test_types_are_those_that_all_values_have() -> None:
    assert seen_of(1, True).types == ["int", "object"]
    assert seen_of(decimal.Decimal(1)).types == ["decimal.Decimal", "object"]
    assert seen_of("a", b"a").near == []


def test_extremes_are_those_of_numbers_alone() -> None:
    said = seen_of(1, "a", 2.5).said()
    assert (said["low"], said["high"]) == (None, None)
    said = seen_of(1, float("inf"), decimal.Decimal("-2.5")).said()
    assert (said["low"], said["high"]) == (-2.5, 1)


def test_values_are_counted_without_the_addresses_of_objects() -> None:
    assert len(seen_of(object(), object(), 1, 2, 2).values) == 3
