"""Watches the runs of unittest's TextTestRunner, and notices if pytest runs in its place."""
# pyright: basic, reportOptionalMemberAccess=false

import io
import os
import sys
import time

from workers.grading.defence.witness_plugin.failing import FailingFile
from workers.grading.defence.witness_plugin.parts import note_parts, shadowed
from workers.grading.defence.witness_plugin.run import WatchedRun, quietly, start

UNITTEST_OUTCOMES = {
    "addSuccess": "PASSED",
    "addSkip": "SKIPPED",
    "addExpectedFailure": "XFAIL",
    "addFailure": "FAILED",
    "addError": "FAILED",
    "addUnexpectedSuccess": "FAILED",  # unittest counts it as a failure
}
NEWEST_S = 1.0  # CPU time after which no more of the plugin's own tests, which must fail, are started


def watch_unittest():
    """Watches all runs of TextTestRunner. Call it before any test is imported.

    A script whose name suggests unittest may run pytest instead, which then imports this plugin again.
    """
    del sys.modules[__name__]
    run = start("unittest")
    if run is None:
        return
    import unittest

    waiting, depth = [run], [0]
    run_tests = unittest.TextTestRunner.run

    def observed(self, test):
        if depth[0] or os.getpid() != run.pid:
            return run_tests(self, test)
        current = waiting.pop() if waiting else WatchedRun("unittest")
        results = _Results(self, current)
        depth[0] += 1
        try:
            result = run_tests(self, test)
        finally:
            depth[0] -= 1
            results.let_go()
        results.close(result)
        current.end(0 if result.wasSuccessful() else 1)
        return result

    def give_way():
        """Ends a run that has not begun, and reports whose code started another one instead."""
        paths = _callers()
        if not waiting or not paths or os.getpid() != run.pid:
            return False
        waiting.pop()
        for path in paths:
            run.replace("the runner, by " + os.path.basename(path), (path,))
        run.end(None)
        return True

    observed.give_way = give_way
    unittest.TextTestRunner.run = observed
    _notice_skipped_modules(unittest.loader, run)
    note_parts()


class _Results:
    """Notices the outcome of each test when the result object of a runner gets it."""

    def __init__(self, runner, run):
        self.runner = runner
        self.run = run
        self.make = runner._makeResult
        runner._makeResult = self.made

    def let_go(self):
        self.runner.__dict__.pop("_makeResult", None)

    def made(self):
        result = self.make()
        try:
            for name in [name for name in UNITTEST_OUTCOMES if hasattr(type(result), name)]:
                setattr(result, name, self._noticed(result, name))
            if hasattr(type(result), "addSubTest"):
                result.addSubTest = self._noticed_subtest(result)
        except AttributeError:  # the object does not allow new attributes
            pass
        return result

    def _noticed(self, result, name):
        def added(test, *why, **more):
            self._note(test, UNITTEST_OUTCOMES[name])
            if name == "addSkip":
                self.run.stop(str(test), sys.exc_info()[1], sys.exc_info()[2])
            return getattr(type(result), name)(result, test, *why, **more)

        added.of_witness = True
        return added

    def _noticed_subtest(self, result):
        def added(test, subtest, error):
            if error is not None:
                self._note(test, "FAILED")
            return type(result).addSubTest(result, test, subtest, error)

        added.of_witness = True
        return added

    def _note(self, test, outcome):
        name = str(test)
        if self.run.outcomes.get(name) not in ("FAILED", "ERROR"):
            self.run.outcomes[name] = outcome

    def close(self, result):
        """The complete result, with tests that it got in other ways, and the replacements of its methods."""
        for case, _ in list(result.failures) + list(result.errors):
            self._note(getattr(case, "test_case", case), "FAILED")
        self.run.collected = self.run.finished = result.testsRun
        quietly(self.run.compare_parts)
        own = [key for key, part in list(vars(result).items()) if hasattr(part, "of_witness")]
        for part, paths in shadowed(result, own):
            self.run.replace(part, paths)
        loader = getattr(sys.modules.get("unittest"), "defaultTestLoader", None)
        for part, paths in shadowed(loader):
            self.run.replace(part, paths)
        quietly(try_unittest, self.run, loader, self._silent_result)

    def _silent_result(self):
        stream, decorated = self.runner.stream, type(self.runner.stream)
        self.runner.stream = decorated(io.StringIO())
        try:
            return self.make()
        finally:
            self.runner.stream = stream


def try_unittest(run, loader, make_result):
    """Makes the loader load a file of failing tests, runs it with another result of the same class, and records which did not fail."""
    failing = FailingFile(cases=True)
    patterns, loader.testNamePatterns = getattr(loader, "testNamePatterns", None), None
    try:
        with failing.written() as path:
            sys.path.insert(0, os.path.dirname(path))
            suite = loader.loadTestsFromName(failing.name[: -len(".py")])
            before = time.process_time()
            for test in _cases(suite):
                result, way = make_result(), failing.ways.get(getattr(test, "_testMethodName", None))
                loader.suiteClass([test]).run(result)
                run.ways += [way] if way else []
                run.unfailing += [way] if way and result.wasSuccessful() else []
                if time.process_time() - before > NEWEST_S:
                    break
    finally:
        loader.testNamePatterns = patterns


def _cases(suite):
    for test in list(suite):
        if hasattr(test, "__iter__"):
            yield from _cases(test)
        else:
            yield test


def _callers():
    """The files of all code on the caller's stack; none if the script itself is not at its bottom."""
    paths, frame, name = set(), sys._getframe(1), ""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        paths.update((frame.f_code.co_filename, str(frame.f_globals.get("__file__", ""))))
        frame = frame.f_back
    paths -= {__file__, __name__, ""}  # this code and its file have different names in each container
    return paths if name == "__main__" else set()


def takes_over():
    """Whether this process was waiting for a unittest run, which pytest now takes over."""
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
