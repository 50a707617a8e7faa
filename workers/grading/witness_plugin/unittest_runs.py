"""Watches what unittest's TextTestRunner runs, and notices if pytest is run in its place."""
# pyright: basic, reportOptionalMemberAccess=false

import os
import sys

from workers.grading.witness_plugin.parts import note_parts
from workers.grading.witness_plugin.run import WatchedRun, start

UNITTEST_OUTCOMES = (("addSuccess", "PASSED"), ("addSkip", "SKIPPED"), ("addExpectedFailure", "XFAIL"))


def unittest_canary_passes():
    unittest = sys.modules.get("unittest")
    if unittest is None:
        return False

    class MustFail(unittest.TestCase):
        def runTest(self):
            self.assertEqual(1, 2)  # noqa: PT009 - the very method may have been replaced

    result = unittest.TestResult()
    MustFail().run(result)
    return not (result.failures or result.errors)


def watch_unittest():
    """Watches whatever TextTestRunner runs. To be called before any test is imported.

    A script whose name suggests unittest may run pytest instead, which then imports this plugin anew.
    """
    del sys.modules[__name__]
    run = start("unittest")
    if run is None:
        return
    import unittest

    note_parts()
    waiting, depth = [run], [0]
    run_tests = unittest.TextTestRunner.run
    adding = [(name, getattr(unittest.TestResult, name), outcome) for name, outcome in UNITTEST_OUTCOMES]

    def observed(self, test):
        if depth[0] or os.getpid() != run.pid:
            return run_tests(self, test)
        depth[0] += 1
        current = waiting.pop() if waiting else WatchedRun("unittest")
        for name, add, outcome in adding:
            setattr(unittest.TestResult, name, noticed(current, add, outcome))
        try:
            result = run_tests(self, test)
        finally:
            depth[0] -= 1
        for case, _ in list(result.failures) + list(result.errors):
            current.outcomes[str(getattr(case, "test_case", case))] = "FAILED"
        current.collected = current.finished = result.testsRun
        current.end(status=0 if result.wasSuccessful() else 1, canary=unittest_canary_passes())
        return result

    def noticed(current, add, outcome):
        def added(self, test, *why):
            current.outcomes[str(test)] = outcome
            if outcome == "SKIPPED":
                current.stop(str(test), sys.exc_info()[1], sys.exc_info()[2])
            return add(self, test, *why)

        return added

    def give_way():
        """Ends a run that has not begun, and reports whose code started another one in its place."""
        paths = _callers()
        if not waiting or not paths or os.getpid() != run.pid:
            return False
        waiting.pop().replaced.update(dict.fromkeys(paths, "the runner"))
        run.end(status=None, canary=None)
        return True

    observed.give_way = give_way
    unittest.TextTestRunner.run = observed
    _notice_skipped_modules(unittest.loader, run)


def _callers():
    """The files of all code on the caller's stack; none if the script itself is not at its bottom."""
    paths, frame, name = set(), sys._getframe(1), ""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        paths.update((frame.f_code.co_filename, str(frame.f_globals.get("__file__", ""))))
        frame = frame.f_back
    return paths if name == "__main__" else set()


def takes_over():
    """Whether this process was waiting for a unittest run, which now gives way to pytest."""
    runner = getattr(sys.modules.get("unittest"), "TextTestRunner", None)
    return getattr(getattr(runner, "run", None), "give_way", bool)()


def _notice_skipped_modules(loader, run, function="_make_skipped_test"):
    make = getattr(loader, function, None)
    if make is None:
        return

    def skipped(name, error, *how):
        run.stop(name, error, error.__traceback__)
        return make(name, error, *how)

    setattr(loader, function, skipped)
