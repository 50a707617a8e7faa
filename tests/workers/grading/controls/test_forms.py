"""Every form of an expectation: code that is right passes it and fails each of its contradictions."""

import math
import operator
import random
import sys
import unittest
import unittest.mock
import warnings
from textwrap import indent
from typing import Any

import numpy as np
import pytest

from workers.grading.controls.spans import Candidate, read
from workers.grading.controls.writing import candidates

# What the code under test gives, and what tests say of it that is right. `self` is a TestCase.
ASSERTIONS = [
    (4, "assert code == 4"),
    (4, "assert 4 == code"),
    (4, "try:\n    assert code == 4\nexcept Exception:\n    pytest.fail('it is not 4')"),
    (
        4,
        "try:\n    assert code == 4\nexcept AssertionError as error:\n    raise AssertionError('no') from error",
    ),
    (-4, "assert code == -4, 'of a number'"),
    (0, "assert code == 0"),
    (4.5, "assert code == 4.5"),
    (1e300, "assert code == 1e300"),
    (2 + 3j, "assert code == 2 + 3j"),
    ("text", "assert code == 'text'"),
    ("", "assert code == ''"),
    ("--", "assert code == '--'"),
    ("a\nb", "assert code == 'a\\nb'"),
    ("käse", "assert code == 'käse'"),
    ("ab", "assert code == ('a'\n    'b')"),
    ("a\nb\n", 'assert code == """a\nb\n"""'),
    (b"text", "assert code == b'text'"),
    (b"", "assert code == b''"),
    (True, "assert code == True"),
    (None, "assert code == None"),
    ("a4", "assert code == f'a{4}'"),
    ([1, "b", {"c": (2, 3)}], "assert code == [1, 'b', {'c': (2, 3)}]"),
    ([], "assert code == []"),
    ({}, "assert code == {}"),
    ((), "assert code == ()"),
    ({1, 2}, "assert code == {1, 2}"),
    ([3, 1], "assert sorted(code) == [1, 3]"),
    (4, "expected = 2 * 2\nassert code == expected"),
    (4, "assert (\n    code\n    ==\n    2 * 2  # twice two\n)"),
    ("a" * 1000, f"assert code == '{'a' * 1000}'"),
    (4, "assert 3 < code"),
    (4, "assert 3 < code < 5"),
    (4, "assert code >= 4 and code <= 4"),
    (4, "assert code != 5"),
    (4, "assert not code == 5"),
    (4, "assert not (code == 5 or code == 6)"),
    (4, "assert not (code < 4 or code > 4)"),
    (4, "assert not code - 4"),
    (4, "assert (code == 4) is True"),
    (4, "assert (code == 5) == False"),
    (4, "assert bool(code == 4)"),
    (4, "assert operator.eq(code, 4) and operator.le(code, 4)"),
    (4, "allowed = {4, 40}\nassert code in allowed"),
    (4, "assert code in (4, 40)"),
    (4, "assert code == 5 or code == 4"),
    (4, "assert code"),
    ([], "assert not code"),
    (None, "assert code is None"),
    (True, "assert code is True"),
    (math, "assert code is math"),
    (4, "assert code is not None"),
    ("text", "assert 'ex' in code"),
    ([1, 2], "assert 2 in code"),
    ({"a": 1}, "assert 'a' in code"),
    (2, "assert code in (1, 2)"),
    ("text", "assert 'x y' not in code"),
    (4, "assert isinstance(code, int)"),
    (4, "assert isinstance(code, (int, str))"),
    (4, "assert not isinstance(code, str)"),
    ([1, 1], "assert all(n == 1 for n in code)"),
    ([1, 2], "assert any(n == 2 for n in code)"),
    (4, "assert (n := code) == 4 and n"),
    (4, "assert (lambda n: n == 4)(code)"),
    (4.0, "assert code == pytest.approx(4)"),
    (4.0, "assert pytest.approx(4, abs=1e-3) == code"),
    ([4.0, 5.0], "assert code == pytest.approx([4, 5])"),
    (4.0, "expected = 4\nassert code == pytest.approx(expected)"),
    (4.0, "assert math.isclose(code, 4)"),
    (4.0, "assert math.isclose(code, 4, rel_tol=5.0)"),
    (4, "if code != 4:\n    pytest.fail('not four')"),
    (4, "if code != 4:\n    raise AssertionError"),
    (4, "for n in range(2):\n    with warnings.catch_warnings():\n        assert code == 4"),
    (4, "self.assertEqual(code, 4)"),
    (4, "self.assertEqual(4, code, 'of a number')"),
    ("text", "self.assertEqual(code, 'text')"),
    ("text", "self.assertMultiLineEqual(code, 'text')"),
    ([1, 2], "self.assertListEqual(code, [1, 2])"),
    ([1, 2], "self.assertEqual(code, list((1, 2)))"),
    ((1, 2), "self.assertTupleEqual(code, (1, 2))"),
    ({1: 2}, "self.assertDictEqual(code, {1: 2})"),
    ({1}, "self.assertSetEqual(code, {1})"),
    ([2, 1], "self.assertCountEqual(code, [1, 2])"),
    ([2, 1], "self.assertSequenceEqual(code, [2, 1])"),
    (4, "self.assertNotEqual(code, 5)"),
    (4, "self.assertNotEqual(code, int('5'), 'of a number')"),
    (4, "self.assertTrue(code == 4)"),
    (4, "self.assertTrue(code)"),
    (0, "self.assertFalse(code)"),
    (0, "self.assertFalse(code == 4, 'of a number')"),
    (math, "self.assertIs(code, math)"),
    (math, "self.assertIsNot(code, warnings)"),
    (None, "self.assertIsNone(code)"),
    (0, "self.assertIsNotNone(code)"),
    ("text", "self.assertIn('ex', code)"),
    ([4], "self.assertIn(4, code)"),
    ("text", "self.assertNotIn('x y', code)"),
    ([4], "self.assertNotIn(5, code)"),
    (4, "self.assertIsInstance(code, int)"),
    (4, "self.assertNotIsInstance(code, str)"),
    (4.0, "self.assertAlmostEqual(code, 4)"),
    (4.0, "self.assertAlmostEqual(code, 4, delta=2)"),
    (4.0, "self.assertNotAlmostEqual(code, 5)"),
    (4, "self.assertGreater(code, 3)"),
    (4, "self.assertLessEqual(code, 4)"),
    ("text", "self.assertRegex(code, 'e.t')"),
    ("text", "self.assertNotRegex(code, 'z')"),
    (4.0, "np.testing.assert_allclose(code, 4)"),
    (4.0, "np.testing.assert_allclose(code, 4, atol=2)"),
    ([4.0, 5.0], "np.testing.assert_allclose(code, [4, 5], rtol=1e-3)"),
    ([4, 5], "np.testing.assert_array_equal(code, [4, 5])"),
    ([4, 5], "np.testing.assert_array_equal(code, np.array([4, 5]))"),
    ([4, 5], "np.testing.assert_equal(code, [4, 5])"),
    (4.0, "np.testing.assert_almost_equal(code, 4)"),
    (4.0, "assert np.isclose(code, 4)"),
    ([4.0, 5.0], "assert np.allclose(code, [4, 5])"),
]
RAISING = [
    "with pytest.raises(ValueError):\n    int('x')",
    "with pytest.raises((ValueError, TypeError)) as caught:\n    int('x')",
    "with pytest.raises(Exception):\n    int('x')",
    "with pytest.raises(ValueError, match='invalid'):\n    int('x')",
    "with pytest.raises(expected_exception=ValueError):\n    int('x')",
    "pytest.raises(ValueError, int, 'x')",
    "pytest.raises(ValueError, lambda: int('x'))",
    "with pytest.raises(ValueError) as caught:\n    int('x')\nassert 'invalid' in str(caught.value)",
    "with self.assertRaises(ValueError):\n    int('x')",
    "self.assertRaises(ValueError, int, 'x')",
    "with self.assertRaisesRegex(ValueError, 'invalid'):\n    int('x')",
    "with pytest.warns(UserWarning):\n    warnings.warn('old')",
    "with pytest.warns(UserWarning, match='old'):\n    warnings.warn('old')",
    "with self.assertWarns(DeprecationWarning):\n    warnings.warn('old', DeprecationWarning)",
    "with self.assertLogs('name'):\n    __import__('logging').getLogger('name').error('text')",
    "try:\n    int('x')\nexcept ValueError:\n    pass\nelse:\n    self.fail('no error')",
    "try:\n    int('x')\n    self.fail('no error')\nexcept ValueError:\n    pass",
    "try:\n    int('x')\n    assert False\nexcept ValueError:\n    pass",
    "mock = unittest.mock.Mock()\nmock(4, key='a')\nmock.assert_called_with(4, key='a')",
    "mock = unittest.mock.Mock()\nmock(key='a')\nmock.assert_called_once_with(key='a')",
    "mock = unittest.mock.Mock()\nmock()\nmock.assert_called_once_with()",
    "mock = unittest.mock.Mock()\nmock(1)\nmock.assert_has_calls([unittest.mock.call(1)])",
    "mock = unittest.mock.Mock()\nmock()\nmock.assert_called()",
    "mock = unittest.mock.Mock()\nmock()\nmock.assert_called_once()",
    "mock = unittest.mock.Mock()\nmock.assert_not_called()",
]


LAZY = ("megatron", "sglang", "torch", "transformers")


def run(body: str | bytes, code: object) -> None:
    """Runs the function `test_it` of a file."""
    names: dict[str, Any] = {
        "code": code,
        "math": math,
        "np": np,
        "operator": operator,
        "pytest": pytest,
        "unittest": unittest,
        "warnings": warnings,
    }
    # assertWarns asks every loaded module for an attribute, at which some that other tests have loaded would import others.
    modules = {name: module for name, module in sys.modules.items() if not name.startswith(LAZY)}
    with warnings.catch_warnings(), unittest.mock.patch.dict(sys.modules, modules, clear=True):
        warnings.simplefilter("ignore")
        exec(compile(body, "test_it.py", "exec"), names)
        names["test_it"](unittest.TestCase())


def passes(body: bytes, code: object) -> bool:
    try:
        run(body, code)
    except (Exception, pytest.fail.Exception, GeneratorExit, KeyboardInterrupt, SystemExit):
        return False
    return True


def edited(source: bytes, candidate: Candidate) -> bytes:
    file = read(source)
    assert file is not None
    return file.apply(candidate.edits)


def in_a_test(statement: str) -> bytes:
    # Text inside triple quotes must stay as it is.
    body = statement if '"""' in statement else indent(statement, "    ").lstrip()
    return f"def test_it(self):\n    {body}\n".encode()


def assert_right_code_fails_each(source: bytes, code: object) -> None:
    run(source, code)
    found = [candidate for seed in range(8) for candidate in candidates(source, random.Random(seed))]
    assert found
    for candidate in found:
        assert candidate.tests == ("test_it",)
        assert not passes(edited(source, candidate), code), candidate


@pytest.mark.parametrize(
    ("code", "assertion"), ASSERTIONS, ids=[assertion[:60] for _, assertion in ASSERTIONS]
)
def test_right_code_fails_every_contradiction_of_an_assertion(code: object, assertion: str) -> None:
    assert_right_code_fails_each(in_a_test(assertion), code)


@pytest.mark.parametrize("statement", RAISING)
def test_right_code_fails_every_contradiction_of_what_it_raises_warns_logs_or_calls(statement: str) -> None:
    assert_right_code_fails_each(in_a_test(statement), None)
