"""Runs the tests of a repository in a container: all of them, to learn which functions each reaches, and later those that a bug can fail.

reach_plugin.py reports from inside pytest. What it says decides which bugs are tried further; whether a task is right is decided by
`workers.verify` alone, so code that lies here gains nothing.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from pipeline.errors import GraderError
from pipeline.task import File
from workers.grading.steps import failed_step
from workers.sandbox.git import GIT
from workers.sandbox.protocol import CommandResult, Sandbox, is_starved

PLUGIN = Path(__file__).with_name("reach_plugin.py")
FOLDER, REPORT = "/swerve-reach", "/tmp/swerve-reach.jsonl"
KEEP_BYTES = 128 * 1024 * 1024  # bytes kept of each end of a report
STEP_S = 300.0
# What tests may take with a bug: LEAST_S, and TIMES_LONGER times as long as they took without it.
LEAST_S, TIMES_LONGER = 60.0, 5.0
LOG_CHARS = 300
_RUN = f"""export PYTHONPATH={FOLDER}${{PYTHONPATH:+:$PYTHONPATH}} REACH_REPORT={REPORT} REACH_TESTS=$1 PYTHONHASHSEED=0
rm -f {REPORT}
shift
exec python3 -m pytest --rootdir=. -p {PLUGIN.stem} --maxfail=0 --tb=no -q "$@"
"""
# Files that git does not track, such as compiled modules and what an installation left, are kept as they are before any test.
_KEEP = f"""{GIT}
git ls-files -z --others | tar -c --null -T - -f {FOLDER}/others.tar && touch {FOLDER}/kept
"""
_CLEAN = f"""{GIT}
git checkout -q -f -- . && git clean -ffdxq && tar -x -f {FOLDER}/others.tar || exit
find /tmp -mindepth 1 -cnewer {FOLDER}/kept -delete 2>/dev/null
true
"""

CodePlace: TypeAlias = tuple[str, int]
"""The path of a file, and the first line of a function in it."""


class RaisedIn(msgspec.Struct, frozen=True, array_like=True):
    """A line that an exception went through; outside of the repository it has no path."""

    path: str
    line: int
    function: str = ""


class Failure(msgspec.Struct, frozen=True):
    """How a test failed: the exception, where it went through, the outermost first, and the test's parameters in Python."""

    exception: str
    message: str = ""
    frames: tuple[RaisedIn, ...] = ()
    parameters: dict[str, str] = {}


class RanTest(msgspec.Struct, frozen=True):
    """A test as it ran; `path` is that of its file."""

    name: str
    path: str
    seconds: float = 0.0
    outcome: str = ""  # "passed", "failed", or "" for one that was skipped
    reached: frozenset[CodePlace] = frozenset()
    failure: Failure | None = None


class _ReportLine(msgspec.Struct, frozen=True):
    """A line of the report: a function, a test, a file that cannot be collected, or the end of the run."""

    process: int = 0
    code: int = 0
    path: str = ""
    line: int = 0
    test: str = ""
    broken: str = ""
    seconds: float = 0.0
    codes: tuple[int, ...] = ()
    outcome: str = ""
    failure: Failure | None = None
    finished: bool = False


@dataclass(frozen=True, slots=True)
class TestsRun:
    """The tests of one run, by their names."""

    __test__ = False  # pytest collects classes of such a name

    tests: Mapping[str, RanTest] = field(default_factory=dict[str, RanTest])
    is_whole: bool = True  # whether all files could be collected, and pytest came to its end

    def of(self, asked: Sequence[RanTest]) -> "TestsRun":
        """The run with these tests alone, each with the path that it is known by; not whole if one of them is missing."""
        known = {test.name: test.path for test in asked}
        found = {
            name: replace(self.tests[name], path=path) for name, path in known.items() if name in self.tests
        }
        return TestsRun(found, self.is_whole and len(found) == len(known))


def read_report(report: bytes) -> TestsRun:
    """The tests in a report; lines that cannot be read are left out, because any code in the container may have written them."""
    places: dict[tuple[int, int], CodePlace] = {}
    tests: dict[str, RanTest] = {}
    is_finished, is_broken = False, False
    for line in report.splitlines():
        try:
            one = msgspec.json.decode(line, type=_ReportLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if one.code:
            places[one.process, one.code] = (one.path, one.line)
        elif one.test:
            found = (places.get((one.process, code)) for code in one.codes)
            reached = frozenset(place for place in found if place)
            seconds = one.seconds if 0 <= one.seconds < math.inf else 0.0
            tests[one.test] = RanTest(one.test, one.path, seconds, one.outcome, reached, one.failure)
        is_finished, is_broken = is_finished or one.finished, is_broken or bool(one.broken)
    return TestsRun(tests, is_finished and not is_broken)


@dataclass(frozen=True, slots=True)
class TestBench:
    """A container in which tests run again and again, with other contents of some files."""

    __test__ = False  # pytest collects classes of such a name

    sandbox: Sandbox

    async def install(self) -> None:
        """Raises SandboxError, GraderError."""
        await self.sandbox.put([File(path=f"{FOLDER}/{PLUGIN.name}", content=PLUGIN.read_bytes())])
        await self._step(_KEEP, "keeping the files that git does not track")

    async def report_of_all(self, *, timeout_s: float) -> tuple[bytes, str]:
        """The report of a run of all tests, as far as it came in time, and the end of its output. Raises SandboxError, GraderError."""
        result = await self.sandbox.run(f"set -- ''\n{_RUN}", timeout_s=timeout_s)
        _must_have_had_cpu("running all tests", result)
        return await self._report(), result.output.decode("utf-8", "replace").strip()[-LOG_CHARS:]

    async def run(self, texts: Mapping[str, bytes], tests: Sequence[RanTest], *, most_s: float) -> TestsRun:
        """Runs these tests for at most `most_s` with other contents of these files. Afterwards all files are as before.

        Raises SandboxError, GraderError.
        """
        names = File(path=f"{FOLDER}/tests.json", content=msgspec.json.encode([test.name for test in tests]))
        await self.sandbox.put([names, *(File(path=path, content=text) for path, text in texts.items())])
        paths = dict.fromkeys(test.path for test in tests)
        limit_s = min(most_s, LEAST_S + TIMES_LONGER * sum(test.seconds for test in tests))
        result = await self.sandbox.run(
            f"set -- {shlex.join([names.path, *paths])}\n{_RUN}", timeout_s=limit_s
        )
        _must_have_had_cpu("running tests with a bug", result)
        report = await self._report()
        await self._step(_CLEAN, "putting the files of the repository back")
        return read_report(report).of(tests)

    async def _step(self, script: str, doing: str) -> None:
        result = await self.sandbox.run(script, timeout_s=STEP_S, plain=True)
        if result.exit_code != 0:
            raise failed_step(doing, result)

    async def _report(self) -> bytes:
        """The report, which is empty if no test began, and ends early if it is too long to be kept."""
        script = f"[ ! -e {REPORT} ] || cat {REPORT}"
        result = await self.sandbox.run(script, timeout_s=STEP_S, keep_bytes=KEEP_BYTES, plain=True)
        if result.exit_code != 0:
            raise failed_step("reading the report of the tests", result)
        return result.output[: len(result.output) // 2] if result.dropped_bytes else result.output


def _must_have_had_cpu(doing: str, result: CommandResult) -> None:
    if result.exit_code is None and is_starved(result):
        raise GraderError(f"{doing} took too long on a machine without CPU for it")
