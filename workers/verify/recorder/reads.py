"""Reports which files of the repository this Python process opens and runs as modules, and which code caused that.

It is copied into the container of one run of the known fix and imported at the start of each Python there: fixed.py installs it and reads
its reports. It imports nothing of ours and runs under any Python since 3.5. Before 3.8 there are no audit hooks: there it wraps `open` and
the import of source files, and sees neither `os.open` nor the importer of a module that pytest rewrites.
"""
# pyright: basic

import _thread
import binascii
import os
import sys

WORKDIR = os.path.realpath("@WORKDIR@")
# A pipe that process 1 reads; if process 1 is bash, its own descriptor.
CHANNELS = ("/dev/swerve-notes", "/proc/1/fd/9")
MOST_REPORTS = 20000  # limit for one process
MOST_TESTS = 200  # number of tests reported for one file
LONGEST = 900  # characters of a path or a name: a line longer than a page could mix with another process's
INSTALLED = ("/.git/", "/site-packages/", "/dist-packages/", "/node_modules/", "/__pycache__/")
# The code that runs a module for an import statement is on the stack between the statement and the module.
IMPORTING = os.sep + os.path.join("_pytest", "assertion", "rewrite.py")

EVENTS = ("open", "exec", "module", "cpython.run_file", "sqlite3.connect")  # "module" is an event of our own

busy = _thread._local()
reported = {}  # what was reported -> the tests for which it was reported
ways = {}  # keys are paths, see `along`
inside_of = {}  # name of a file -> its path in the repository, "" if it is elsewhere


def watch(event, arguments):
    """An audit hook: it must not fail, and must not report its own actions."""
    if event not in EVENTS or getattr(busy, "now", False):
        return
    busy.now = True
    try:
        if event == "exec":
            if getattr(arguments[0], "co_name", "") == "<module>":
                note_module(arguments[0].co_filename)
        elif event == "module":
            note_module(arguments[0])
        elif event == "cpython.run_file":
            report("script", inside(os.fsdecode(arguments[0])), "", True)
        else:
            note_opened(arguments[0], arguments[2] if event == "open" else 0)
    except Exception:
        pass
    finally:
        busy.now = False


def note_module(name):
    by, is_direct, _ = called_by()
    report("run", inside(name), by, is_direct)


def note_opened(path, flags):
    if isinstance(path, int) or (flags or 0) & os.O_TRUNC:
        return
    path = inside(os.fsdecode(path))
    if not path:
        return
    by, is_direct, imports = called_by()
    if imports:
        return
    for name in along(path):
        report("opened" if os.path.lexists(os.path.join(WORKDIR, name)) else "missing", name, by, is_direct)


def along(path):
    """The path, the symbolic links along it, and their targets."""
    if path not in ways:
        parts = path.split("/")
        folders = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        found = [folder for folder in folders if os.path.islink(os.path.join(WORKDIR, folder))]
        led = [inside(os.path.realpath(os.path.join(WORKDIR, path)))] if found else []
        ways[path] = [path, *found, *led]
    return ways[path]


def called_by():
    """The file of the repository whose code is nearest on the stack, "" if there is none; whether no other code is in between, except for
    code that an import statement runs; and whether such code is the nearest of all.
    """
    frame, is_direct, imports = sys._getframe(), True, False
    own = frame.f_code.co_filename
    while frame is not None:
        name = frame.f_code.co_filename
        if name == own:
            pass
        elif name.startswith("<frozen importlib") or name.endswith(IMPORTING):
            imports = imports or is_direct
        else:
            path = inside(name)
            if path:
                return path, is_direct, imports
            is_direct = False
        frame = frame.f_back
    return "", is_direct, imports


def inside(name):
    """The path of a file in the repository, "" if it is elsewhere or belongs to an installed package."""
    if not name or name.startswith("<"):
        return ""
    name = name if name.startswith("/") else os.path.join(os.getcwd(), name)
    known = inside_of.get(name)
    if known is None:
        known = inside_of[name] = find_inside(os.path.normpath(name))
    return known


def find_inside(path):
    if not path.startswith(WORKDIR + "/"):
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    if not path.startswith(WORKDIR + "/") or any(part in path + "/" for part in INSTALLED):
        return ""
    return path[len(WORKDIR) + 1 :]


def report(kind, path, by, is_direct):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0] if kind == "opened" else ""
    what = (kind, path, by, is_direct)
    tests = reported.setdefault(what, set())
    if not path or test in tests or len(tests) >= MOST_TESTS or len(reported) > MOST_REPORTS:
        return
    tests.add(test)
    names = [binascii.hexlify(os.fsencode(name)).decode() or "-" for name in (path, by, test)]
    if max(len(name) for name in names) > LONGEST:
        return
    line = " ".join(["read", kind, "direct" if is_direct else "indirect", *names])
    for channel in CHANNELS:
        try:
            pipe = os.open(channel, os.O_WRONLY)
        except OSError:
            continue
        try:
            os.write(pipe, ("\n" + line + "\n").encode())
        finally:
            os.close(pipe)
        return


def watch_without_hooks():
    import atexit
    import builtins
    import io
    from importlib.machinery import SourceFileLoader

    opens, runs = io.open, SourceFileLoader.exec_module

    def opened(file, mode="r", *more, **options):
        watch("open", (file, mode, os.O_TRUNC if mode[:1] in ("w", "x") else 0))
        return opens(file, mode, *more, **options)

    def run(self, module):
        watch("module", (self.path,))
        return runs(self, module)

    def report_others():
        """Reports the modules that another loader ran, or a script."""
        busy.now = True
        for name, module in list(sys.modules.items()):
            path = inside(getattr(module, "__file__", None) or "")
            report("script" if name == "__main__" else "run", path, "", False)

    io.open = builtins.open = opened
    SourceFileLoader.exec_module = run
    atexit.register(report_others)


if hasattr(sys, "addaudithook"):
    sys.addaudithook(watch)
else:
    watch_without_hooks()
