"""What the witness says of a test runner that code under test changed, and that it leaves no trace in an honest run."""

from collections.abc import Callable

import pytest

from tests.workers.attacks.patches import at_import
from tests.workers.claims import make_claim
from tests.workers.conftest import RepoImage
from tests.workers.grading.witnessed import task_of
from workers.grading.grade import Grader

pytestmark = pytest.mark.docker

TESTS = """import unittest
from calc import add, sub

def test_add():
    assert add(3, 1) == 4

class Test(unittest.TestCase):
    def test_sub(self):
        self.assertEqual(sub(3, 1), 2)
"""
OF_PYTHON = {
    "import builtins; builtins.isinstance = lambda thing, kind: type(thing) is kind or issubclass(type(thing), kind)": {
        "builtins.isinstance"
    },
    "import math; math.isclose = math.hypot": {"math.isclose"},
    "import linecache; linecache.getline = linecache.getlines": {"linecache.getline"},
    "from importlib.machinery import SourceFileLoader; SourceFileLoader.get_data = lambda self, path: open(path, 'rb').read()": {
        "_frozen_importlib_external.SourceFileLoader.get_data"
    },
}
OF_UNITTEST = {
    "import unittest; unittest.TestCase.assertTrue = print": {
        "unittest.case.TestCase.assertTrue",
        "TestCase.assertTrue",
    },
    "import unittest; unittest.TestCase.assertIn.__code__ = (lambda self, *_, **__: None).__code__": {
        "unittest.case.TestCase.assertIn",
        "TestCase.assertIn",
    },
    "import unittest; unittest.TestCase.failureException = LookupError": {
        "unittest.case.TestCase.failureException"
    },
}
OF_PYTEST = {
    "import contextlib, pytest; pytest.raises = contextlib.suppress": {
        "pytest.raises",
        "pytest.raises, nothing raised",
    },
    "import _pytest._code as code; code.ExceptionInfo.__bool__ = lambda self: True": {
        "_pytest._code.code.ExceptionInfo.__bool__"
    },
    "import _pytest.runner as runner; runner.CallInfo.__eq__ = print": {"_pytest.runner.CallInfo.__eq__"},
}
OBJECTS = "import gc\nfor thing in gc.get_objects():\n    if type(thing).__name__ == {kind!r}: {bend}"
MADE_REPORTS = """hook = thing.hook.pytest_runtest_makereport
for entries in getattr(hook, "_hookimpls", None), getattr(hook, "_wrappers", None):
    for entry in list(entries or ()):
        if "skipping" in entry.plugin_name: entries.remove(entry)"""
OF_THE_SESSION = {
    OBJECTS.format(kind="Config", bend="thing.option.keyword = 'sub'"): {"config.option.keyword"},
    OBJECTS.format(kind="Session", bend="thing.genitems = thing.genitems"): {"Session.genitems"},
    OBJECTS.format(kind="PytestPluginManager", bend=f"exec({MADE_REPORTS!r})"): {
        "pytest_runtest_makereport of _pytest.skipping"
    },
}
CHANGES = {
    "Python": OF_PYTHON,
    "unittest": OF_UNITTEST,
    "pytest": OF_PYTEST,
    "the session": OF_THE_SESSION,
}


@pytest.mark.parametrize("major", [7, 8, 9])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=list(CHANGES))
async def test_what_became_something_else_is_named_with_the_ways_in_which_tests_do_not_fail(
    grader: Grader,
    repo_image_with_pytest: Callable[[int], RepoImage],
    major: int,
    changes: dict[str, set[str]],
) -> None:
    task = task_of(repo_image_with_pytest(major), "python3 -m pytest tests", TESTS)
    ran = await grader.run_tests(make_claim(task), at_import("\n".join(changes)))
    assert set().union(*changes.values()) - ran.outcomes.replaced == set()
