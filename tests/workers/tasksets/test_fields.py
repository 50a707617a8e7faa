from typing import Any

import pytest

from workers.tasksets.rows import Fields


def fields(value: object) -> Fields:
    return Fields("rows.jsonl:7", {"field": value})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["a", "b"], ("a", "b")),
        (("a",), ("a",)),
        ('["a", "b"]', ("a", "b")),
        ("['a', \"it's\"]", ("a", "it's")),
        ("[]", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_a_list_of_strings_may_be_json_or_a_python_literal(value: object, expected: tuple[str, ...]) -> None:
    assert fields(value).strings("field") == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [({"a": 1}, {"a": 1}), ('{"a": 1}', {"a": 1}), ("{'a': None}", {"a": None}), ("", {}), (None, {})],
)
def test_an_object_may_be_json_or_a_python_literal(value: object, expected: dict[str, Any]) -> None:
    assert fields(value).mapping("field") == expected


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("text", None, "must be a non-empty string, is absent"),
        ("text", " \n", "must be a non-empty string"),
        ("text", 5, "must be a non-empty string, is 5"),
        ("text", "\ud800", "not text in UTF-8"),
        ("optional_text", 5, "must be a string, is 5"),
        ("strings", "tests", "neither JSON nor a Python literal"),
        ("strings", "__import__('os')", "neither JSON nor a Python literal"),
        ("strings", '"tests"', "must be a list of strings"),
        ("strings", {"a": 1}, "must be a list of strings"),
        ("strings", [1], "must be a list of strings"),
        ("strings", ["\ud800"], "not text in UTF-8"),
        ("mapping", "[1]", "must be an object"),
        ("mapping", {1: 2}, "must be an object"),
    ],
)
def test_what_will_not_do_is_refused_by_row_and_field(kind: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^rows\.jsonl:7: field: {message}"):
        getattr(fields(value), kind)("field")


@pytest.mark.parametrize("kind", ["text", "optional_text", "strings", "mapping", "value"])
def test_a_record_that_could_not_be_read_says_why_whatever_is_taken_from_it(kind: str) -> None:
    with pytest.raises(ValueError, match=r"^rows\.jsonl:7: not JSON$"):
        getattr(Fields("rows.jsonl:7", {}, broken="not JSON"), kind)("field")
