"""A container with the known fix and the hidden tests in place: what is read of the tests there before anything runs, and which files the
tests read when they run.

These files are those of the repository that a run of the known fix opens or runs as modules, as reported by recorder/reads.py. The recorder
is only in containers of this run, never in one whose verdict counts. The known fix gains nothing by distinguishing them.
"""

import binascii
import re
import secrets
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pipeline.request import Claim
from pipeline.task import Calibration, Task
from workers.grading.container import GradingContainer, OutOfTime
from workers.grading.controls.locating import FoundFunction, locate
from workers.grading.controls.placing import read_tests
from workers.grading.defence import witness
from workers.grading.defence.survey import Surveys
from workers.grading.steps import failed_step, find_installations, step
from workers.grading.swebench_rules import Marks
from workers.sandbox.git import GIT
from workers.sandbox.protocol import Sandbox

STEP_S = 300.0
LIST_KEEP_BYTES = 16 * 1024 * 1024
RECORDER = Path(__file__).with_name("recorder") / "reads.py"
_LINE = re.compile(
    rb"^read (opened|missing|run|script) (direct|indirect) ([0-9a-f]+) (-|[0-9a-f]+) (-|[0-9a-f]+)$",
    re.MULTILINE,
)


class OpensSandboxes(Protocol):
    """Opens a container of the claim's task as the grader does."""

    def open(self, claim: Claim, *, role: Literal["grade"]) -> AbstractAsyncContextManager[Sandbox]: ...


@dataclass(frozen=True, slots=True)
class Read:
    """One file that the run read. Paths are relative to the workdir.

    `kind`: "opened" for reading, "missing" if that failed, "run" as a module, or "script". `by` is the file of the repository whose code
    did so, "" if it was the runner's; `is_direct` means that no other code was in between. `test` is the running test, "" if none is known.
    """

    kind: str
    path: str
    by: str
    is_direct: bool
    test: str = ""


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """The record of one run. `tracked` are the files of the commit from which the run started."""

    reads: tuple[Read, ...]
    tracked: frozenset[str]


async def record(sandboxes: OpensSandboxes, claim: Claim, fix: bytes, calibration: Calibration) -> ReadRecord:
    """The files that the tests of the claim's task read with the known fix; nothing if they do not end.

    Raises GraderError and SandboxError.
    """
    surveys, task = Surveys(), claim.request.task
    async with sandboxes.open(claim, role="grade") as sandbox:
        surveyed = await surveys.survey(sandbox, task, hidden=(), under_test=calibration.fix_paths)
        tracked = await _run(
            sandbox, "listing the files of the base", f"{GIT}\ngit ls-tree -rz --name-only HEAD ."
        )
        await _run(sandbox, "installing the recorder", _installer(sandbox.workdir, surveyed.places))
        container = GradingContainer(claim, sandbox, fix, Marks(), claim.request.limits, calibration, surveys)
        await container.apply()
        await container.put_script(())
        try:
            finished = await container.run_tests()
        except OutOfTime:
            finished = None
    names = frozenset(name.decode("utf-8", "replace") for name in tracked.split(b"\0") if name)
    return ReadRecord(tuple(dict.fromkeys(reads(finished.notes))) if finished else (), names)


def reads(notes: bytes) -> Iterator[Read]:
    """The reads in the side channel's report, without files whose names are not UTF-8."""
    for kind, is_direct, *names in _LINE.findall(notes):
        try:
            path, by, test = (binascii.unhexlify(name).decode() if name != b"-" else "" for name in names)
        except ValueError:
            continue
        yield Read(kind.decode(), path, by, is_direct == b"direct", test)


def _installer(workdir: str, places: tuple[str, ...]) -> str:
    """The bash that makes every Python that it finds import the recorder at its start."""
    name = f"swerve_{secrets.token_hex(6)}"
    text = RECORDER.read_text("utf-8").replace('"@WORKDIR@"', repr(workdir))
    encoded = binascii.b2a_base64(text.encode("utf-8", "surrogateescape"), newline=False).decode()
    return f"""{find_installations(places)}{step("make_folders")}
make_folders "${{folders[@]}}"
for folder in "${{folders[@]}}"; do
  base64 -d >"$folder"/{name}.py <<<{encoded} && echo 'import {name}' >"$folder"/{name}.pth || exit 1
done
"""


async def _run(sandbox: Sandbox, doing: str, command: str) -> bytes:
    result = await sandbox.run(command, timeout_s=STEP_S, keep_bytes=LIST_KEEP_BYTES, plain=True)
    if result.exit_code != 0 or result.dropped_bytes:
        raise failed_step(doing, result)
    return result.output


@dataclass(frozen=True, slots=True)
class FoundTests:
    """The function of each test, and the text of each file with tests. Files of the fix are left out of the texts.

    `support` has the text of the other modules of the tests, as far as they are known.
    """

    functions: Mapping[str, FoundFunction]
    texts: Mapping[str, bytes]
    workdir: str
    support: Mapping[str, bytes] = field(default_factory=dict[str, bytes])


@asynccontextmanager
async def fixed(sandboxes: OpensSandboxes, claim: Claim, fix: bytes) -> AsyncGenerator[Sandbox]:
    """A container with the known fix and the hidden tests in place."""
    calibration = Calibration(fix_paths=tuple(witness.touched_paths(fix)))
    async with sandboxes.open(claim, role="grade") as sandbox:
        limits = claim.request.limits
        await GradingContainer(claim, sandbox, fix, Marks(), limits, calibration, Surveys()).apply()
        yield sandbox


async def find_tests(
    sandbox: Sandbox, task: Task, names: Sequence[str], fix_paths: Collection[str]
) -> FoundTests:
    """Finds these tests in a container that `fixed` opened."""
    functions = await locate(sandbox, task, names)
    # A module with doctests is itself under test.
    paths = {place.path for place in functions.values() if not place.is_doctest} - {*fix_paths}
    texts = await read_tests(sandbox, task.verdict.eval_script, paths)
    return FoundTests(functions, texts, sandbox.workdir)
