"""What a problem shows of tests that fail with a bug: the call and what comes of it, and nothing that only the tests know."""

import textwrap

import pytest

from workers.grading.controls.spans import read
from workers.making.reaching import Failure, RaisedIn, RanTest
from workers.making.symptoms import Example, chosen, example_of, names_tests, problem_with

PATH = "tests/test_shop.py"
IMPORTS = "from shop import Shop, a, b, more, order, other, price, way"


def example(source: str, line: int, failure: Failure, test: str = "test_order") -> Example | None:
    text = textwrap.dedent(source).strip()
    file = read(text.encode() if "import" in text else f"{text}\n{IMPORTS}\n".encode())
    assert file
    frames = (RaisedIn("", 3), RaisedIn(PATH, line), *failure.frames)
    failure = Failure(failure.exception, failure.message, frames, failure.parameters)
    return example_of(failure, f"{PATH}::{test}", PATH, file, {"order", "Shop", "rows", "_sent"})


WRONG = Failure("AssertionError", "assert 3 == 4\n +  where 3 = order(1)")


@pytest.mark.parametrize(
    ("source", "line", "code"),
    [
        ("def test_order():\n    assert order(1) == 4", 2, "order(1) == 4"),
        (
            """
            def test_order(self):
                # why
                shop = Shop()
                other = 7
                shop.add(price,
                         1)
                assert shop.rows == [1]
                assert not order(shop, more)
            """,
            8,
            "shop = Shop()\nshop.add(price,\n         1)\nnot order(shop, more)",
        ),
        ("def test_order():\n    with pytest.raises(OSError):\n        order(1)", 2, "order(1)"),
        ("def test_order():\n    with order(1) as a:\n        pass", 2, "order(1)"),
        (
            "def test_order():\n    @way\n    def a(b):\n        pass\n    assert order(a)",
            5,
            "@way\ndef a(b):\n    pass\norder(a)",
        ),
        ("def test_order():\n    found = order(1)\n    return found", 2, "found = order(1)"),
        ("def test_order():\n    for a in b:\n        assert order(a)", 3, "order(a)"),
        (
            """
            class TestShop:
                def test_order(self):
                    self.assertEqual(self.shop.rows, [1])

                def setUp(self):
                    self.shop = Shop()
            """,
            3,
            "self.shop = Shop()\nself.shop.rows",
        ),
    ],
)
def test_the_failing_call_is_shown_with_what_it_needs_and_without_what_checks_it(
    source: str, line: int, code: str
) -> None:
    found = example(source, line, WRONG)
    assert found
    lines = found.code.splitlines()
    assert "\n".join(line for line in lines if not line.startswith("from shop import ")) == code
    assert found.output == "AssertionError: assert 3 == 4\n +  where 3 = order(1)"


HELPERS = """
import json as j
from . import prices
from ..shop import order, other
LIMIT = 7
class Row:
    def twice(self):
        return self.cents + LIMIT
def made(cents):
    return Row(cents)
@pytest.fixture
def kept():
    return 3
class TestShop:
    rows = []
def test_order():
    LINE
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (
            "assert order(j.loads(x) for x in '1')",
            "from shop import order\nimport json as j\norder(j.loads(x) for x in '1')",
        ),
        ("assert order(prices.one)", "from shop import order\nfrom tests import prices\norder(prices.one)"),
        (
            "assert order(made(1))",
            "from shop import order\nLIMIT = 7\nclass Row:\n    def twice(self):\n        return self.cents + LIMIT\n"
            "def made(cents):\n    return Row(cents)\norder(made(1))",
        ),
        ("assert order(kept)", None),
        ("assert order(TestShop.rows)", None),
        ("assert order(unknown)", None),
        ("assert order(self.cents)", None),
        ("assert order(len(str(3)))", "from shop import order\norder(len(str(3)))"),
    ],
)
def test_an_example_has_what_its_names_are_in_the_test_file_or_is_none(line: str, code: str | None) -> None:
    found = example(HELPERS.strip().replace("LINE", line), 16, WRONG)
    assert (found and found.code) == code


def test_an_argument_that_is_no_parameter_with_a_value_is_explained_by_nothing() -> None:
    source = "from shop import order, cents\ndef test_order(cents):\n    assert order(cents)"
    assert example(source, 3, WRONG) is None
    failure = Failure("OSError", "", (), {"cents": "nan"})
    assert example(source, 3, failure) is None
    assert example(source, 3, Failure("OSError", "", (), {"cents": "[3]"})) is not None


def test_names_of_hidden_tests_and_of_their_files_are_found_in_a_problem() -> None:
    hidden = [RanTest("tests/shop_test.py::TestLarge::test_half[1]", "tests/shop_test.py")]
    for text in ("<class 'tests.shop_test.Row'>", "in TestLarge", "test_half fails"):
        assert names_tests(f"It says {text}.", hidden)
    assert not names_tests("shop_tests, test_halves, Large, tests", hidden)
    in_go = [
        RanTest(f"example.com/tests/price.{name}", "price_test.go")
        for name in ("ExampleHalf", "FuzzSum", "TestSuite/TestMethod", "TestTable/case_1")
    ]
    for text in ("ExampleHalf", "FuzzSum", "TestSuite", "TestMethod"):
        assert names_tests(f"It says {text}.", in_go)
    assert not names_tests("tests of price, case_1, Half", in_go)


@pytest.mark.parametrize(
    ("source", "line", "wanted"),
    [
        ("def test_order():\n    with pytest.raises(OSError):\n        order(1)", 2, "raise `OSError`"),
        ("def test_order():\n    with pytest.raises(OSError):\n        order(1)", 3, "raise `OSError`"),
        (
            "def test_order(self):\n    with self.assertRaisesRegex((OSError, KeyError), 'x'):\n        order(1)",
            3,
            "raise `(OSError, KeyError)`",
        ),
        ("def test_order():\n    with pytest.warns(OldOrder):\n        order(1)", 3, "work"),
        ("def test_order():\n    with order(1) as a:\n        pass", 2, "work"),
    ],
)
def test_an_exception_that_the_test_expects_is_said_to_be_right(source: str, line: int, wanted: str) -> None:
    other = Failure("NotImplementedError", "", (RaisedIn("shop.py", 3, "order"),), {})
    found = example(source, line, other)
    assert found
    assert found.text.startswith(f"This should {wanted}:\n")


def test_parameters_of_a_test_have_their_values() -> None:
    failure = Failure("shop.NoPrice", "7", (RaisedIn("shop.py", 3, "order"),), {"cents": "7", "total": "8"})
    found = example("def test_order(cents, total):\n    assert Shop(order(cents))", 2, failure)
    code = "from shop import Shop\nfrom shop import order\ncents = 7\nShop(order(cents))"
    assert found == Example(code, "order", "shop.NoPrice", "shop.NoPrice: 7")
    assert found.title == "`order` raises `shop.NoPrice`"


@pytest.mark.parametrize(
    ("source", "failure"),
    [
        ("def test_order():\n    assert other(1)", WRONG),
        ("def test_order():\n    if order(1):\n        pass", WRONG),
        (
            "def test_order():\n    @order\n    def way(): pass",
            Failure("OSError", "", (RaisedIn("shop.py", 3, "order"),)),
        ),
        ("def test_order():\n    assert order(test_order)", WRONG),
        ("def test_order():\n    assert order(1)", Failure("OSError", f"in {PATH}, line 2")),
        ("def test_order():\n    assert order(1)", Failure("OSError", "in test_order")),
        ("def test_order():\n    assert order([\n" + "        1,\n" * 20 + "    ])", WRONG),
        (
            "def test_order():\n    assert order(a)",
            Failure("OSError", "", (), {"a": "<X at 0x7f0011223344>"}),
        ),
    ],
)
def test_what_shows_no_call_or_names_the_test_is_no_example(source: str, failure: Failure) -> None:
    assert example(source, 2, failure) is None


def test_the_output_is_the_same_in_every_run() -> None:
    message = "no <X object at 0x7f0011223344> in /tmp/pytest-of-root/pytest-3/test_x0/a.txt, /tmp/tmpab12/b\nUse -v to get more diff\nend"
    found = example("def test_order():\n    assert order(1)", 2, Failure("OSError", message))
    assert found
    assert found.output == "OSError: no <X object at 0x...> in /tmp/directory/a.txt, /tmp/directory/b\nend"
    long = example("def test_order():\n    assert order(1)", 2, Failure("OSError", "x\n" * 99))
    assert long
    assert long.output.splitlines() == ["OSError: x", *["x"] * 11, "..."]


def test_a_problem_says_what_is_wrong_and_shows_the_shortest_examples() -> None:
    examples = [Example(f"order({'1' * size})", "order", "", "AssertionError") for size in (9, 3, 5, 7, 3)]
    assert [one.code for one in chosen([examples])] == ["order(111)", "order(11111)", "order(1111111)"]
    assert problem_with(chosen([examples])[:1]) == (
        "# `order` gives a wrong result\n\nThis should work:\n\n```python\norder(111)\n```\n\nIt ends with:\n\n```\nAssertionError\n```\n\n"
        "Find the cause and correct it in the code, for every input and not for these alone. What works now has to go on working."
    )
    gone = problem_with(
        [Example("order(1)", "order", "NotImplementedError", "NotImplementedError")], is_gone=True
    )
    assert gone.startswith("# `order` is not implemented\n")
    assert gone.endswith(
        "A function has lost its body, which has to be written anew; its docstring says what it does."
    )
    assert "lost its body" not in problem_with([Example("order(1)", "order", "NotImplementedError", "")])
    silent = problem_with([Example("order(1)", "order", "", "Failed: DID NOT RAISE OSError")])
    assert "This should raise an exception:\n" in silent


def test_each_group_of_examples_is_shown() -> None:
    examples = [Example(f"order({number})", "order", "", "AssertionError") for number in range(6)]
    assert [one.code for one in chosen([examples[:3], examples[4:5]])] == ["order(0)", "order(4)", "order(1)"]
    assert len(chosen([[one] for one in examples])) == len(examples)
    assert chosen([examples, []]) == []
