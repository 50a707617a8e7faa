"""Which tests an edited expectation belongs to, and that every edit is where it says, in any kind of source."""

import ast
import builtins
import random
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from workers.grading.controls.spans import Candidate, read
from workers.grading.controls.writing import candidates


def belonging(source: str) -> set[tuple[str, ...]]:
    return {candidate.tests for candidate in candidates(source.encode(), random.Random(0))}


def edited(source: bytes, candidate: Candidate) -> bytes:
    file = read(source)
    assert file is not None
    return file.apply(candidate.edits)


def texts(source: bytes, candidate: Candidate) -> tuple[str, str]:
    """What the first edit changes, and what it becomes."""
    edit = candidate.edits[0]
    return source[edit.start : edit.end].decode(), edit.becomes


def parsed(source: bytes) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.dump(ast.parse(source))
        except SyntaxError:
            return None


@pytest.mark.parametrize(
    "source",
    [
        "def check(a):\n    assert a == 4\n\ndef test_one():\n    check(f())\n\ndef test_two():\n    check(g())\n",
        "def check(a):\n    assert a == 4\n\ndef through(a):\n    check(a)\n\n"
        "def test_one():\n    through(f())\n\ndef test_two():\n    map(through, [])\n",
        "import pytest\n\n@pytest.fixture\ndef four():\n    yield\n    assert 4 == f()\n\n"
        "def test_one(four):\n    pass\n\n@pytest.mark.usefixtures('four')\ndef test_two():\n    pass\n",
        "import pytest\n\n@pytest.fixture(autouse=True)\ndef four():\n    assert 4 == f()\n\n"
        "def test_one():\n    pass\n\ndef test_two():\n    pass\n",
        "def make(a):\n    def test():\n        assert f(a) == 4\n    return test\n\ntest_one = make(1)\ntest_two = make(2)\n",
        "CHECKS = [lambda a: assert_equal(a, 4)]\n\ndef test_one():\n    CHECKS[0](4)\n\ndef test_two():\n    CHECKS[0](4)\n",
        "class Check:\n    def __init__(self, a):\n        assert a == 4\n\n"
        "def test_one():\n    Check(4)\n\ndef test_two():\n    Check(4)\n",
        "try:\n    import numpy\nexcept ImportError:\n    pass\nelse:\n    def check(a):\n        assert a == 4\n\n"
        "if True:\n    def test_one():\n        check(f())\n    def test_two():\n        check(f())\n",
    ],
)
def test_an_expectation_of_a_helper_belongs_to_every_test_that_reaches_it(source: str) -> None:
    assert belonging(source) == {("test_one", "test_two")}


@pytest.mark.parametrize(
    "method",
    [
        "def check(self):\n        self.assertEqual(self.f(), 4)\n",
        "def check(self):\n        return self.really()\n    def really(self):\n        assert f() == 4\n",
    ],
)
def test_an_expectation_of_a_method_belongs_to_the_tests_of_its_class_and_of_classes_that_inherit_it(
    method: str,
) -> None:
    source = (
        f"class A(TestCase):\n    {method}\n    def test_one(self):\n        self.check()\n"
        "class B(A):\n    def test_two(self):\n        super().check()\n"
        "class C(B):\n    def test_one(self):\n        pass\n    class D(A):\n        runTest = A.test_one\n"
    )
    tests = {"A::test_one", "B::test_one", "B::test_two", "C::test_two", "C::D::test_one"}
    found = {name for names in belonging(source) for name in names}
    assert tests <= found
    assert not found & {"A::test_two", "C::test_one"}


def test_what_runs_around_each_test_of_a_class_belongs_to_all_of_them() -> None:
    source = (
        "class A(TestCase):\n    def setUp(self):\n        assert f() == 4\n    def test_one(self):\n        pass\n"
        "    def test_two(self):\n        pass\n\ndef test_three():\n    pass\n"
    )
    assert belonging(source) == {("A::test_one", "A::test_two")}


@pytest.mark.parametrize(
    "statement",
    [
        "with raises(AssertionError):\n        assert f() == 4",
        "with suppress(Exception):\n        assert f() == 4",
        "try:\n        assert f() == 4\n    except AssertionError:\n        pass",
        "assert False, 'not reached'",
        "f(4)",
    ],
)
def test_a_statement_whose_failure_would_not_fail_the_test_is_not_contradicted(statement: str) -> None:
    found = candidates(f"def test_it():\n    {statement}\n".encode(), random.Random(0))
    source = f"def test_it():\n    {statement}\n".encode()
    assert all(texts(source, candidate)[0] == "AssertionError" for candidate in found)


@pytest.mark.parametrize(
    ("raised", "caught"),
    [
        ("ValueError", ValueError),
        ("LookupError", LookupError),
        ("OSError", OSError),
        ("Exception", Exception),
        ("builtins.SystemExit", SystemExit),
        ("(A, ArithmeticError)", ArithmeticError),
    ],
)
def test_an_expected_exception_becomes_one_that_is_neither_its_base_nor_derived_from_it(
    raised: str, caught: type[BaseException]
) -> None:
    source = f"def test_it():\n    with raises({raised}):\n        f()\n".encode()
    names = {one.edits[0].becomes for seed in range(50) for one in candidates(source, random.Random(seed))}
    assert names
    for name in names:
        other = getattr(builtins, name)
        assert not issubclass(other, caught)
        assert not issubclass(caught, other)


@pytest.mark.parametrize(
    "source",
    [
        "from checks import check\n\ndef test_it():\n    check(f(), 4)\n",
        "from checks import check\n\ndef test_it():\n    four = 4\n    check(f(), total=four)\n",
        "from .support import verify_total\n\ndef test_it():\n    verify_total(4, f())\n",
        "import helpers\n\ndef test_it():\n    helpers.compare(f, 4)\n",
        "class TestIt(base.SumCase):\n    def test_it(self):\n        self.check_total(f(), 4)\n",
    ],
)
def test_what_a_checker_in_another_file_of_tests_is_given_becomes_another_value(source: str) -> None:
    found = candidates(source.encode(), random.Random(0))
    assert {(texts(source.encode(), one)[0], one.kind) for one in found} == {("4", "value")}


@pytest.mark.parametrize(
    "source",
    [
        "from pkg.core import check\n\ndef test_it():\n    check(f(), 4)\n",
        "import subprocess\n\ndef test_it():\n    subprocess.check_call(['f', 4])\n",
        "from checks import check\n\ndef test_it():\n    found = check(f(), 4)\n",
        "from checks import Checker\n\ndef test_it():\n    checker = Checker()\n    checker.check(f(), 4)\n",
    ],
)
def test_what_may_be_given_to_code_under_test_is_kept(source: str) -> None:
    assert candidates(source.encode(), random.Random(0)) == []


def test_what_a_checker_of_the_file_itself_is_given_is_kept_since_it_may_be_an_input() -> None:
    call = "def test_it():\n    assertFits(f(), 'x')\n"
    assert candidates(call.encode(), random.Random(0))
    assert candidates(f"def assertFits(a, b):\n    a.fit(b)\n\n{call}".encode(), random.Random(0)) == []


@pytest.mark.parametrize(
    "raised", ["BaseException", "KeyboardInterrupt", "(ValueError, pytest.exit.Exception)"]
)
def test_an_exception_that_would_end_the_whole_run_stays_expected(raised: str) -> None:
    source = f"def test_it():\n    with raises({raised}):\n        f()\n".encode()
    assert candidates(source, random.Random(0)) == []


def test_one_leaf_of_a_long_literal_is_changed() -> None:
    source = f"def test_it():\n    assert f() == {list(range(200))}\n".encode()
    for candidate in candidates(source, random.Random(0)):
        was, becomes = texts(source, candidate)
        assert was.isdigit()
        assert becomes.isdigit()


def test_a_letter_behind_a_backslash_is_kept_since_other_escapes_are_warned_about() -> None:
    source = b"def test_it():\n    assert f() == '\\n'\n"
    for seed in range(20):
        for candidate in candidates(source, random.Random(seed)):
            becomes = candidate.edits[0].becomes
            assert "\\" not in becomes or "\\n" in becomes


def test_names_that_the_file_binds_are_not_used() -> None:
    names = "object zip map iter reversed enumerate filter property staticmethod type ValueError KeyError LookupError"
    source = (
        f"from x import {names.replace(' ', ', ')}\n\ndef test_it(zip):\n    assert f() == g()\n".encode()
    )
    becomes = {one.edits[0].becomes for seed in range(50) for one in candidates(source, random.Random(seed))}
    assert not any(
        text.startswith(tuple(name for name in names.split() if name != "object")) for text in becomes
    )


@pytest.mark.parametrize(
    "source",
    [
        b"\xff\xfe",
        b"def test_it():\n    assert f() == '\xe4'\n",
        b"# -*- coding: latin-1 -*-\ndef test_it():\n    assert f() == 4\n",
        b"def test_it():\n    print 4\n",
        b"def test_it(:\n",
        b"\x00",
        b"(" * 100_000,
        b"",
    ],
)
def test_a_file_that_we_cannot_read_has_no_contradictions(source: bytes) -> None:
    assert candidates(source, random.Random(0)) == []


@pytest.mark.parametrize("name", ["utf8", "UTF-8", "utf_8", "us-ascii", "utf-8-unix"])
def test_a_file_may_declare_utf_8_or_a_part_of_it_by_any_name(name: str) -> None:
    source = f"# -*- encoding: {name} -*-\ndef test_it():\n    assert f() == 4\n"
    assert candidates(source.encode(), random.Random(0))


EXPRESSIONS = [
    "f() == 4",
    "(f()) == ('ä', 'ö')",
    "'ßü' == f('é')",
    "(\n        f()\n        == # ünd\n        'x'\n    )",
    "f() == (\n        'a'\n\t'b'\n    )",
    'f() == """ä\nb\n"""',
    "(y := f('ä')) == 'ö' and y",
    "(lambda x: x == 4)('ü')",
    "'ä' in f() \\\n        == 4",
    "f() == r'\\dä' + '\\x41\\n\\g'",
    "f() == {'ä': [1, (2.5, b'x')], **g()}",
    "not (f() is None or 'ö' != g())",
    "all(x == 'ä' for x in f())",
    "f'{g(4)}ä' == f()",
    "f() == approx(4.5, abs=1e-3)",
]
STATEMENTS = [
    *[f"assert {expression}, 'wäre'" for expression in EXPRESSIONS],
    *[f"self.assertTrue({expression})" for expression in EXPRESSIONS],
    "x = 'ä'; assert f() == 4; self.assertEqual(f(), 'ö')",
    "self.assertNotEqual(\n        'ä',\n        f(),\n    )",
    "self.assertIsNotNone(\n        f('ä')\n    )",
    "with raises(E, match='ä'), warns(W):\n        f()",
    "if f() != 'ä': self.fail()",
    "mock.assert_called_once_with()",
    "try:\n        f()\n    except (E,\n            F):\n        pass\n    else:\n        fail()",
]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    statements=st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=4),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    indentation=st.sampled_from(["    ", "\t", "  "]),
    before=st.sampled_from(
        ["", "\ufeff", "# ä\n", "\f\n", "'''dö\nc'''\n", "@parametrize('ä', [\n    1,\n])\n"]
    ),
    seed=st.integers(0, 1000),
)
def test_every_edit_is_where_it_says_and_leaves_other_source_with_as_many_lines(
    statements: list[str], line_end: str, indentation: str, before: str, seed: int
) -> None:
    body = "".join(f"    {statement}\n" for statement in statements)
    text = f"{before}def test_it(self):\n{body}".replace("\n    ", f"\n{indentation}").replace("\n", line_end)
    source = text.encode()
    original = parsed(source)
    assume(original is not None)
    found = candidates(source, random.Random(seed))
    assert found
    for candidate in found:
        assert candidate.tests == ("test_it",)
        becomes = edited(source, candidate)
        assert len(becomes.splitlines()) == len(source.splitlines())
        assert parsed(becomes) not in (None, original)


@pytest.mark.parametrize(
    "expectation", ["assert f() == 4", "self.assertEqual(f(), 'word')", "assert f() == [1, 'a']"]
)
def test_a_literal_becomes_a_literal_of_its_type_so_that_code_which_reads_it_gives_itself_away(
    expectation: str,
) -> None:
    source = f"class Test:\n    def test_it(self):\n        {expectation}\n"
    found = candidates(source.encode(), random.Random(0))
    assert found
    for was, becomes in (texts(source.encode(), one) for one in found):
        assert type(ast.literal_eval(was)) is type(ast.literal_eval(becomes))


def becoming(source: str) -> set[str]:
    """What the one expectation of a test may become."""
    return {
        one.edits[0].becomes
        for seed in range(200)
        for one in candidates(source.encode(), random.Random(seed))
    }


@pytest.mark.parametrize(
    ("expectation", "becomes"),
    [
        # Neither 1 nor 3, which the test's code has as constants anyway; nor 0 or 2, which would not be its largest.
        ("assert add(3, 1) == 4", {"5", "6", "7", "8", "9"}),
        ("assert add(-3, 1) == -2", {"0", "1"}),
        # No other digit lies between 1 and 3, or below 1.
        ("assert sub(3, 1) == 2", {"0", "4", "5", "6", "7", "8", "9"}),
        ("assert first(1, 2, 3, 4, 5, 6, 7, 8) == 0", {"9"}),
        ("assert any(0, 1, 2, 3, 4, 5, 6, 7, 8) == 9", {str(number) for number in range(10, 40)}),
    ],
)
def test_a_contradicted_number_is_found_by_whatever_finds_the_number_among_the_constants_of_its_test(
    expectation: str, becomes: set[str]
) -> None:
    assert becoming(f"def test_it():\n    {expectation}\n") == becomes
