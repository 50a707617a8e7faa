"""What a problem says of the interface that hidden tests expect."""

import pytest

from workers.making.ecosystems.go import ECOSYSTEM as GO
from workers.making.ecosystems.python import ECOSYSTEM as PYTHON
from workers.making.interfaces import expected, with_interface

OLD = """class Price:
    def __init__(self, cents):
        self.cents = cents

def discounted(cents, percent=10):
    return cents
"""


def found(new: str, *test_lines: str, path: str = "price.py", old_path: str = "price.py") -> tuple[str, ...]:
    """What a test with these lines expects of the code that is `new` instead of OLD."""
    added = "".join(f"+{line}\n" for line in test_lines)
    tests = f"diff --git a/test_a.py b/test_a.py\n--- a/test_a.py\n+++ b/test_a.py\n@@ -0,0 +1,{len(test_lines)} @@\n{added}"
    language = GO if path.endswith(".go") else PYTHON
    old = ((old_path, one) for one in language.declarations(OLD.encode()))
    declared = ((path, one) for one in language.declarations(new.encode()))
    return expected(old, declared, tests, language.namespace)


def test_what_only_the_fix_declares_and_the_tests_use_is_shown() -> None:
    new = f"{OLD}\ndef rounded(cents, *, to=5):\n    return _nearest(cents, to)\n\ndef _nearest(cents, to):\n    return cents\n"
    assert found(new, "assert rounded(7, to=10) == 10") == (
        "- `def rounded(cents, *, to=...)` in `price.py`",
    )
    assert found(new, "assert discounted(7) == 7") == ()


def test_other_parameters_are_shown_and_another_default_is_the_fix() -> None:
    assert found(OLD.replace("percent=10", "percent=10, cap=9"), "discounted(7, cap=1)") == (
        "- `def discounted(cents, percent=..., cap=...)` in `price.py`",
    )
    assert found(OLD.replace("percent=10", "percent=20"), "discounted(7)") == ()


@pytest.mark.parametrize(
    ("line", "is_used"),
    [("Price(3).net == 3", True), ("net = 3", False), ("internet()", False), ("Price(3).netto", False)],
)
def test_a_member_is_used_where_it_is_named_after_a_dot(line: str, is_used: bool) -> None:
    new = OLD.replace("self.cents = cents", "self.cents = cents\n        self.net = cents")
    assert found(new, line) == (("- attribute `net` of `Price` in `price.py`",) if is_used else ())


def test_a_field_is_used_where_it_is_a_keyword() -> None:
    new = OLD.replace("class Price:", "class Price:\n    net: int = 0")
    assert found(new, "Price(1, net=3)") == ("- `net` of `Price` in `price.py`",)


def test_a_property_is_no_method() -> None:
    new = OLD.replace(
        "    def __init__", "    @property\n    def net(self):\n        return 7\n\n    def __init__"
    )
    assert found(new, "Price(1).net == 7") == ("- property `net` of `Price` in `price.py`",)


@pytest.mark.parametrize(
    "head", ["@dataclass\nclass Sum:", "@attrs.define(frozen=True)\nclass Sum:", "class Sum(NamedTuple):"]
)
def test_a_data_class_is_made_of_its_fields(head: str) -> None:
    new = f"{OLD}\n{head}\n    cents: int\n    currency: str = 'EUR'\n"
    assert found(new, "Sum(7, 'USD')") == ("- `class Sum(cents, currency=...)` in `price.py`",)


def test_a_name_that_a_package_hands_on_is_shown_with_where_it_is_from() -> None:
    new = f"from ._rounding import nearest as rounded\n{OLD}"
    assert found(new, "from price import rounded") == (
        "- `rounded`, imported from `._rounding` in `price.py`",
    )
    assert found(f"import json\nfrom os import path\n{OLD}", "json.dumps(path)") == ()


def test_what_moved_is_not_new() -> None:
    moved = "\n".join(reversed(OLD.split("\n\n")))
    assert found(moved, "discounted(1)", "Price(2).cents") == ()


def test_a_name_that_a_package_hands_on_from_its_own_modules_is_shown() -> None:
    new = "from price._rounding import nearest as rounded\nfrom decimal import Decimal\n"
    assert found(new, "from price import rounded", "from decimal import Decimal", path="price/__init__.py") == (
        "- `rounded`, imported from `price._rounding` in `price/__init__.py`",
    )


def test_an_import_of_the_fix_is_shown_only_where_tests_take_the_name_from_there() -> None:
    new = f"from .errors import Wrong\n{OLD}"
    assert found(new, "from price.errors import Wrong", "raises(Wrong)") == ()
    line = ("- `Wrong`, imported from `.errors` in `price.py`",)
    assert found(new, "import shop.price as prices", "raises(prices.Wrong)") == line
    assert found(new, "from price import (", "    discounted,", "    Wrong,", ")") == line
    assert found(new, "    Wrong,", "raises(Wrong)") == line


def test_a_function_that_another_file_had_is_shown_where_tests_take_it_from_its_new_place() -> None:
    assert found(OLD, "from offers import discounted", path="offers.py") == (
        "- `def discounted(cents, percent=...)` in `offers.py`",
    )
    assert found(OLD, "from price import discounted", path="offers.py") == ()


@pytest.mark.parametrize(
    ("code", "line", "shown"),
    [
        (
            "@overload\ndef f(a: int): ...\n@overload\ndef f(a: str, b: int): ...\ndef f(a, b=3): ...\n",
            "f(1)",
            ["`def f(a, b=...)`"],
        ),
        ("class A:\n    def __new__(cls, x, y=2): ...\n", "A(1)", ["`class A(x, y=...)`"]),
        ("class A:\n    @x.setter\n    def x(self, v): ...\n", "a.x = 3", ["setter of the property `x` of `A`"]),
        ("LOW, (HIGH, *_) = 1, (2, 3)\n", "LOW < HIGH", ["`LOW`", "`HIGH`"]),
        ("double = lambda x, y=3: x\n", "double(2)", ["`double(x, y=...)`"]),
        ("P = namedtuple('P', 'x y')\n", "P(1, 2).x", ["`P(x, y)`", "`x` of `P`"]),
        ("P = NamedTuple('P', [('x', int)])\n", "P(1)", ["`P(x)`"]),
        ("def f(): ...\nf.calls = 0\n", "f.calls", ["`def f()`", "attribute `calls` of `f`"]),
        ("for one in (1, 2):\n    def g(): ...\n", "g()", ["`def g()`"]),
        ("match 1:\n    case 1:\n        def g(): ...\n", "g()", ["`def g()`"]),
    ],
)
def test_a_declaration_is_shown_as_it_is_called(code: str, line: str, shown: list[str]) -> None:
    assert found(OLD + code, line) == tuple(f"- {one} in `price.py`" for one in shown)


@pytest.mark.parametrize(
    ("code", "called"),
    [
        ("@dataclass(kw_only=True)\nclass A:\n    x: int\n    y: int = 2\n", "(*, x, y=...)"),
        ("@dataclass\nclass A:\n    x: int\n    _: KW_ONLY\n    y: int\n", "(x, *, y)"),
        ("@dataclass\nclass A:\n    x: int = field(repr=False)\n    n: ClassVar[int] = 3\n", "(x)"),
        ("@dataclass\nclass A:\n    x: list = field(default_factory=list)\n    z: int = field(init=False)\n", "(x=...)"),
        ("@dataclass(init=False)\nclass A:\n    x: int\n", ""),
        ("@dataclass\nclass B:\n    x: int\n    y: int\n@dataclass\nclass A(B):\n    z: int\n    x: int\n", "(x, y, z)"),
        ("@attr.s\nclass A:\n    _x = attr.ib()\n    y = attr.ib(default=3)\n", "(x, y=...)"),
    ],
)
def test_a_data_class_is_called_with_what_its_constructor_takes(code: str, called: str) -> None:
    assert found(OLD + code, "A()") == (f"- `class A{called}` in `price.py`",)


@pytest.mark.parametrize(
    ("code", "line", "shown"),
    [
        (
            "type B interface {\n\t// adds\n\tDo(x int) error\n\tio.Reader\n}\n",
            "type f B",
            ["`type B interface { Do(x int) error; io.Reader }`"],
        ),
        ("type B interface {\n\tDo(x int) error\n}\n", "func (f fake) Do(x int) error {", ["`Do(x int) error` of `B`"]),
        ("type B interface{ Do() }\n", "b.Do()", ["`Do()` of `B`"]),
        ("func F(\n\ta int, // then a+1\n\tb string,\n) error { return nil }\n", "F(1)", ["`func F( a int, b string, ) error`"]),
        ("type A struct {\n\t*B\n\td.E\n}\n", "A{B: nil}.E", ["type `A`", "embedded field `*B` of `A`", "embedded field `d.E` of `A`"]),
        ("type S[T any] struct{}\n", "S[int]{}", ["type `S[T any]`"]),
        ("type H func(x int) error\n", "H(nil)", ["`type H func(x int) error`"]),
        ("var hook = func(x int) int { return x + 41 }\n", "hook(1)", ["`hook func(x int) int`"]),
        ("var (\n\tx K = 1\n)\n", "x", ["`x K`"]),
        ("var x = func() int { const Q = 1; return Q }()\n", "x == Q", ["`x`"]),
    ],
)  # fmt: skip
def test_a_declaration_of_go_is_shown_as_it_is_called(code: str, line: str, shown: list[str]) -> None:
    assert found(f"package price\n\n{code}", line, path="price/a.go") == tuple(
        f"- {one} in `price/a.go`" for one in shown
    )


def test_a_file_with_a_thousand_branches_is_read() -> None:
    branches = "".join(f"elif x == {number}:\n    def f{number}(): ...\n" for number in range(1500))
    assert found(f"if x < 0:\n    y = 1\n{branches}", "f1499()") == ("- `def f1499()` in `price.py`",)


def test_the_interface_follows_the_text() -> None:
    assert with_interface("Prices are wrong.", ()) == "Prices are wrong."
    assert with_interface("Prices are wrong.", ("- `a` in `b.py`",)) == (
        "Prices are wrong.\n\nExpected interface:\n\n- `a` in `b.py`"
    )
