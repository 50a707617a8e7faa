"""Which texts of Python code mean the same, so that no test is needed to tell them apart."""

import pytest

from workers.verify.mutations import meaning_of


@pytest.mark.parametrize(
    ("source", "same"),
    [
        ("if True:\n    a\nelse:\n    b", "a"),
        ("if False:\n    a\nelse:\n    b", "b"),
        ("if False:\n    a", "pass"),
        ("while False:\n    a", ""),
        ("x = a if True else b", "x = a"),
        ("x = a if False else b", "x = b"),
        ("x = [a for a in b if True if c]", "x = [a for a in b if c]"),
        ("match a:\n    case b if True:\n        c", "match a:\n    case b:\n        c"),
        ("def f():\n    if a:\n        return None\n    b", "def f():\n    if a:\n        return\n    b"),
        ("def f():\n    a\n    return None", "def f():\n    a"),
        (
            'def f(a: int) -> int:\n    """Text."""\n    log.info(a)\n    raise A("b", a)',
            "def f(a):\n    raise A(a)",
        ),
        ("a = 1\n__version__ = '1.12.0'", "a = 1"),
    ],
)
def test_what_is_never_done_or_read_makes_no_difference(source: str, same: str) -> None:
    assert meaning_of(source.encode()) == meaning_of(same.encode()) is not None


@pytest.mark.parametrize(
    ("source", "other"),
    [
        ("if a:\n    b", "b"),
        ("if 1:\n    b", "if 2:\n    b"),
        ("while True:\n    a", "a"),
        ("x = a and True", "x = a"),
        ("def f():\n    return a", "def f():\n    a"),
        ("return None\na", "a"),
        ("__version__ = (1, 2)", ""),
        ("version = '1'", ""),
    ],
)
def test_what_may_be_done_makes_a_difference(source: str, other: str) -> None:
    assert meaning_of(source.encode()) != meaning_of(other.encode())


def test_code_that_does_not_parse_has_no_meaning() -> None:
    assert meaning_of(b"if a") is None
