"""Reports each test of a run of pytest: its outcome, how it failed, and which functions of the repository it reached.

reaching.py copies this file into a container and loads it as a plugin; it runs under any Python since 3.5 and imports nothing of ours.
Each line of the report is a JSON object, and numbers of functions are those of the process that writes them.
"""
# pyright: basic

import json
import os
import sys
import threading
from time import monotonic  # a name of its own, because tests put other clocks into the module

import pytest

HERE = os.path.realpath(os.getcwd()) + os.sep
REPORT = os.environ["REACH_REPORT"]  # read once, because tests change the environment
MOST_CHARS = 4000  # characters of a message
MOST_FRAMES = 100

wanted = None  # names of the tests to run; None: all
if os.environ.get("REACH_TESTS"):
    with open(os.environ["REACH_TESTS"]) as names:
        wanted = set(json.load(names))
numbers = {}  # place of a function's code -> its number
entered = {}  # the code objects that the running test has entered, by their ids
found = {}  # what is known of the running test


def write(**line):
    """Appends a line at once, because other processes may write, too."""
    line["process"] = os.getpid()
    report = os.open(REPORT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(report, (json.dumps(line) + "\n").encode())
    finally:
        os.close(report)


def trace(frame, event, argument):
    code = frame.f_code
    if id(code) not in entered:
        entered[id(code)] = code


def inside(path):
    """The path in the repository; "" for other files."""
    path = os.path.realpath(str(path)) if not str(path).startswith("<") else ""
    return path[len(HERE) :] if path.startswith(HERE) else ""


def reached():
    """The numbers of the functions that the test has entered; functions that had none get one."""
    found = set()
    for code in entered.values():
        place = (code.co_filename, code.co_firstlineno)
        if place not in numbers:
            path = inside(place[0])
            numbers[place] = len(numbers) + 1 if path else 0
            if path:
                write(code=numbers[place], path=path, line=place[1])
        found.add(numbers[place])
    return sorted(found - {0})


def text_of(of, value):
    """A text of the value, such as its `repr`, cut; "" if its own code fails at that. JSON has no half of a surrogate pair."""
    try:
        return of(value)[:MOST_CHARS].encode("utf-8", "replace").decode()
    except Exception:
        return ""


def failure_of(excinfo, item):
    kind = excinfo.type
    name = kind.__name__ if kind.__module__ == "builtins" else kind.__module__ + "." + kind.__name__
    frames = [(inside(entry.path), entry.lineno + 1, entry.name) for entry in excinfo.traceback]
    parameters = {}
    for parameter, value in getattr(getattr(item, "callspec", None), "params", {}).items():
        if isinstance(value, (str, bytes, int, float, list, tuple, dict, set, type(None))):
            parameters[parameter] = text_of(repr, value)
    message = text_of(str, excinfo.value)
    return {"exception": name, "message": message, "frames": frames[-MOST_FRAMES:], "parameters": parameters}


def pytest_collectreport(report):
    if report.failed:
        write(broken=report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if wanted is not None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    found.clear()
    entered.clear()
    began_at = monotonic()
    if wanted is None:
        threading.settrace(trace)
        sys.settrace(trace)
    yield
    sys.settrace(None)
    threading.settrace(None)  # type: ignore
    path = inside(getattr(item, "path", None) or item.fspath)
    write(test=item.nodeid, path=path, seconds=round(monotonic() - began_at, 3), codes=reached(), **found)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed:
        if found.get("outcome") != "failed" and call.excinfo is not None:
            found["failure"] = failure_of(call.excinfo, item)
        found["outcome"] = "failed"
    elif report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
        found.setdefault("outcome", "passed")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    write(finished=True)
