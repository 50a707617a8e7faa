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
import functools
import json
import linecache
import os
import sys
import types
import zlib

CHANNEL = "/proc/1/fd/9"
INSIDE = "SWERVE_WITNESS"  # variable by which processes that the tests start know that they are no test run
MOST_LINES = 100  # of a test's, from the innermost out

pytest = sys.modules.get("pytest") if "_pytest.config" in sys.modules else None


class Canary(Exception):
    """What a test that must fail fails with."""


class Run:
    """One test run, from its start to its end."""

    def __init__(self, runner):
        self.pid = os.getpid()
        self.secret = binascii.hexlify(os.urandom(16)).decode()
        self.started_at = _file_clock()
        self.collected = -1  # number of tests to be run; -1: not known
        self.finished = 0  # of them
        self.outcomes = {}
        self.stopped = []  # (test, file, source line) of lines that led to a skip or an expected failure
        self.replaced = {}  # by file of what stands in for a part of the runner: that part, or one of them
        self.rewritten = []  # files of tests that were written when the run had started
        self.said = _say("start", self.secret, runner)

    def stop(self, test, error, frames):
        for path, text in _stopping_lines(error, frames):
            self.stopped.append([test, path, text])

    def wrote(self, path):
        """Whether the file has changed since the start."""
        try:
            return os.stat(path).st_ctime > self.started_at
        except OSError:
            return False

    def end(self, **said):
        if os.getpid() != self.pid:  # a test forked, and its child came this far
            return
        if AssertionError is not ASSERTION_ERROR and AssertionError.__module__ != REINTERPRETING:
            self.replaced["<string>"] = "AssertionError"
        for part, path in _replaced_parts():
            self.replaced["<string>" if self.wrote(path) else path] = part
        said.update(collected=self.collected, finished=self.finished, outcomes=self.outcomes)
        said.update(stopped=self.stopped, rewritten=self.rewritten)
        said.update(replaced=[[part, path] for path, part in self.replaced.items()])
        _say("end", self.secret, base64.b64encode(zlib.compress(json.dumps(said).encode("utf-8"))).decode())


def _file_clock():
    """Seconds since 1970 by the clock that files are dated by, whatever the process takes for the time."""
    read, write = os.pipe()
    try:
        return os.fstat(read).st_ctime
    finally:
        os.close(read)
        os.close(write)


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
            if not _of_runner(path) and not path.startswith("<frozen "):
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


# What the runner is made of

RUNNERS = ("_pytest", "pluggy", "pytest", "unittest")
WITH_CODE = (types.FunctionType, type, property, staticmethod, classmethod, functools.partial)
ASSERTION_ERROR = AssertionError
LIBRARY = os.path.dirname(os.__file__) + os.sep
REINTERPRETING = "_pytest.assertion.reinterpret"  # where a pytest of old has an AssertionError of its own
PARTS = {}  # what the runner is made of at the start: part and its code, by id of its holder and name


def _of_runner(path):
    folders = [folder for name in RUNNERS for folder in getattr(sys.modules.get(name), "__path__", ())]
    return path.startswith(tuple(folder + os.sep for folder in folders))


def _holders():
    """Name, and module or class, of all that the runner's parts are in."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in RUNNERS or not isinstance(module, types.ModuleType):
            continue
        yield name, module
        for thing in list(vars(module).values()):
            if isinstance(thing, type) and thing.__module__ == name:
                yield name + "." + thing.__name__, thing


def _note_parts():
    for _, holder in _holders():
        parts = {name: (part, _code(part)) for name, part in list(vars(holder).items())}
        PARTS[id(holder)] = (holder, parts)  # which keeps it, and its id, in use


def _replaced_parts():
    """Name of each part that is another one by now, and the file of what is there in its stead. Of a module of
    unittest's that came later: of each function that is not Python's own.
    """
    replaced = []
    for holder_name, holder in _holders():
        known = PARTS.get(id(holder), (None, None))[1]
        for name, part in list(vars(holder).items()):
            if known is None:
                files = _foreign_files(part) if holder_name.startswith("unittest") else ()
            elif name in known:
                old, old_code = known[name]
                changed = part is not old or _code(part) is not old_code
                files = _files(part) if changed and isinstance(old, WITH_CODE) else ()
            else:
                files = _files(part) if isinstance(holder, type) and hasattr(type(part), "__set__") else ()
            replaced += [(holder_name + "." + name, path) for path in files]
    return replaced


def _function(part):
    if isinstance(part, property):
        part = part.fget
    if isinstance(part, (staticmethod, classmethod, types.MethodType)):
        part = part.__func__
    if isinstance(part, functools.partial):
        part = part.func
    return part if isinstance(part, types.FunctionType) else None


def _code(part):
    return getattr(_function(part), "__code__", None)


def _files(part):
    """Where the code of `part` is from, as it says itself and as the module does that it was compiled in."""
    function = _function(part)
    if function is not None:
        return {function.__code__.co_filename, str(function.__globals__.get("__file__", ""))}
    module = sys.modules.get(getattr(part, "__module__", None) or type(part).__module__)
    return {getattr(module, "__file__", None) or ""}


def _foreign_files(part):
    function = _function(part)
    files = _files(part) if function is not None else ()
    return [path for path in files if not path.startswith(("<", LIBRARY))]


# pytest

# On the stack below whatever the tests' code does in a session.
SESSION_FUNCTIONS = {"pytest_make_collect_report", "perform_collect", "pytest_runtestloop", "wrap_session"}


def _hook(**options):
    return pytest.hookimpl(**options) if pytest else lambda function: function


class PytestRun:
    """The hooks of the one pytest session that counts; those that tests run inside of it have none of this."""

    def __init__(self, run, config):
        self.run = run
        self.config = config
        self.conftests_loaded = False
        self.session = None
        self.trace = None
        self.canary = None

    def pytest_sessionstart(self, session):
        self.session = session
        self.trace = sys.gettrace()

    def pytest_plugin_registered(self):
        """Tests' code that makes plugins of its own could choose with them which tests are run."""
        frame = sys._getframe(1) if self.session else None
        while frame is not None and frame.f_code.co_name not in SESSION_FUNCTIONS:
            if not _of_runner(frame.f_code.co_filename):
                self.run.replaced[frame.f_code.co_filename] = "the plugins"
                return
            frame = frame.f_back

    @_hook(hookwrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector):
        path = str(getattr(collector, "path", None) or getattr(collector, "fspath", ""))
        is_file = isinstance(collector, pytest.Module) and not isinstance(
            collector, getattr(pytest, "Package", ())
        )
        if is_file and self.run.wrote(path):
            self.run.rewritten.append(path)
        outcome = yield
        module = getattr(collector, "_obj", None) if is_file else None
        if isinstance(module, types.ModuleType):
            origin = getattr(getattr(module, "__spec__", None), "origin", None) or "<string>"
            if os.path.realpath(origin) != os.path.realpath(path):
                self.run.replaced[origin] = collector.nodeid
        report = outcome.get_result() if outcome.excinfo is None else None
        excinfo = getattr(getattr(report, "call", None), "excinfo", None)
        if excinfo is not None and report.outcome == "skipped":
            self.run.stop(collector.nodeid, excinfo.value, excinfo.tb)

    def pytest_collectreport(self, report):
        if report.outcome != "passed":
            self.run.outcomes[self._name(report)] = "ERROR" if report.outcome == "failed" else "SKIPPED"

    @_hook(trylast=True)
    def pytest_collection_finish(self, session):
        self.run.collected = len(session.items)

    @_hook(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        if sys.gettrace() is not self.trace:  # who follows the lines of a test may also pass over them
            self.run.replaced.update(dict.fromkeys(_files(sys.gettrace()), "sys.settrace"))
        excinfo = call.excinfo  # before the runner puts a skip of its own in the place of unittest's
        outcome = yield
        if excinfo is None or outcome.excinfo is not None:
            return
        report = outcome.get_result()
        marked = hasattr(report, "wasxfail") and not isinstance(excinfo.value, pytest.xfail.Exception)
        if report.outcome == "skipped" and not marked:  # by whatever name: the report says what it came to
            self.run.stop(item.nodeid, excinfo.value, excinfo.tb)

    def pytest_runtest_logreport(self, report):
        if hasattr(report, "context") or report.outcome not in ("passed", "failed", "skipped"):
            return  # part of a test, or a try that is followed by another
        self.run.finished += report.when == "teardown"
        name = self._name(report)
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

    def _name(self, report):
        """As the runner prints it."""
        rename = getattr(self.config, "cwd_relative_nodeid", None)
        return rename(report.nodeid) if rename else report.nodeid

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
        self.run.end(status=status, canary=self.canary)


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
    """To be called before anything of the tests is imported. What TextTestRunner runs is a test run.

    A script whose name speaks for unittest may run pytest instead, which then imports this module anew.
    """
    del sys.modules[__name__]
    run = _start("unittest")
    if run is None:
        return
    import unittest

    _note_parts()
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
        current.end(status=0 if result.wasSuccessful() else 1, canary=_unittest_canary_passes())
        return result

    def noticed(current, add, outcome):
        def added(self, test, *why):
            current.outcomes[str(test)] = outcome
            if outcome == "SKIPPED":
                current.stop(str(test), sys.exc_info()[1], sys.exc_info()[2])
            return add(self, test, *why)

        return added

    def give_way():
        """Ends a run that has not begun, and says whose code made it another one."""
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
    """Files of all code that the caller was called by; none if that is not the script itself, by however many steps."""
    paths, frame, name = set(), sys._getframe(1), ""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        paths.update((frame.f_code.co_filename, str(frame.f_globals.get("__file__", ""))))
        frame = frame.f_back
    return paths if name == "__main__" else set()


def _takes_over():
    """Whether a unittest was waited for in this process that now makes way."""
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


if pytest and _takes_over():
    del os.environ[INSIDE]
RUN = _start("pytest") if pytest else None
if RUN:
    _note_parts()
