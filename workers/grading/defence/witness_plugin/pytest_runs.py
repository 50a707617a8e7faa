"""Watches the only pytest session that counts: its parts, whether its tests can still fail, and its end.

This is the last module: at its end the plugin starts.
"""
# pyright: basic, reportOptionalMemberAccess=false

import contextlib
import os
import sys
import time
import types

from workers.grading.defence.witness_plugin.failing import FailingFile
from workers.grading.defence.witness_plugin.parts import files_of, note_parts, of_runner, shadowed
from workers.grading.defence.witness_plugin.run import INSIDE, quietly, start
from workers.grading.defence.witness_plugin.unittest_runs import NEWEST_S, takes_over

pytest = sys.modules.get("pytest") if "_pytest.config" in sys.modules else None

OWN_CHANGES = "legacypath.py"  # module in which pytest changes itself
# One of these functions is on the stack below all code of the tests in a session.
SESSION_FUNCTIONS = {"pytest_make_collect_report", "perform_collect", "pytest_runtestloop", "wrap_session"}
PLAIN = (str, int, float, bool, type(None), list, tuple, dict, set)
# Options by which pytest may select tests at any time after it has read its command line.
SELECTING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "maxfail", "collectonly")
# Plugins of pytest's own that decide whether a test fails. All others are left out: a failing test that they see would be
# reported, counted, repeated or debugged, and all of them were loaded before any code under test ran.
DECIDING = ("_pytest.assertion", "_pytest.fixtures", "_pytest.main", "_pytest.python", "_pytest.runner")
DECIDING += ("_pytest.skipping", "_pytest.unittest")
SHOWS_SETUP = "setupshow"  # option under which the runner prints what it does for each test
# Attributes in which versions of pluggy keep the hooks' implementations
ENTRIES = ("_hookimpls", "_nonwrappers", "_wrappers")
# Hooks that report about tests. Only the witness gets their calls.
TELLING = (
    "pytest_collectstart",
    "pytest_collectreport",
    "pytest_deselected",
    "pytest_exception_interact",
    "pytest_itemcollected",
    "pytest_runtest_logfinish",
    "pytest_runtest_logreport",
    "pytest_runtest_logstart",
    "pytest_warning_captured",
    "pytest_warning_recorded",
)


class SessionParts:
    """The parts of a session at its start. `option` are the options of the command line alone."""

    def __init__(self, option):
        self.selecting = {name: _trait(getattr(option, name)) for name in SELECTING if hasattr(option, name)}
        self.options = {}
        self.settings = {}
        self.hooks = {}  # caller of each hook, and its entries with their functions
        self.objects = {}

    def note(self, config):
        """Records the parts once the session has started, after plugins have changed the options."""
        manager = config.pluginmanager
        self.options = {name: _trait(value) for name, value in list(vars(config.option).items())}
        self.settings = {name: _trait(value) for name, value in _settings(config)}
        self.objects = _objects(config)
        for name, caller in list(vars(manager.hook).items()):
            if hasattr(caller, "get_hookimpls"):
                entries = [(entry, entry.function) for entry in caller.get_hookimpls()]
                self.hooks[name] = (caller, entries)

    def changed(self, config, session):
        """The name of each part that has changed, and the files of its replacement."""
        option, manager = config.option, config.pluginmanager
        now = {name: _trait(value) for name, value in list(vars(option).items())}
        names = [name for name in self.selecting if now.get(name) != self.selecting[name]]
        names += [name for name in self.options if now.get(name) != self.options[name]]
        found = [("config.option." + name, ()) for name in names]
        settings = dict(_settings(config))
        names = [name for name in self.settings if _trait(settings.get(name)) != self.settings[name]]
        found += [("the setting " + name, ()) for name in names]
        objects = _objects(config)
        names = [name for name in objects if objects[name] is not self.objects.get(name)]
        found += [(name, files_of(objects[name])) for name in names]
        found += self._changed_hooks(manager)
        things = [config, manager, session, *(getattr(session, "items", None) or ())]
        for thing in things:
            found += shadowed(thing)
        return found

    def _changed_hooks(self, manager):
        found = []
        for name, (caller, entries) in self.hooks.items():
            now = getattr(manager.hook, name, None)
            if now is not caller:
                found.append((name, files_of(now)))
                continue
            there = {id(entry) for entry in now.get_hookimpls()}
            known = {id(entry) for entry, _ in entries}
            # A plugin that is switched off is registered as None.
            plugins = [plugin for plugin in manager.get_plugins() if plugin is not None]
            for entry in now.get_hookimpls():
                if id(entry) not in known and not any(entry.plugin is plugin for plugin in plugins):
                    found.append((name + " of nobody", files_of(entry.function)))
            for entry, function in entries:
                owner = _name_of(entry.plugin)
                if entry.function is not function:
                    found.append((name + " of " + owner, files_of(entry.function)))
                elif id(entry) not in there:
                    found.append((name + " of " + owner, ()))
        return found


def _objects(config):
    manager = config.pluginmanager
    found = {"config.hook": config.hook, "config.pluginmanager": manager, "config.option": config.option}
    for name in ("_inner_hookexec", "_hookexec", "hook"):
        if name in vars(manager):
            found["pluginmanager." + name] = vars(manager)[name]
    return found


def _settings(config):
    return list((getattr(config, "_inicache", None) or {}).items())


def _trait(value):
    """The compared property of a value: the content of a plain value, otherwise the identity of the object."""
    return repr(value) if isinstance(value, PLAIN) else id(value)


def _name_of(plugin):
    return getattr(plugin, "__name__", None) or type(plugin).__name__


def try_pytest(run, session, watcher, cases):
    """Records in `run` the kinds of failure that made no test fail. `watcher` is the witness's plugin, which puts the reports of failing
    tests into its `failed`; `cases` says whether the session contains unittest tests.
    """
    config = session.config
    patterns = [_first(config.getini(name)) for name in ("python_functions", "python_files")]
    failing = FailingFile(functions=True, cases=cases, pattern=patterns[0], file_pattern=patterns[1])
    watcher.failed = set()
    with failing.written() as path, _alone(config, watcher), _state_kept(session):
        items = list(_collected(session, path))
        before = time.process_time()
        for number, item in enumerate(items, 1):
            way = failing.ways.get(item.name)
            following = items[number] if number < len(items) else None
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            run.ways += [way] if way else []
            run.unfailing += [way] if way and item.nodeid not in watcher.failed else []
            if time.process_time() - before > NEWEST_S:
                break


def _first(setting):
    return setting[0] if isinstance(setting, (list, tuple)) and setting else ""


def _collected(session, path):
    where = getattr(session, "path", None)
    if where is None:  # pytest before version 7
        where = type(session.fspath)(path)
        start = {"path": where, "parent": session}
    else:
        where = type(where)(path)
        start = {"file_path": where, "parent": session}
    session._initialpaths = frozenset(session._initialpaths) | {where}
    hooks = session.gethookproxy(where)
    session.gethookproxy = lambda path: hooks  # looked up once and not ten times for each test
    for collector in hooks.pytest_collect_file(**start):
        for node in collector if isinstance(collector, (list, tuple)) else [collector]:
            for item in session.genitems(node):
                del item.fixturenames[:]  # fixtures that are used without being named, which may be slow
                item.repr_failure = _shown
                yield item


def _shown(*_):
    """The text in the report of a failing test: without the traceback, which takes as long as all the rest of the test."""
    return "failed"


@contextlib.contextmanager
def _alone(config, watcher):
    """Within the block, only the plugins in DECIDING and the witness get calls of hooks, and only the witness those about reports."""
    kept = []
    for name, caller in list(vars(config.pluginmanager.hook).items()):
        lists = [getattr(caller, attribute, None) for attribute in ENTRIES]
        for entries in [entries for entries in lists if isinstance(entries, list)]:
            kept.append((entries, list(entries)))
            entries[:] = [
                entry
                for entry in entries
                if entry.plugin is watcher or (name not in TELLING and _module(entry.plugin) in DECIDING)
            ]
    try:
        yield
    finally:
        for entries, before in kept:
            entries[:] = before


def _module(plugin):
    return getattr(plugin, "__name__", None) or type(plugin).__module__


@contextlib.contextmanager
def _state_kept(session):
    attributes = dict(vars(session))
    names = ("last_type", "last_value", "last_traceback", "last_exc")
    last = {name: getattr(sys, name) for name in names if hasattr(sys, name)}
    session._setupstate = type(session._setupstate)()
    session.shouldstop = session.shouldfail = False
    options = vars(session.config.option)
    shown = {name: options[name] for name in (SHOWS_SETUP,) if name in options}
    options.update(dict.fromkeys(shown, False))
    try:
        yield
    finally:
        options.update(shown)
        for name in [name for name in vars(session) if name not in attributes]:
            delattr(session, name)
        vars(session).update(attributes)
        for name in names:
            if name in last:
                setattr(sys, name, last[name])
            elif hasattr(sys, name):
                delattr(sys, name)


def _hook(**options):
    return pytest.hookimpl(**options) if pytest else lambda function: function


class PytestSession:
    """The hooks of the only pytest session that counts. Sessions that tests run inside of it do not get them."""

    def __init__(self, run, config):
        self.run = run
        self.config = config
        self.conftests_loaded = False
        self.session = None
        self.trace = self.profile = None
        self.failed = None  # node ids of the plugin's failing tests that did fail; None while the session's own tests run
        self.parts = SessionParts(getattr(config, "known_args_namespace", None))

    @_hook(trylast=True)
    def pytest_sessionstart(self, session):
        self.session = session
        self.trace, self.profile = sys.gettrace(), sys.getprofile()
        quietly(self.parts.note, self.config)

    def pytest_plugin_registered(self):
        """Checks registered plugins: code under test that registers one could choose with it which tests run."""
        frame = sys._getframe(1) if self.session else None
        while frame is not None and frame.f_code.co_name not in SESSION_FUNCTIONS:
            path = frame.f_code.co_filename
            if not of_runner(path):
                self.run.replace("the plugins, by " + os.path.basename(path), (path,))
                return
            frame = frame.f_back

    @_hook(hookwrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector):
        path = str(getattr(collector, "path", None) or getattr(collector, "fspath", ""))
        is_file = isinstance(collector, pytest.Module) and not isinstance(
            collector, getattr(pytest, "Package", ())
        )
        if self.failed is not None:
            yield
            return
        if is_file and self.run.wrote(path):
            self.run.rewritten.append(path)
        outcome = yield
        module = getattr(collector, "_obj", None) if is_file else None
        if isinstance(module, types.ModuleType):
            origin = getattr(getattr(module, "__spec__", None), "origin", None) or "<string>"
            if os.path.realpath(origin) != os.path.realpath(path):
                self.run.replace(collector.nodeid, (origin,))
        report = outcome.get_result() if outcome.excinfo is None else None
        excinfo = getattr(getattr(report, "call", None), "excinfo", None)
        if excinfo is not None and report.outcome == "skipped":
            self.run.stop(collector.nodeid, excinfo.value, excinfo.tb)

    def pytest_collectreport(self, report):
        if report.outcome != "passed" and self.failed is None:
            self.run.outcomes[self._name(report)] = "ERROR" if report.outcome == "failed" else "SKIPPED"

    @_hook(trylast=True)
    def pytest_collection_finish(self, session):
        self.run.collected = len(session.items)

    @_hook(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        if sys.gettrace() is not self.trace:  # a tracer of lines can also skip them
            self.run.replace("sys.settrace", files_of(sys.gettrace()))
        if sys.getprofile() is not self.profile:
            self.run.replace("sys.setprofile", files_of(sys.getprofile()))
        excinfo = call.excinfo  # the exception before the runner replaces unittest's skip with its own
        outcome = yield
        if excinfo is None or outcome.excinfo is not None or self.failed is not None:
            return
        report = outcome.get_result()
        marked = hasattr(report, "wasxfail") and not isinstance(excinfo.value, pytest.xfail.Exception)
        # Any exception class may mean a skip, so the report's outcome decides.
        if report.outcome == "skipped" and not marked:
            self.run.stop(item.nodeid, excinfo.value, excinfo.tb)

    def pytest_runtest_logreport(self, report):
        if self.failed is not None:
            if report.when == "call" and report.outcome == "failed":
                self.failed.add(report.nodeid)
            return
        name = self._name(report)
        if hasattr(report, "context"):  # a subtest, which may fail although its test passes
            if report.outcome == "failed":
                self.run.outcomes[name] = "FAILED"
            return
        if report.outcome not in ("passed", "failed", "skipped"):  # a try that the runner repeats
            return
        self.run.finished += report.when == "teardown"
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
        """The test's name as the runner prints it."""
        rename = getattr(self.config, "cwd_relative_nodeid", None)
        return rename(report.nodeid) if rename else report.nodeid

    @_hook(tryfirst=True)
    def pytest_sessionfinish(self, session):
        quietly(self.run.compare_parts)
        for part, paths in quietly(self.parts.changed, self.config, session) or ():
            self.run.replace(part, paths)
        items = [item for item in getattr(session, "items", None) or () if isinstance(item, pytest.Function)]
        if not items:
            return
        case = getattr(sys.modules.get("_pytest.unittest"), "TestCaseFunction", ())
        cases = any(isinstance(item, case) for item in items)
        quietly(try_pytest, self.run, session, self, cases)

    def end(self):
        if not self.conftests_loaded:
            status = -1
        elif self.session is None or getattr(self.config.option, "collectonly", False):
            status = None
        else:
            status = int(self.session.exitstatus)
        self.run.end(status)


class BeforeConftests:
    """Compares the parts of the runner once every installed plugin is loaded, and records them again."""

    def __init__(self, run):
        self.run = run

    # This runs neither first nor last: pytest's own changes to itself come before it, and conftest.py files after it.
    def pytest_load_initial_conftests(self):
        quietly(self.run.compare_parts, True, OWN_CHANGES)
        quietly(note_parts)


def pytest_plugin_registered(plugin, manager):
    if RUN is not None and plugin is sys.modules.get(__name__):
        manager.register(BeforeConftests(RUN), "swerve-witness-start")


@_hook(hookwrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config):
    global RUN
    run, RUN = RUN, None
    if run is None:
        yield
        return
    session = PytestSession(run, early_config)
    early_config.pluginmanager.register(session, "swerve-witness-run")
    early_config.add_cleanup(session.end)  # the cleanup runs however early the run ends
    outcome = yield
    session.conftests_loaded = outcome.excinfo is None


if pytest and takes_over():
    del os.environ[INSIDE]
RUN = start("pytest") if pytest else None
if RUN:
    # These modules are imported before any code under test, so that their parts are noted.
    import math  # noqa: F401
    import typing  # noqa: F401
    import unittest  # noqa: F401

    quietly(note_parts)
