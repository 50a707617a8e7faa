"""Watches the one pytest session that counts. This is the last module: at its end the plugin starts."""
# pyright: basic, reportOptionalMemberAccess=false

import os
import sys
import types

from workers.grading.witness_plugin.parts import files_of, note_parts, of_runner
from workers.grading.witness_plugin.pytest_failing import try_pytest
from workers.grading.witness_plugin.run import INSIDE, quietly, start
from workers.grading.witness_plugin.session_parts import SessionParts
from workers.grading.witness_plugin.unittest_runs import takes_over

pytest = sys.modules.get("pytest") if "_pytest.config" in sys.modules else None

OWN_CHANGES = "legacypath.py"  # with this module pytest changes itself
# One of these is on the stack below everything that the tests' code does in a session.
SESSION_FUNCTIONS = {"pytest_make_collect_report", "perform_collect", "pytest_runtestloop", "wrap_session"}


def _hook(**options):
    return pytest.hookimpl(**options) if pytest else lambda function: function


class PytestSession:
    """The hooks of the one pytest session that counts. Sessions that tests run inside of it have none of them."""

    def __init__(self, run, config):
        self.run = run
        self.config = config
        self.conftests_loaded = False
        self.session = None
        self.trace = self.profile = None
        self.failed = None  # node ids of failing tests that failed; None while the session's own tests run
        self.parts = SessionParts(getattr(config, "known_args_namespace", None))

    @_hook(trylast=True)
    def pytest_sessionstart(self, session):
        self.session = session
        self.trace, self.profile = sys.gettrace(), sys.getprofile()
        quietly(self.parts.note, self.config)

    def pytest_plugin_registered(self):
        """Code under test that registers plugins could choose with them which tests run."""
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
        excinfo = call.excinfo  # before the runner replaces unittest's skip by its own
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
        if hasattr(report, "context"):  # a subtest, which its test may pass without
            if report.outcome == "failed":
                self.run.outcomes[name] = "FAILED"
            return
        if report.outcome not in ("passed", "failed", "skipped"):  # a try that is repeated
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
    """Compares the parts of the runner once every installed plugin is loaded, and notes them anew."""

    def __init__(self, run):
        self.run = run

    # Neither first nor last: pytest's own changes to itself come before, and conftest.py files after.
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
    early_config.add_cleanup(session.end)  # runs however early the run ends
    outcome = yield
    session.conftests_loaded = outcome.excinfo is None


if pytest and takes_over():
    del os.environ[INSIDE]
RUN = start("pytest") if pytest else None
if RUN:
    # Before any code under test, so that their parts are noted.
    import math  # noqa: F401
    import typing  # noqa: F401
    import unittest  # noqa: F401

    quietly(note_parts)
