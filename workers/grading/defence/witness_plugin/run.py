"""One observed test run, and its reports over the side channel."""
# pyright: basic, reportOptionalMemberAccess=false

import binascii
import builtins
import linecache
import os
import sys
import zlib

from workers.grading.defence.witness_plugin.parts import (
    ASSERTION_ERROR,
    REINTERPRETING,
    of_runner,
    replaced_parts,
)

# A pipe that process 1 reads; if process 1 is bash, its own descriptor.
CHANNELS = ("/dev/swerve-notes", "/proc/1/fd/9")
# Environment variable that tells child processes of tests that they are not a test run
INSIDE = __name__.upper()
MOST_LINES = 100  # limit for one test, counted from the innermost line outwards
MOST_PARTS = 1000  # limit for replaced parts
MOST_ANCESTORS = 200
# Characters that JSON can only write as escapes.
ESCAPES = {number: "\\u" + format(number, "04x") for number in [*range(32), ord('"'), ord("\\")]}


class WatchedRun:
    """One test run, from its start to its end."""

    def __init__(self, runner):
        self.pid = os.getpid()
        self.secret = binascii.hexlify(os.urandom(16)).decode()
        self.started_at = _file_clock()
        self.collected = -1  # number of tests to be run; -1: not known
        self.finished = 0  # number of these that have finished
        self.outcomes = {}
        self.stopped = []  # (test, file, source line) of lines that led to a skip or an expected failure
        self.replaced = set()  # (part of the runner, file of its replacement or "")
        self.rewritten = []  # files of tests that were written after the run had started
        self.ways = []  # kinds of failure that were tried
        self.unfailing = []  # kinds of failure that made no test fail
        self.said = say("start", self.secret, runner, lineage())

    def stop(self, test, error, frames):
        for path, text in _stopping_lines(error, frames):
            self.stopped.append([test, path, text])

    def wrote(self, path):
        """Whether the file has changed since the start."""
        try:
            return os.stat(path).st_ctime > self.started_at
        except OSError:
            return False

    def replace(self, part, paths):
        """Records that code in files of these `paths` replaces the part."""
        for path in paths or ("",):
            self.replaced.add((part, "<string>" if path and self.wrote(path) else path))

    def compare_parts(self, note_anew=False, own_changes="/"):
        """Reports the parts that have changed, except by the runner's own file named `own_changes`."""
        raised = getattr(builtins, "AssertionError", None)
        if raised is not ASSERTION_ERROR and getattr(raised, "__module__", None) != REINTERPRETING:
            self.replace("AssertionError", ("<string>",))
        for part, paths in replaced_parts(note_anew):
            if not paths or not all(path.endswith(own_changes) and of_runner(path) for path in paths):
                self.replace(part, paths)

    def end(self, status):
        """Reports the end. `status` None: no test was to be run."""
        if os.getpid() != self.pid:  # a test forked, and its child got here
            return
        said = {
            "status": status,
            "ways": self.ways,
            "unfailing": self.unfailing,
            "collected": self.collected,
            "finished": self.finished,
            "outcomes": self.outcomes,
            "stopped": self.stopped,
            "rewritten": self.rewritten,
            "replaced": sorted(self.replaced)[:MOST_PARTS],
        }
        packed = zlib.compress(as_json(said).encode("utf-8", "replace"))
        say("end", self.secret, binascii.b2a_base64(packed).decode().strip())


def quietly(function, *arguments):
    """The result of the function; None if it fails. Tests must not fail because of the witness."""
    try:
        return function(*arguments)
    except Exception:
        return None


def as_json(value):
    """JSON of a value made of strings, whole numbers, None, lists and dicts. Importing Python's json would take longer."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return '"' + str.translate(value, ESCAPES) + '"'
    if isinstance(value, dict):
        return "{" + str.join(",", [as_json(key) + ":" + as_json(value[key]) for key in value]) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + str.join(",", [as_json(item) for item in value]) + "]"
    return str(int(value))


def lineage():
    """This process and its ancestors, without process 1: the id and the start time of each, which together are unique."""
    found, pid = [], os.getpid()
    while pid > 1 and len(found) < MOST_ANCESTORS:
        try:
            with open("/proc/" + str(pid) + "/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            break
        found.append(str(pid) + ":" + fields[19].decode())
        pid = int(fields[1])
    return ",".join(found) or "-"


def _file_clock():
    """Seconds since 1970 by the clock that dates files, whatever time the process believes it is."""
    read, write = os.pipe()
    try:
        return os.fstat(read).st_ctime
    finally:
        os.close(read)
        os.close(write)


def say(*words):
    channel = _open_channel()
    if channel is None:
        return False
    left = b"\n" + " ".join(words).encode("utf-8") + b"\n"
    try:
        while left:
            left = left[os.write(channel, left) :]
    finally:
        os.close(channel)
    return True


def _open_channel():
    for path in CHANNELS:
        try:
            return os.open(path, os.O_WRONLY)
        except OSError:
            pass
    return None


def start(runner):
    """A new run; None inside of another run, and if the side channel cannot be opened."""
    if os.environ.get(INSIDE):
        return None
    run = WatchedRun(runner)
    if not run.said:
        return None
    os.environ[INSIDE] = runner
    return run


def _stopping_lines(error, frames):
    """File and text of each line, of a test and of the code under test, on the way to the line at which `error` stopped the test.

    It returns all of them, not only the last, because code may be compiled under any file's name. If the last does not look like a line
    that stops a test, files that may have turned it into one follow, with "" for the text.
    """
    while error is not None:
        lines = []
        while frames is not None:
            path = frames.tb_frame.f_code.co_filename
            if not of_runner(path) and not path.startswith("<frozen "):
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
