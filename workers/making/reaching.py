"""Runs the tests of a repository in a container: all of them, to learn which functions each reaches, and later those that a bug can fail.

reach_plugin.py reports from inside pytest. What it says decides which bugs are tried further; whether a task is right is decided by
`workers.verify` alone, so code that lies here gains nothing.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from pipeline.task import File
from workers.grading.steps import failed_step
from workers.sandbox.git import GIT
from workers.sandbox.protocol import Sandbox

PLUGIN = Path(__file__).with_name("reach_plugin.py")
FOLDER, REPORT = "/swerve-reach", "/tmp/swerve-reach.jsonl"
KEEP_BYTES = 128 * 1024 * 1024  # bytes kept of each end of a report
STEP_S = 300.0
# What tests may take with a bug: LEAST_S, and TIMES_LONGER times as long as they took without it.
LEAST_S, TIMES_LONGER = 60.0, 5.0
LOG_CHARS = 300
_RUN = f"""export PYTHONPATH={FOLDER}${{PYTHONPATH:+:$PYTHONPATH}} SWERVE_REPORT={REPORT} SWERVE_TESTS=$1
rm -f {REPORT}
shift
exec python3 -m pytest -p {PLUGIN.stem} --maxfail=0 --tb=no -q "$@"
"""
_CLEAN = f"{GIT}\ngit checkout -q -f -- . && git clean -fdq"
_ENDED = (0, 1)  # statuses of pytest after tests have run

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
    """A line of the report: a function, a test, or a file that cannot be collected."""

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


@dataclass(frozen=True, slots=True)
class TestsRun:
    """The tests of one run, by their names."""

    __test__ = False  # pytest collects classes of such a name

    tests: Mapping[str, RanTest] = field(default_factory=dict[str, RanTest])
    is_whole: bool = True  # whether all files could be collected, and pytest came to its end


def read_report(report: bytes, *, ended: bool = True) -> TestsRun:
    """The tests in a report; lines that cannot be read are left out, because any code in the container may have written them."""
    places: dict[tuple[int, int], CodePlace] = {}
    tests: dict[str, RanTest] = {}
    for line in report.splitlines():
        try:
            one = msgspec.json.decode(line, type=_ReportLine)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if one.code:
            places[one.process, one.code] = (one.path, one.line)
        elif one.test:
            found = (places.get((one.process, code)) for code in one.codes)
            reached = frozenset(place for place in found if place)
            tests[one.test] = RanTest(one.test, one.path, one.seconds, one.outcome, reached, one.failure)
        ended = ended and not one.broken
    return TestsRun(tests, ended)


@dataclass(frozen=True, slots=True)
class TestBench:
    """A container in which tests run again and again, with other contents of some files."""

    __test__ = False  # pytest collects classes of such a name

    sandbox: Sandbox

    async def install(self) -> None:
        await self.sandbox.put([File(path=f"{FOLDER}/{PLUGIN.name}", content=PLUGIN.read_bytes())])

    async def report_of_all(self, *, timeout_s: float) -> tuple[bytes, str]:
        """The report of a run of all tests, as far as it came in time, and the end of its output. Raises SandboxError."""
        result = await self.sandbox.run(f"set -- ''\n{_RUN}", timeout_s=timeout_s)
        return await self._report(), result.output.decode("utf-8", "replace").strip()[-LOG_CHARS:]

    async def run(self, texts: Mapping[str, bytes], tests: Sequence[RanTest]) -> TestsRun:
        """Runs these tests with other contents of these files, which are as before afterwards. Raises SandboxError."""
        names = File(path=f"{FOLDER}/tests.json", content=msgspec.json.encode([test.name for test in tests]))
        await self.sandbox.put([names, *(File(path=path, content=text) for path, text in texts.items())])
        paths = dict.fromkeys(test.path for test in tests)
        limit_s = LEAST_S + TIMES_LONGER * sum(test.seconds for test in tests)
        result = await self.sandbox.run(
            f"set -- {shlex.join([names.path, *paths])}\n{_RUN}", timeout_s=limit_s
        )
        report = await self._report()
        cleaned = await self.sandbox.run(_CLEAN, timeout_s=STEP_S, plain=True)
        if cleaned.exit_code != 0:
            raise failed_step("putting the files of the repository back", cleaned)
        return read_report(report, ended=result.exit_code in _ENDED)

    async def _report(self) -> bytes:
        result = await self.sandbox.run(f"cat {REPORT}", timeout_s=STEP_S, keep_bytes=KEEP_BYTES, plain=True)
        return result.output if result.exit_code == 0 else b""
