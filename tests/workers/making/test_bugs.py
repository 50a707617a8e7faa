"""The bugs that can be planted: each kind changes one place of one function, and leaves everything else as it is."""

import ast
import textwrap

import pytest

from workers.making.bugs import (
    KINDS,
    BugKind,
    PlantedBug,
    functions_and_bugs,
    in_turn,
    is_product,
    tidied,
    with_bugs,
)

SHOP = b'''"""Prices."""
RATE = 3 + 4


class Shop:
    """A shop."""

    def order(self, cents,   percent = 0):   # how much
        """The price of an order."""
        total = cents * (100 - percent) // 100  # rounded down
        total += 0
        if total < 5000 and percent:
            total += 490
        elif total == 0:
            raise ValueError("nothing" + "!")
        else:
            total = max(total, 1)
        log.info("a" + "b")
        self.send(total, cents, express = True)
        try:
            return self.rows[1:]
        except KeyError:
            return None
        except IndexError:
            return sorted(total)

    def send(self, *rows): return rows
'''


def bugs_of(source: bytes, kind: BugKind | None = None) -> list[PlantedBug]:
    _, bugs = functions_and_bugs("shop.py", source)
    found = [tidied(source, bug) for bug in in_turn(bugs, 0) if kind in (None, bug.kind)]
    return [bug for bug in found if bug]


def afterwards(source: str, kind: BugKind) -> set[str]:
    """What becomes of the changed lines in the body of a function, one text for each bug of the kind."""
    text = f"def f(a, b, c):\n{textwrap.indent(source, '    ')}\n".encode()
    texts = [with_bugs(text, [bug]).decode() for bug in bugs_of(text, kind)]
    return {textwrap.dedent(text.partition("\n")[2]).strip() for text in texts}


@pytest.mark.parametrize(
    ("kind", "source", "becomes"),
    [
        ("comparison", "return a  <  b", {"return a  <=  b", "return a  >=  b"}),
        ("operator", "return a+ b  # sum", {"return a- b  # sum", "return a* b  # sum", "return a  # sum", "return b  # sum"}),
        ("operator", "return not a", {"return a"}),
        ("operator", "a = c * (a - b)", {
            *("a = c * (a + b)", "a = c * (a * b)", "a = c * a", "a = c * b"),
            *("a = c / (a - b)", "a = c + (a - b)", "a = c", "a = a - b"),
        }),
        ("condition", "return b if a(b) else c", {"return b if not a(b) else c"}),
        ("condition", "return a and (b or c)", {"return a", "return b or c", "return a and b", "return a and c"}),
        ("constant", "return a[b:3], 'x', None", {"return a[b:4], 'x', None", "return a[b:2], 'x', None"}),
        ("argument", "return a(b, c, key = 1)", {"return a(c, b, key = 1)", "return a(b, c)"}),
        ("argument", "return a(\n    b,\n    key=1,\n)", {"return a(\n    b,\n)"}),
        ("return", "return sorted(a)", {"return None", "return a"}),
        ("subscript", "return a[b:]", {"return a[:]"}),
        ("line", "a.clear()\nreturn a", {"return a", "a.clear()"}),
        ("swap", "a = b\n# why\nb += a\nreturn a", {"b += a\n# why\na = b\nreturn a"}),
        ("branch", "if a:\n    b()\nelif c:\n    a()\nelse:\n    c()", {
            "if a:\n    b()\nelse:\n    c()",
            "if a:\n    b()\nelif c:\n    a()",
        }),
        ("branch", "if a:\n    b()\nreturn c", {"return c"}),
        ("branch", "try:\n    a()\nexcept OSError:\n    b()\nexcept KeyError:\n    c()", {
            "try:\n    a()\nexcept OSError:\n    b()",
            "try:\n    a()\nexcept KeyError:\n    c()",
        }),
        ("body", '"""Says so."""\na = b\n\nreturn a', {'"""Says so."""\nraise NotImplementedError'}),
        ("body", "a = b\nreturn a", set[str]()),
    ],
)  # fmt: skip
def test_each_kind_of_bug_is_written_as_somebody_would_have_written_it(
    kind: BugKind, source: str, becomes: set[str]
) -> None:
    assert afterwards(source, kind) == becomes


def test_a_bug_changes_one_place_of_one_function_and_no_formatting() -> None:
    bugs = bugs_of(SHOP)
    assert {bug.kind for bug in bugs} == {*KINDS}
    for bug in bugs:
        text = with_bugs(SHOP, [bug])
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(SHOP))
        assert text[: bug.start] == SHOP[: bug.start]
        assert text.endswith(SHOP[bug.end :])
        assert bug.function.start <= bug.start <= bug.end <= bug.function.end
        assert SHOP[bug.start : bug.end] != bug.becomes


@pytest.mark.parametrize(
    "untouched",
    [
        b"RATE = 3 + 4",
        b'"nothing" + "!"',
        b'log.info("a" + "b")',
        b"percent = 0",
        b'"""The price of an order."""',
    ],
)
def test_what_is_outside_of_functions_or_speaks_to_people_is_never_changed_alone(untouched: bytes) -> None:
    start = SHOP.index(untouched)
    inside = [bug for bug in bugs_of(SHOP) if start <= bug.start and bug.end <= start + len(untouched)]
    assert inside == []


def test_a_change_that_tests_cannot_notice_or_that_does_not_parse_is_no_bug() -> None:
    source = b"def f(a):\n    b = 1\n    return None\n"
    _, bugs = functions_and_bugs("f.py", source)
    returned = next(bug for bug in bugs if source[bug.start : bug.end].strip() == b"return None")
    assert tidied(source, returned) is None
    first = next(bug for bug in bugs if bug.becomes == b"2")
    assert tidied(source, PlantedBug("constant", first.function, first.start, first.end, b"2 +")) is None


def test_functions_have_the_names_and_lines_that_their_code_objects_have() -> None:
    source = b"class A:\n    @cached\n    @checked(\n        1)\n    def b(self):\n        def c():\n            return 1\n"
    source += b"        return c\n"
    functions, bugs = functions_and_bugs("a.py", source)
    assert [(one.name, one.line, one.called) for one in functions] == [("A.b", 2, "b"), ("A.b.c", 6, "c")]
    assert {bug.function.name for bug in bugs if bug.kind == "constant"} == {"A.b.c"}
    (made,), _ = functions_and_bugs("a.py", b"class A:\n    def __init__(self): self.a = 1\n")
    assert made.called == "A"


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("shop/prices.py", b"", True),
        ("src/latest.py", b"", True),
        ("tests/prices.py", b"", False),
        ("shop/test_prices.py", b"", False),
        ("conftest.py", b"", False),
        ("shop/_vendor/six.py", b"", False),
        ("third_party/x.py", b"", False),
        ("build/lib/shop.py", b"", False),
        ("shop/rows_pb2.py", b"", False),
        ("setup.py", b"", False),
        ("docs/conf.py", b"", False),
        ("shop/grammar.py", b"# Generated by a tool. DO NOT EDIT.\n", False),
        ("shop/prices.c", b"", False),
    ],
)
def test_only_code_of_the_repository_s_own_is_changed(path: str, source: bytes, expected: bool) -> None:
    assert is_product(path, source) == expected


def test_the_order_depends_on_the_seed_alone_and_every_function_and_kind_has_its_turn() -> None:
    _, bugs = functions_and_bugs("shop.py", SHOP)
    assert in_turn(bugs, 1) == in_turn(bugs[::-1], 1)
    assert in_turn(bugs, 1) != in_turn(bugs, 2)
    ordered = in_turn(bugs, 1)
    assert {bug.function.name for bug in ordered[:2]} == {"Shop.order", "Shop.send"}
    kinds = {bug.kind for bug in bugs if bug.function.name == "Shop.order"}
    in_order = [bug.kind for bug in ordered if bug.function.name == "Shop.order"]
    assert {*in_order[: len(kinds)]} == kinds


def test_bugs_of_one_text_or_function_touch_each_other() -> None:
    source = b"def f():\n    def g():\n        return 1\n    return 2\n\n\ndef h():\n    return 3\n"
    _, bugs = functions_and_bugs("f.py", source)
    one, two, three = (
        bug for bug in bugs if bug.kind == "constant" and int(bug.becomes) > int(source[bug.start : bug.end])
    )
    whole = next(bug for bug in bugs if bug.kind == "line" and b"def g" in source[bug.start : bug.end])
    assert not one.touches(two)
    assert not two.touches(three)
    assert one.touches(whole)
    assert two.touches(whole)
    assert with_bugs(source, [three, one]) == source.replace(b"1", one.becomes).replace(b"3", three.becomes)
