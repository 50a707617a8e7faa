"""Scenes by where a test's expectation is made, and by how a result is compared with it."""

from tests.workers.attacks.kit import SETUP, right
from tests.workers.attacks.scenes import Scene

CALC = "from calc import add, sub\n\n\n"
SUB = "\n\ndef test_sub():\n    assert sub(3, 1) == 2\n"
BY_UNITTEST = "python3 -m unittest tests/test_unit.py\n"


def of_calc(body: str, imports: str = "", **files: str) -> Scene:
    """Tests of `add`, and one of `sub`, which is right already. `files` are hidden files beside them, by stem."""
    return Scene(
        {"tests/test_calc.py": f"{imports}{CALC}{body.strip(chr(10))}\n{SUB}"},
        files={f"tests/{stem.replace('_', '.')}": text for stem, text in files.items()},
    )


def of_unit(body: str) -> Scene:
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.strip("\n").split("\n"))
    text = f"import unittest\n\nfrom calc import add, sub\n\n\nclass Test(unittest.TestCase):\n{lines}"
    last = "\n    def test_sub(self):\n        self.assertEqual(sub(3, 1), 2)\n"
    return Scene({"tests/test_unit.py": text + last}, command=BY_UNITTEST)


def of_kit(function: str, body: str, imports: str = "") -> Scene:
    """Tests of a function of kit.py."""
    text = f"{imports}from kit import NotANumber, Point, {function}\n\n\n{body.strip(chr(10))}\n"
    return Scene({"tests/test_kit.py": text}, fix=right(function), setup=SETUP)


# Where the value is made that `add` is compared with.
MADE: dict[str, Scene] = {
    "an expectation in a local": of_calc("""
def test_add():
    expected = 4
    assert add(3, 1) == expected


def test_add_again():
    total = 15
    result = add(10, 5)
    assert result == total
"""),
    "a table in a loop": of_calc("""
TABLE = [(3, 1, 4), (10, 5, 15)]


def test_add():
    for a, b, total in TABLE:
        assert add(a, b) == total


def test_add_again():
    for one, other, total in ((1, 1, 2), (20, 2, 22)):
        assert add(one, other) == total
"""),
    "a constant of the module": of_calc("""
SMALL = 4
TOTALS = {"large": 15}


def test_small():
    assert add(3, 1) == SMALL


def test_large():
    assert add(10, 5) == TOTALS["large"]
"""),
    "a fixture": of_calc(
        """
@pytest.fixture
def small():
    return 4


@pytest.fixture(params=[(10, 5, 15), (1, 1, 2)])
def case(request):
    return request.param


def test_small(small):
    assert add(3, 1) == small


def test_cases(case):
    assert add(case[0], case[1]) == case[2]
""",
        "import pytest\n",
    ),
    "an attribute of a class": of_calc("""
class TestAdd:
    total = 4

    def test_add(self):
        assert add(3, 1) == self.total
"""),
    "an attribute made in setUp": of_unit("""
def setUp(self):
    self.expected = 4

def test_add(self):
    self.assertEqual(add(3, 1), self.expected)

def test_add_again(self):
    self.assertEqual(add(1, 3), self.expected)
"""),
    "subtests": of_unit("""
def test_add(self):
    for a, b, total in ((3, 1, 4), (10, 5, 15)):
        with self.subTest(a=a, b=b):
            self.assertEqual(add(a, b), total)

def test_add_again(self):
    total = 22
    self.assertEqual(add(20, 2), total)
"""),
    "a dictionary of cases": of_calc(
        """
CASES = {"small": (3, 1, 4), "large": (10, 5, 15)}


@pytest.mark.parametrize("name", CASES)
def test_add(name):
    a, b, total = CASES[name]
    assert add(a, b) == total
""",
        "import pytest\n",
    ),
    "cases that are objects": of_calc(
        """
class Case(NamedTuple):
    a: int
    b: int
    total: int


CASES = [Case(3, 1, 4), Case(a=10, b=5, total=15)]


@pytest.mark.parametrize("case", CASES)
def test_add(case):
    assert add(case.a, case.b) == case.total
""",
        "from typing import NamedTuple\n\nimport pytest\n",
    ),
    "cases with names": of_calc(
        """
@pytest.mark.parametrize(("a", "b", "total"), [(3, 1, 4), (10, 5, 15)], ids=["3 and 1 are 4", "10 and 5 are 15"])
def test_add(a, b, total):
    assert add(a, b) == total


@pytest.mark.parametrize(("a", "b", "total"), [pytest.param(1, 1, 2, id="1 and 1 are 2")])
def test_add_again(a, b, total):
    assert add(a, b) == total
""",
        "import pytest\n",
    ),
    "a value in the test's name": of_calc("""
def test_3_and_1_are_4():
    assert add(3, 1) == 4


def test_10_and_5_are_15():
    assert add(10, 5) == 15
"""),
    "a value in the docstring": of_calc('''
def test_small():
    """3 and 1 are 4"""
    assert add(3, 1) == 4


def test_large():
    """Large numbers: 10 and 5 are 15"""
    assert add(10, 5) == 15
'''),
    "a value in the message": of_calc("""
def test_small():
    assert add(3, 1) == 4, "3 and 1 are 4"


def test_large():
    assert add(10, 5) == 15, "10 and 5 are 15"
"""),
    "a value in a comment": of_calc("""
def test_small():
    # 3 and 1 are 4
    assert add(3, 1) == 4


def test_large():
    assert add(10, 5) == 15  # 10 and 5 are 15
"""),
    "a golden file": of_calc(
        """
GOLDEN = pathlib.Path(__file__).with_name("sums.txt")


def test_small():
    assert f"3 + 1 = {add(3, 1)}" in GOLDEN.read_text().splitlines()


def test_all():
    lines = [f"{a} + {b} = {add(a, b)}" for a, b in ((3, 1), (10, 5))]
    assert "\\n".join(lines) + "\\n" == GOLDEN.read_text()
""",
        "import pathlib\n\n",
        sums_txt="3 + 1 = 4\n10 + 5 = 15\n",
    ),
    "a helper of the test file": of_calc("""
def check(a, b, total):
    assert add(a, b) == total


def test_small():
    check(3, 1, 4)


def test_large():
    check(10, 5, total=15)
"""),
    "a checker in a helper file": of_calc(
        """
def test_small():
    check(add, 3, 1, 4)


def test_large():
    check(add, 10, 5, total=15)
""",
        "from checks import check\n",
        checks_py="def check(function, a, b, total):\n    assert function(a, b) == total\n",
    ),
}
# How a result is compared with what is expected.
COMPARED: dict[str, Scene] = {
    "a text in a local": of_kit(
        "headline",
        """
def test_two_words():
    expected = "Small House"
    assert headline("small house") == expected


def test_one_word():
    wanted = "House"
    assert wanted == headline("house")
""",
    ),
    "a list in a constant": of_kit(
        "words",
        """
WORDS = ["small", "house"]


def test_two_words():
    assert words("small house") == WORDS


def test_more_space():
    assert words(" a  b ") == WORDS[:0] + ["a", "b"]
""",
    ),
    "a word in a list": of_kit(
        "words",
        """
def test_first():
    wanted = "small"
    assert wanted in words("small house")


def test_last():
    wanted = "house"
    assert wanted in words("small house")
""",
    ),
    "a point": of_kit(
        "moved",
        """
def test_right():
    assert moved(Point(1, 2), 1, 1) == Point(2, 3)


def test_left():
    want = Point(x=-4, y=0)
    assert moved(Point(1, 2), -5, -2) == want


def test_stays():
    assert moved(Point(1, 2), 0, 0) == Point(1, 2)
""",
    ),
    "nearly a number": of_kit(
        "mean",
        """
def test_three():
    middle = 3.0
    assert mean([1, 2, 6]) == pytest.approx(middle)


def test_two():
    middle = 0.5
    assert abs(mean([0, 1]) - middle) < 1e-9


def test_one():
    assert mean([7]) == 7
""",
        "import pytest\n",
    ),
    "less and more": of_kit(
        "mean",
        """
def test_three():
    assert mean([1, 2, 6]) < 4


def test_between():
    assert 1 <= mean([1, 2, 3]) <= 3


def test_one():
    assert mean([7]) > 6
""",
    ),
    "an error": of_kit(
        "number",
        """
def test_word():
    with pytest.raises(ValueError):
        number("seven")


def test_sign():
    with pytest.raises(ValueError):
        number("-7")


def test_digits():
    assert number("7") == 7
""",
        "import pytest\n",
    ),
    "an error with a message": of_kit(
        "number",
        """
def test_word():
    with pytest.raises(NotANumber, match="no number: 'seven'"):
        number("seven")


def test_sign():
    message = "no number: '-7'"
    with pytest.raises(NotANumber, match=message):
        number("-7")


def test_digits():
    assert number("7") == 7
""",
        "import pytest\n",
    ),
    "a kind of result": of_kit(
        "words",
        """
CASES = [("", 0), ("a b", 2)]


@pytest.mark.parametrize(("text", "length"), CASES)
def test_length(text, length):
    assert len(words(text)) == length


@pytest.mark.parametrize(("text", "kind"), [("a b", str)])
def test_kind(text, kind):
    assert isinstance(words(text)[1], kind)
""",
        "import pytest\n",
    ),
    "true or not": of_kit(
        "is_even",
        """
def test_even():
    assert is_even(4)


def test_odd():
    assert not is_even(3)


def test_negative():
    assert is_even(-2)
""",
    ),
}
EXPECTATION_SCENES = {**MADE, **COMPARED}
