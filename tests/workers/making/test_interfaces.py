"""What a problem says of the interface that hidden tests expect."""

import pytest

from workers.making.ecosystems.python import ECOSYSTEM as PYTHON
from workers.making.interfaces import expected, with_interface

OLD = """class Price:
    def __init__(self, cents):
        self.cents = cents

def discounted(cents, percent=10):
    return cents
"""


def found(new: str, *test_lines: str) -> tuple[str, ...]:
    """What a test with these lines expects of the code that is `new` instead of OLD."""
    added = "".join(f"+{line}\n" for line in test_lines)
    tests = f"diff --git a/test_a.py b/test_a.py\n--- a/test_a.py\n+++ b/test_a.py\n@@ -0,0 +1,{len(test_lines)} @@\n{added}"
    declared = (("price.py", one) for one in PYTHON.declarations(new.encode()))
    return expected(PYTHON.declarations(OLD.encode()), declared, tests)


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


def test_the_interface_follows_the_text() -> None:
    assert with_interface("Prices are wrong.", ()) == "Prices are wrong."
    assert with_interface("Prices are wrong.", ("- `a` in `b.py`",)) == (
        "Prices are wrong.\n\nExpected interface:\n\n- `a` in `b.py`"
    )
