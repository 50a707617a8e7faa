"""One patch in one grading container: the patch applied, what it must not touch restored, the hidden tests put in place, run.

No step is judged by what it prints, because code under test could print the same. Steps before the tests are judged by the
exit status that the container's first process reports, since no code of the patch has run by then; the tests by the status
that their container ends with.
"""

import asyncio
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.calibration import Calibration, Contradiction
from pipeline.errors import GraderError, SandboxError, TaskBroken
from pipeline.request import Claim, Limits
from pipeline.task import ExitCode, File, SwebenchLog, Task
from workers.grading import reading, scripts
from workers.grading.controls.placing import Placement, placed, write
from workers.grading.governing import GoverningFiles, hidden_paths
from workers.grading.steps import StepFailed, failed_step, tail
from workers.grading.survey import Surveys
from workers.grading.swebench_rules import Marks
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded
from workers.sandbox.protocol import CommandResult, LastResult, Sandbox, is_starved

STEP_S = 300.0  # for each step before the tests, and for a parser
LOG_KEEP_BYTES = 8 * 1024 * 1024  # of each end
SETTINGS_KEEP_BYTES = 16 * 1024 * 1024  # of the contents of settings files that a patch touches
WATCH_S = 5.0  # between looks at the CPU time of running tests


class OutOfTime(StepFailed):
    """The wall deadline passed although the tests had CPU time left, and the machine had CPU to give."""


class Starved(GraderError):
    """The wall deadline passed on a machine that had no CPU for the tests."""


@dataclass(frozen=True, slots=True)
class Applied:
    """How a patch was applied: by which command, "" if by none, and what the commands printed.

    `fault` is why its tests are not run at all, which is a verdict of 0.
    """

    by: str
    complaints: str
    fault: str | None = None
    restored: tuple[str, ...] = ()  # see `GoverningFiles.restored`


@dataclass(frozen=True, slots=True)
class FinishedTests:
    """How a test run ended that finished in time."""

    exit_code: int
    output: bytes
    notes: bytes
    cpu_s: float


@dataclass(frozen=True, slots=True)
class GradingContainer:
    """One patch in one container."""

    claim: Claim
    sandbox: Sandbox
    patch: bytes
    marks: Marks
    limits: Limits
    calibration: Calibration
    surveys: Surveys

    async def apply(self) -> Applied:
        """Applies the patch and puts the hidden tests in place. Files that a patch must not touch are restored.

        Raises StepFailed and CannotWrite for what may be the patch's fault.
        """
        governing = await self._begin()
        try:
            headers = await isolation.call(
                reading.headers, self.patch, governing.script, governing.surveyed.paths
            )
        except LimitExceeded as error:
            return Applied("", "", fault=f"the patch could not be read {error}")
        if headers.touches_runner:
            await self._succeed(scripts.save(governing))
        result = await self._step(scripts.apply(governing, loosely=not headers.hides_names))
        complaints = result.output.decode("utf-8", "replace")
        if result.exit_code == scripts.DOES_NOT_APPLY:
            return Applied("", complaints, fault="patch does not apply")
        if result.exit_code not in scripts.APPLIED_BY:
            raise failed_step("applying the patch", result)
        applied_by = scripts.APPLIED_BY[result.exit_code]
        try:
            if headers.touches_runner:
                await self._restore_runner(governing)
        except LimitExceeded as error:
            return Applied(applied_by, complaints, fault=f"its settings files could not be parsed {error}")
        fault = await self._restore_protected(governing)
        return Applied(applied_by, complaints, fault, governing.restored)

    async def do_without_patch(self) -> None:
        """Takes the steps of `apply` but for the patch. What they raise is no patch's fault."""
        governing = await self._begin()
        await self._succeed(scripts.save(governing))
        await self._restore_runner(governing)
        if await self._restore_protected(governing):
            raise TaskBroken("the hidden tests do not apply to their base")

    async def put_script(self, contradictions: Sequence[Contradiction]) -> None:
        """Makes these expectations of the hidden tests wrong and puts the eval script in place, alone in its directory.

        To be called between `apply` and `run_tests`. Raises NotAsCalibrated.
        """
        verdict = self.claim.request.task.verdict
        placement = Placement(verdict.eval_script)
        if contradictions:
            placement = await placed(self.sandbox, verdict.eval_script, contradictions)
        script = placement.script
        if isinstance(verdict, SwebenchLog):
            script = self.marks.in_script(script)
        content = script.encode("utf-8", "surrogateescape")
        await write(self.sandbox, {**placement.texts, scripts.EVAL: content})

    async def run_tests(self) -> FinishedTests | None:
        """How the eval script ended, and the container with it; None if it used up its CPU time.

        Raises OutOfTime or Starved at the wall deadline.
        """
        limits = self.limits
        tests = asyncio.create_task(
            self.sandbox.finish(scripts.EVAL, timeout_s=limits.grade_wall_s, keep_bytes=LOG_KEEP_BYTES)
        )
        try:
            while not (await asyncio.wait({tests}, timeout=WATCH_S))[0]:
                if await self._cpu_s(tests) > limits.grade_cpu_s:
                    return None
            result = await tests
        finally:
            tests.cancel()
            await asyncio.wait({tests})
        if result.exit_code is not None:
            return FinishedTests(result.exit_code, result.output, result.notes, result.cpu_s)
        if result.cpu_s > limits.grade_cpu_s:
            return None
        spent = f"{result.cpu_s:.0f} s of CPU time in {limits.grade_wall_s:.0f} s"
        if is_starved(result):
            raise Starved(
                f"the machine had no CPU for the tests for {result.starved_s:.0f} s: they got {spent}"
            )
        raise OutOfTime(f"waited without using CPU: {spent}", cpu_s=result.cpu_s)

    async def _cpu_s(self, tests: asyncio.Task[LastResult]) -> float:
        """CPU time of the container; 0 while it is ending, when Docker has no useful answer."""
        try:
            return await self.sandbox.cpu_s()
        except SandboxError:
            if (await asyncio.wait({tests}, timeout=WATCH_S))[0]:
                return 0.0
            raise

    async def _begin(self) -> GoverningFiles:
        task = self.claim.request.task
        if not self.sandbox.head:
            raise TaskBroken(
                f"workdir: {self.sandbox.workdir} of {task.image} is not a git repository with a commit: set the task's"
                " workdir to the repository's directory in the image"
            )
        hidden = hidden_paths(task.verdict, self.sandbox.workdir)
        await self.sandbox.put(_files(task, self.patch, hidden, self.calibration.test_files))
        return await self._governing_files((*hidden, *self.calibration.test_files))

    async def _governing_files(self, hidden: Sequence[str]) -> GoverningFiles:
        task = self.claim.request.task
        surveyed = await self.surveys.survey(
            self.sandbox, task, hidden=hidden, under_test=self.calibration.fix_paths
        )
        return GoverningFiles(task.verdict.eval_script, surveyed)

    async def _restore_runner(self, governing: GoverningFiles) -> None:
        changed = await self._succeed(scripts.changed_settings(governing))
        try:
            paths = await isolation.call(reading.tampered_settings, changed.output, governing.script)
        except GraderError as error:
            raise StepFailed(str(error)) from error
        if paths:
            listed = b"".join(path + b"\0" for path in paths)
            await self.sandbox.put([File(path=scripts.TAMPERED, content=listed)])
        await self._succeed(scripts.restore_governing(governing), self.sandbox.head)

    async def _restore_protected(self, governing: GoverningFiles) -> str | None:
        """Restores files of the hidden tests from the base commit, then applies the hidden tests.

        Returns why the patch is to blame if they cannot be applied. Raises TaskBroken if nobody could apply them.
        """
        task = self.claim.request.task
        base = self.sandbox.head if task.setup_patch.strip() else task.base_commit
        result = await self._step(scripts.restore_protected(governing), base, self.sandbox.head)
        if result.exit_code == scripts.TESTS_DO_NOT_APPLY:
            raise TaskBroken(f"the hidden tests do not apply to their base: {tail(result)}")
        if result.exit_code == scripts.IN_THE_WAY:
            return "the patch is in the way of the hidden tests"
        if result.exit_code != 0:
            raise failed_step("restoring protected files", result)
        if not isinstance(task.verdict, SwebenchLog) and task.verdict.files:
            await self.sandbox.put(task.verdict.files)
        return None

    async def _succeed(self, script: str, *arguments: str) -> CommandResult:
        result = await self._step(script, *arguments)
        if result.exit_code != 0 or result.dropped_bytes:
            raise failed_step("putting the runner's files back", result)
        return result

    async def _step(self, script: str, *arguments: str) -> CommandResult:
        return await self.sandbox.run(
            f"set -- {shlex.join(arguments)}\n{script}",
            timeout_s=STEP_S,
            keep_bytes=SETTINGS_KEEP_BYTES,
            plain=True,
        )


def _files(task: Task, patch: bytes, hidden: Sequence[str], test_files: Sequence[str]) -> list[File]:
    """The files that the scripts read. A patch may lack its last newline, without which git calls it corrupt."""
    verdict = task.verdict
    files = [
        File(path=scripts.PATCH, content=_ended(patch)),
        File(path=scripts.PROTECTED, content=_listed(hidden)),
        File(path=scripts.TESTED, content=_listed(path for path in test_files if not path.startswith("/"))),
    ]
    if isinstance(verdict, ExitCode) and verdict.test_patch.strip():
        files.append(File(path=scripts.TESTS, content=_ended(verdict.test_patch)))
    return files


def _listed(paths: Iterable[str]) -> bytes:
    return "".join(f"{path}\0" for path in paths).encode("utf-8", "surrogateescape")


def _ended(patch: bytes) -> bytes:
    return patch if patch.endswith(b"\n") else patch + b"\n"
