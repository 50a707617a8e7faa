"""Records the values of marked expressions of test files, while the tests run, and reports them over the side channel.

An expression is marked as `SEE(number)(expression)`: SEE begins its evaluation, and the object that it returns ends it and returns the
value. Nothing here raises an error, changes a value or keeps one alive.
"""
# pyright: basic, reportArgumentType=false

import atexit
import builtins
import os
import re
import sys
import time
import warnings
import zlib
from _thread import _local as ThreadsOwn

from workers.verify.recorder.near_values import LONGEST_STRING, MOST_NEAR, is_near, is_plain, near_values

SEE = "_swerve_see"  # a function that is available in every module
WORKDIR = "SWERVE-WORKDIR/"  # replaced where this file is installed
CHANNELS = ("/dev/swerve-notes", "/proc/1/fd/9")  # the same channels as the witness's
MOST_EVALUATIONS = 50  # evaluations of one expression whose values are looked at
REPORTED = (1, 2, 4, 8, 16, 32, MOST_EVALUATIONS)  # evaluations after which an expression is reported
MOST_S = 60.0  # limit for all values of one process
MOST_S_EACH = 1.0  # limit for the values of one expression
FEW_NEAR = 3
MOST_TYPES = 40
MOST_FILES = 8  # limit for one expression
MOST_OPENED = 5000  # files of a process, and openings by a thread
LONGEST_REPR = 10000
CODE = (".py", ".pyc", ".pyo", ".so")
WRITES = os.O_WRONLY | os.O_RDWR
# Audit events of calls that open files by themselves or begin another process.
OTHERS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "sqlite3.connect")


class SeenValues:
    """The observations of one expression."""

    def __init__(self):
        self.evaluations = 0
        self.near = []
        self.earlier = []  # all earlier values; None if one of them was not plain
        self.low = self.high = None
        self.has_numbers_only = True
        self.types = None
        self.values = set()  # a checksum of each different value
        self.files = set()
        self.spent_s = 0.0
        self.reported_at = None

    def look(self, value):
        self.evaluations += 1
        names = self.look_at_type(value)
        shown = zlib.crc32(f"{names[0]} {short_repr(value)}".encode("utf-8", "replace"))
        if shown in self.values:
            return
        self.values.add(shown)
        self.near = [text for text in self.near if is_near(text, value)]
        if self.earlier is None:
            return
        if len(self.near) < FEW_NEAR:
            for text in near_values(value):
                if text not in self.near and all(is_near(text, earlier) for earlier in self.earlier):
                    self.near.append(text)
            del self.near[MOST_NEAR:]
        # A value that is not plain is not kept, so no further expressions can be tried on it.
        self.earlier = [*self.earlier, eval(repr(value), {})] if is_plain(value) else None

    def look_at_type(self, value):
        names = [name_of(kind) for kind in type(value).__mro__[:MOST_TYPES]]
        self.types = names if self.types is None else [name for name in self.types if name in names]
        number = as_number(value)
        if number is None:
            self.has_numbers_only = False
        elif number - number == 0:  # it is finite
            self.low = number if self.low is None else min(self.low, number)
            self.high = number if self.high is None else max(self.high, number)
        return names

    def said(self):
        return {
            "near": self.near,
            "low": self.low if self.has_numbers_only else None,
            "high": self.high if self.has_numbers_only else None,
            "types": self.types or [],
            "values": sorted(self.values),
            "files": sorted(self.files),
        }


class Evaluation:
    """A started evaluation of an expression. It is called with the value."""

    __slots__ = ("number", "opened", "start")

    def __init__(self, number, opened):
        self.number = number
        self.opened = opened
        self.start = len(opened)

    def __call__(self, value):
        quietly(recorder.end, self, value)
        return value


class Recorder:
    """The observations of one process, and the files that it opened in the workdir."""

    def __init__(self):
        self.begin()

    def begin(self):
        self.pid = os.getpid()
        self.token = f"{self.pid}-{os.urandom(4).hex()}"
        self.seen = {}
        self.opened = {}  # path -> number of times it was opened, and how many of these by marked expressions
        self.mentioned = set()  # names of files that occurred in the arguments of other processes
        self.spent_s = 0.0
        self.own = ThreadsOwn()

    def openings(self):
        """The files opened by this thread, each with whether a marked expression is known to be the reason."""
        if os.getpid() != self.pid:  # it was forked
            self.begin()
        if not hasattr(self.own, "openings"):
            self.own.openings = []
            self.own.is_busy = False
        return self.own.openings

    def open(self, path, flags):
        openings = self.openings()
        if self.own.is_busy:
            return
        path = os.path.abspath(os.fsdecode(path))
        if not path.startswith(WORKDIR) or path.endswith(CODE) or "/.git/" in path:
            return
        if path not in self.opened:
            if len(self.opened) >= MOST_OPENED:
                return
            self.opened[path] = [0, 0]
            say("opened", self.token, as_json(path))
        self.opened[path][0] += 1
        if not flags & WRITES and len(openings) < MOST_OPENED:
            openings.append([path, False])

    def mention(self, arguments):
        if len(self.mentioned) < MOST_OPENED:
            self.mentioned.update(re.findall(r"[^\s/'\"\\,]+", repr(arguments)[:LONGEST_REPR]))

    def end(self, evaluation, value):
        if self.openings() is not evaluation.opened or self.own.is_busy:
            return
        self.own.is_busy = True
        try:
            self.note(evaluation, value)
        finally:
            self.own.is_busy = False

    def note(self, evaluation, value):
        seen = self.seen.setdefault(evaluation.number, SeenValues())
        for opening in evaluation.opened[evaluation.start :]:
            if opening[0] not in seen.files and len(seen.files) >= MOST_FILES:
                continue
            seen.files.add(opening[0])
            if not opening[1]:
                opening[1] = True
                self.opened[opening[0]][1] += 1
        if seen.evaluations >= MOST_EVALUATIONS or seen.spent_s > MOST_S_EACH or self.spent_s > MOST_S:
            return
        began_at = clock()
        if is_plain(value):
            seen.look(value)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seen.look(value)
        spent_s = clock() - began_at
        seen.spent_s += spent_s
        self.spent_s += spent_s
        if seen.evaluations in REPORTED:
            self.report(evaluation.number, seen)

    def report(self, number, seen):
        said = as_json(seen.said())
        if said != seen.reported_at:
            say("observed", self.token, str(number), said)
            seen.reported_at = said

    def finish(self):
        if os.getpid() != self.pid:
            return
        for number, seen in self.seen.items():
            self.report(number, seen)
        for path, (times, by_marked) in self.opened.items():
            if times == by_marked and os.path.basename(path) not in self.mentioned:
                say("own", self.token, as_json(path))


def see(number):
    """Begins an evaluation. Tests must not fail because of it."""
    try:
        return Evaluation(number, recorder.openings())
    except Exception:
        return lambda value: value


def audit(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        quietly(recorder.open, arguments[0], arguments[2])
    elif event in OTHERS:
        quietly(recorder.mention, arguments)


def quietly(function, *arguments):
    try:
        function(*arguments)
    except Exception:
        return


def install():
    if not hasattr(builtins, SEE):
        setattr(builtins, SEE, see)
        atexit.register(recorder.finish)
        if hasattr(sys, "addaudithook"):
            sys.addaudithook(audit)


def short_repr(value):
    """A text that distinguishes values, without the addresses of objects."""
    if isinstance(value, (str, bytes)) and len(value) > LONGEST_REPR:
        return f"{len(value)} {value[:LONGEST_REPR]!r} {value[-LONGEST_STRING:]!r}"
    if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > LONGEST_STRING:
        return f"{type(value)} {len(value)} {list(value)[:LONGEST_STRING]!r}"
    return re.sub(" at 0x[0-9a-f]+", "", repr(value)[:LONGEST_REPR])


def as_number(value):
    import numbers

    if isinstance(value, bool) or not isinstance(value, numbers.Number):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def name_of(kind):
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def as_json(value):
    import json

    return json.dumps(value)


def say(*words):
    left = ("\n" + " ".join(words) + "\n").encode()
    for path in CHANNELS:
        try:
            channel = os.open(path, os.O_WRONLY)
        except OSError:
            continue
        try:
            while left:
                left = left[os.write(channel, left) :]
        finally:
            os.close(channel)
        return


clock = getattr(time, "thread_time", time.process_time)  # CPU time
recorder = Recorder()
