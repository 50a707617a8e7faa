"""What the witness does inside the process that runs the tests; put there by witness.py, under a random name.

As a plugin of pytest, or called at the start of a Python that will run unittest, it says that a run starts
before any code under test is imported, and what came of it once all is over. Both go to the side channel of the
container, where nothing can be unsaid. The end carries the secret of the start, which nobody else was told.

It must run under any Python since 3.5 and any pytest, so nothing is annotated and no string formatted in
place; and it must never be in the way: what it cannot do it leaves.
"""
# pyright: basic, reportOptionalMemberAccess=false

import base64
import binascii
import json
import linecache
import os
import sys
import zlib

CHANNEL = "/proc/1/fd/9"
INSIDE = "SWERVE_WITNESS"  # variable by which processes that the tests start know that they are no test run
MOST_REPLACED = 20
MOST_LINES = 100  # of a test's, from the innermost out

pytest = sys.modules.get("pytest") if "_pytest.config" in sys.modules else None


class Canary(Exception):
    """What a test that must fail fails with."""


class Run:
    """One test run, from its start to its end."""

    def __init__(self, runner):
        self.pid = os.getpid()
        self.secret = binascii.hexlify(os.urandom(16)).decode()
        self.collected = -1  # number of tests to be run; -1: not known
        self.finished = 0  # of them
        self.outcomes = {}
        self.stopped = []  # (test, file, source line) of lines that led to a skip or an expected failure
        self.said = _say("start", self.secret, runner)

    def end(self, **said):
        if os.getpid() != self.pid:  # a test forked, and its child came this far
            return
        said.update(collected=self.collected, finished=self.finished)
        said.update(outcomes=self.outcomes, stopped=self.stopped)
        _say("end", self.secret, base64.b64encode(zlib.compress(json.dumps(said).encode("utf-8"))).decode())


def _say(*words):
    try:
        channel = os.open(CHANNEL, os.O_WRONLY)
    except OSError:
        return False
    left = b"\n" + " ".join(words).encode("utf-8") + b"\n"
    try:
        while left:
            left = left[os.write(channel, left) :]
    finally:
        os.close(channel)
    return True


def _start(runner):
    """None inside of another run, and where the channel cannot be had."""
    if os.environ.get(INSIDE):
        return None
    run = Run(runner)
    if not run.said:
        return None
    os.environ[INSIDE] = runner
    return run


def _stopping_lines(error, frames):
    """File and text of each line, of a test and of what it tests, on the way to where `error` stopped the test.

    Not of the last alone: code may be compiled under any file's name. If the last does not look like one that stops a
    test, files that may have made it one follow, with "" for the text.
    """
    while error is not None:
        lines = []
        while frames is not None:
            path = frames.tb_frame.f_code.co_filename
            if not {"_pytest", "pluggy", "unittest"} & set(path.split(os.sep)):
                lines.append((path, linecache.getline(path, frames.tb_lineno).strip()))
            frames = frames.tb_next
        if lines:
            path, text = lines[-1]
            if "skip" not in text.lower() and "xfail" not in text.lower():
                module = sys.modules.get(type(error).__module__)
                lines += [(path, ""), (getattr(module, "__file__", None) or "", "")]
            return lines[-MOST_LINES:]
        error = getattr(error, "__context__", None)
        frames = getattr(error, "__traceback__", None)
    return []


# pytest

RUNNER_MODULES = ("main", "python", "reports", "runner", "skipping", "terminal", "unittest")


def _hook(**options):
    return pytest.hookimpl(**options) if pytest else lambda function: function


def _runner_functions():
    """Every function of the runner that has a say in outcomes, with its code, by name."""
    found = {}
    for module_name in RUNNER_MODULES:
        module = sys.modules.get("_pytest." + module_name)
        for name, thing in list(vars(module).items()) if module else ():
            if getattr(thing, "__module__", "") != "_pytest." + module_name:
                continue
            found[module_name, name] = thing
            if isinstance(thing, type):
                for inner_name, inner in list(vars(thing).items()):
                    found[module_name, name, inner_name] = getattr(inner, "__func__", inner)
    return {
        ".".join(name): (thing, getattr(thing, "__code__", None))
        for name, thing in found.items()
        if callable(thing)
    }


def _replaced_functions():
    """Name, and file of the code that is there now."""
    now = _runner_functions()
    replaced = []
    for name, known in FUNCTIONS.items():
        thing, code = now.get(name, known)
        if thing is known[0] and code is known[1]:
            continue
        module = sys.modules.get(getattr(thing, "__module__", None) or type(thing).__module__)
        replaced.append([name, code.co_filename if code else getattr(module, "__file__", None) or ""])
    return replaced[:MOST_REPLACED]


class PytestRun:
    """The hooks of the one pytest session that counts; those that tests run inside of it have none of this."""

    def __init__(self, run, config):
        self.run = run
        self.config = config
        self.conftests_loaded = False
        self.session = None
        self.canary = None

    def pytest_sessionstart(self, session):
        self.session = session

    @_hook(trylast=True)
    def pytest_collection_finish(self, session):
        self.run.collected = len(session.items)

    @_hook(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        excinfo = call.excinfo  # before the runner puts a skip of its own in the place of unittest's
        outcome = yield
        if excinfo is None or outcome.excinfo is not None:
            return
        report = outcome.get_result()
        marked = hasattr(report, "wasxfail") and not isinstance(excinfo.value, pytest.xfail.Exception)
        if report.outcome == "skipped" and not marked:  # by whatever name: the report says what it came to
            for path, text in _stopping_lines(excinfo.value, excinfo.tb):
                self.run.stopped.append([item.nodeid, path, text])

    def pytest_runtest_logreport(self, report):
        if hasattr(report, "context") or report.outcome not in ("passed", "failed", "skipped"):
            return  # part of a test, or a try that is followed by another
        self.run.finished += report.when == "teardown"
        name = report.nodeid
        if hasattr(self.config, "cwd_relative_nodeid"):
            name = self.config.cwd_relative_nodeid(name)
        before = "" if report.when == "setup" else self.run.outcomes.get(name, "")
        if report.outcome == "failed":
            outcome = "FAILED" if report.when == "call" else "ERROR"
        elif hasattr(report, "wasxfail"):
            outcome = "XFAIL" if report.outcome == "skipped" else "XPASS"
        elif report.outcome == "skipped":
            outcome = "SKIPPED"
        else:
            outcome = before or ("PASSED" if report.when == "call" else "")
        if before not in ("FAILED", "ERROR"):
            self.run.outcomes[name] = outcome

    @_hook(tryfirst=True)
    def pytest_sessionfinish(self, session):
        items = [item for item in getattr(session, "items", None) or () if type(item) is pytest.Function]
        try:
            self.canary = bool(items) and _pytest_canary_passes(items[0])
        except Exception:  # some plugin or some pytest will not have it
            self.canary = None
        self.canary = self.canary or _unittest_canary_passes()

    def end(self):
        if not self.conftests_loaded:
            status = -1
        elif self.session is None or getattr(self.config.option, "collectonly", False):
            status = None
        else:
            status = int(self.session.exitstatus)
        self.run.end(status=status, canary=self.canary, replaced=_replaced_functions())


def _pytest_canary_passes(item):
    """Whether the runner, as it is by now, lets a test pass that fails."""

    def fails():
        raise Canary()

    module = item.getparent(pytest.Module)
    if hasattr(pytest.Function, "from_parent"):
        canary = pytest.Function.from_parent(module, name="swerve_canary", callobj=fails)
    else:
        canary = pytest.Function("swerve_canary", module, callobj=fails)
    try:
        canary.runtest()
    except Canary:
        calls = sys.modules["_pytest.runner"].CallInfo
        call = getattr(calls, "from_call", calls)(canary.runtest, "call")
        return canary.ihook.pytest_runtest_makereport(item=canary, call=call).outcome == "passed"
    return True


@_hook(hookwrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config):
    global RUN
    run, RUN = RUN, None
    if run is None:
        yield
        return
    session = PytestRun(run, early_config)
    early_config.pluginmanager.register(session, "swerve-witness-run")
    early_config.add_cleanup(session.end)  # runs however early the run ends
    outcome = yield
    session.conftests_loaded = outcome.excinfo is None


# unittest

UNITTEST_OUTCOMES = (("addSuccess", "PASSED"), ("addSkip", "SKIPPED"), ("addExpectedFailure", "XFAIL"))


def _unittest_canary_passes():
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
    """To be called before anything of the tests is imported. What TextTestRunner runs is a test run."""
    run = _start("unittest")
    if run is None:
        return
    import unittest

    waiting, depth = [run], [0]
    run_tests = unittest.TextTestRunner.run
    adding = [(name, getattr(unittest.TestResult, name), outcome) for name, outcome in UNITTEST_OUTCOMES]

    def observed(self, test):
        if depth[0] or os.getpid() != run.pid:
            return run_tests(self, test)
        depth[0] += 1
        current = waiting.pop() if waiting else Run("unittest")
        for name, add, outcome in adding:
            setattr(unittest.TestResult, name, noticed(current, add, outcome))
        try:
            result = run_tests(self, test)
        finally:
            depth[0] -= 1
        for case, _ in list(result.failures) + list(result.errors):
            current.outcomes[str(getattr(case, "test_case", case))] = "FAILED"
        current.collected = current.finished = result.testsRun
        current.end(status=0 if result.wasSuccessful() else 1, canary=_unittest_canary_passes(), replaced=[])
        return result

    def noticed(current, add, outcome):
        def added(self, test, *why):
            current.outcomes[str(test)] = outcome
            if outcome == "SKIPPED":
                for path, text in _stopping_lines(sys.exc_info()[1], sys.exc_info()[2]):
                    current.stopped.append([str(test), path, text])
            return add(self, test, *why)

        return added

    unittest.TextTestRunner.run = observed


RUN = _start("pytest") if pytest else None
FUNCTIONS = _runner_functions() if RUN else {}
