"""Runs a file of failing tests in a pytest session: collected by it, run by its protocol, judged by its reports."""
# pyright: basic, reportOptionalMemberAccess=false

import contextlib
import sys
import time

from workers.grading.witness_plugin.failing import FailingFile
from workers.grading.witness_plugin.unittest_runs import NEWEST_S

# Plugins of pytest's own that decide whether a test fails. All others are left out: a failing test that they see would be
# reported, counted, repeated or debugged, and what they are was settled before any code under test ran.
DECIDING = ("_pytest.assertion", "_pytest.fixtures", "_pytest.main", "_pytest.python", "_pytest.runner")
DECIDING += ("_pytest.skipping", "_pytest.unittest")
SHOWS_SETUP = "setupshow"  # option under which the runner prints what it does for each test
ENTRIES = ("_hookimpls", "_nonwrappers", "_wrappers")  # where pluggy keeps them, by its version
# Hooks that tell of tests. Nobody but the witness is told of these.
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


def try_pytest(run, session, watcher, cases):
    """Notes in `run` which ways of failing did not fail. `watcher` is the witness's plugin, which puts the reports of failing
    tests into its `failed`; `cases` tells whether tests of unittest's are among those of the session.
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
    if where is None:  # before pytest 7
        where = type(session.fspath)(path)
        start = {"path": where, "parent": session}
    else:
        where = type(where)(path)
        start = {"file_path": where, "parent": session}
    session._initialpaths = frozenset(session._initialpaths) | {where}
    hooks = session.gethookproxy(where)
    session.gethookproxy = lambda path: hooks  # looked for once and not ten times for each test
    for collector in hooks.pytest_collect_file(**start):
        for node in collector if isinstance(collector, (list, tuple)) else [collector]:
            for item in session.genitems(node):
                del item.fixturenames[:]  # those that are used without being named, which may take long
                item.repr_failure = _shown
                yield item


def _shown(*_):
    """What the report of a failing test shows: not the traceback, which takes as long as all the rest of the test."""
    return "failed"


@contextlib.contextmanager
def _alone(config, watcher):
    """Takes all plugins but the deciding ones out of all hooks, and all but the witness out of those that tell of tests."""
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
