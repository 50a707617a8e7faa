"""A file of tests each of which must fail, in its own way. The runner's results for them show whether tests can still fail.

The file and its tests have ordinary names, drawn by chance, so that code under test cannot distinguish them from others.
"""
# pyright: basic, reportOptionalMemberAccess=false

import binascii
import contextlib
import linecache
import os
import sys

# One string is shorter to send into a container than a tuple of words.
WORDS = (
    "acorn amber anchor apple arrow autumn barrel basket bell birch bottle bridge bucket button cable candle canyon carpet castle"
    " cedar chain cherry circle cloud cobalt copper coral corner cotton crane crystal delta desert dolphin eagle ember engine"
    " feather fern field filter flower forest garden ginger glacier grain granite hammer harbor hazel honey island ivory jacket"
    " jungle kettle ladder lantern lemon linen lizard magnet maple marble meadow mirror mountain needle nickel ocean olive orange"
    " orchid paper pebble pepper pillow planet pocket prairie puzzle quartz rabbit rainbow ribbon river rocket saddle sail salmon"
    " shadow shelter silver spider spring squirrel station stone summer table temple thunder tiger timber tulip tunnel turtle"
    " valley velvet violet walnut water willow window winter yellow zebra"
)

# Ways in which a pytest test may fail, with source lines that make it fail in this way.
PYTEST_WAYS = (
    ("assert", "assert 3 == 4"),
    ("assert of a truth value", "assert []"),
    ("assert of a member", "assert 3 in [4]"),
    ("an exception", "raise LookupError('no such thing')"),
    ("pytest.fail", "pytest.fail('no')"),
    ("pytest.raises, nothing raised", "with pytest.raises(ValueError):\n    int('3')"),
    ("pytest.raises, another exception", "with pytest.raises(KeyError):\n    int('x')"),
    ("pytest.raises, another message", "with pytest.raises(ValueError, match='no such text'):\n    int('x')"),
    ("pytest.approx", "assert 3.0 == pytest.approx(4.0)"),
    ("pytest.warns", "with pytest.warns(UserWarning):\n    pass"),
)
# Methods of unittest.TestCase and the arguments under which each fails. assertWarns is left out, because it asks every module for
# an attribute and so loads the modules that are loaded on demand.
ASSERTIONS = (
    ("assertEqual", "3, 4"),
    ("assertNotEqual", "3, 3"),
    ("assertTrue", "False"),
    ("assertFalse", "True"),
    ("assertIs", "[], []"),
    ("assertIsNot", "None, None"),
    ("assertIsNone", "3"),
    ("assertIsNotNone", "None"),
    ("assertIn", "3, [4]"),
    ("assertNotIn", "3, [3]"),
    ("assertIsInstance", "3, str"),
    ("assertNotIsInstance", "3, int"),
    ("assertIsSubclass", "int, str"),
    ("assertNotIsSubclass", "int, int"),
    ("assertHasAttr", "3, 'text'"),
    ("assertNotHasAttr", "3, 'real'"),
    ("assertAlmostEqual", "3.0, 4.0"),
    ("assertNotAlmostEqual", "3.0, 3.0"),
    ("assertGreater", "3, 4"),
    ("assertGreaterEqual", "3, 4"),
    ("assertLess", "4, 3"),
    ("assertLessEqual", "4, 3"),
    ("assertRegex", "'abc', 'x'"),
    ("assertNotRegex", "'abc', 'b'"),
    ("assertStartsWith", "'abc', 'b'"),
    ("assertNotStartsWith", "'abc', 'a'"),
    ("assertEndsWith", "'abc', 'b'"),
    ("assertNotEndsWith", "'abc', 'c'"),
    ("assertCountEqual", "[3], [4]"),
    ("assertMultiLineEqual", "'abc', 'b'"),
    ("assertSequenceEqual", "[3], [4]"),
    ("assertListEqual", "[3], [4]"),
    ("assertTupleEqual", "(3,), (4,)"),
    ("assertSetEqual", "{3}, {4}"),
    ("assertDictEqual", "{3: 4}, {4: 3}"),
    ("assertRaises", "KeyError, int, '3'"),
    ("assertRaisesRegex", "ValueError, 'no such text', int, 'x'"),
    ("fail", ""),
)
UNITTEST_WAYS = (
    ("assert under unittest", "assert 3 == 4"),
    ("an exception under unittest", "raise LookupError('no such thing')"),
    ("assertRaises, another exception", "with self.assertRaises(KeyError):\n    int('x')"),
    ("assertRaises as a context", "with self.assertRaises(KeyError):\n    int('3')"),
)


def _word():
    words = WORDS.split()
    return words[int.from_bytes(os.urandom(4), "big") % len(words)]


class FailingFile:
    """The text of such a file. `ways` contains the kind of failure by the name of the test. `cases` says whether there are unittest tests,
    and `functions` whether there are others, whose names must match `pattern`.
    """

    def __init__(self, functions=False, cases=False, pattern="test", file_pattern="test*.py"):
        self.ways = {}
        self.name = _matching(file_pattern if file_pattern.endswith("*.py") else "test*.py", "test*.py")
        lines = ["import pytest" if functions else "", "import unittest" if cases else ""]
        for way, body in PYTEST_WAYS if functions else ():
            lines += _test(self._named(way, pattern), "", body)
        if cases:
            lines += ["class Test" + _word().capitalize() + "(unittest.TestCase):"]
            for way, body in UNITTEST_WAYS + tuple(_assertions()):
                lines += _test(self._named(way, "test"), "self", body, "    ")
        self.text = "\n".join(lines) + "\n"

    def _named(self, way, pattern):
        name = _matching(pattern, "test")
        while name in self.ways:
            name += "_" + _word()
        self.ways[name] = way
        return name

    @contextlib.contextmanager
    def written(self):
        """Writes the file to a new folder and yields its path. Afterwards the file and its module are removed completely."""
        folder = _new_folder()
        path = os.path.join(folder, self.name)
        module, known_paths, without_cache = self.name[: -len(".py")], list(sys.path), sys.dont_write_bytecode
        sys.dont_write_bytecode = True
        try:
            with open(path, "w") as file:
                file.write(self.text)
            yield path
        finally:
            sys.dont_write_bytecode = without_cache
            sys.path[:] = known_paths
            sys.modules.pop(module, None)
            sys.path_importer_cache.pop(folder, None)
            linecache.cache.pop(path, None)
            os.unlink(path)
            os.rmdir(folder)


def _new_folder():
    """A new folder among the temporary files. Importing Python's tempfile takes longer than all the rest of a run."""
    places = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    for place in [place for place in (*places, "/tmp", "/var/tmp", "/usr/tmp", ".") if place]:
        folder = os.path.join(os.path.realpath(place), _word() + binascii.hexlify(os.urandom(4)).decode())
        try:
            os.mkdir(folder, 0o700)
        except OSError:
            continue
        return folder
    raise OSError("no place for temporary files")


def _assertions():
    case = sys.modules["unittest"].TestCase
    return [
        ("TestCase." + name, "self." + name + "(" + arguments + ")")
        for name, arguments in ASSERTIONS
        if hasattr(case, name)
    ]


def _test(name, parameters, body, margin=""):
    lines = ["    " + line for line in body.split("\n")]
    return [margin + line for line in ["def " + name + "(" + parameters + "):", *lines]]


def _matching(pattern, default):
    """A name that a pattern of pytest's settings selects: it begins with the pattern, or fills the gaps at each `*`."""
    if not pattern.replace("*", "").replace("_", "").replace(".py", "").isalnum():
        pattern = default
    before, _, after = pattern.partition("*")
    return before + ("_" if before.strip("_") == before != "" else "") + _word() + after.replace("*", "")
