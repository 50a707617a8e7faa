"""The grader: applies a patch and the hidden tests in a new container, runs the tests and returns a verdict.

An infrastructure failure is never a verdict: it raises GraderError, or TaskBroken where no other try helps. A patch that
does not apply, tests that fail and tests that use up their CPU time are verdicts. No step is judged by what it prints,
because code under test could print the same. Steps before the tests are judged by the exit status that the container's
first process reports, since no code of the patch has run by then; the tests by the status that their container ends with.
"""

import asyncio
import base64
import binascii
import posixpath
import shlex
import time
from dataclasses import dataclass

from msgspec.structs import replace

from pipeline.errors import GraderError, ImageMissing, SandboxError, TaskBroken
from pipeline.request import Claim
from pipeline.task import ExitCode, File, SwebenchLog, Task, TestsJson
from pipeline.trajectory import Reward
from workers.grading import scripts, witness
from workers.grading.governing import GoverningFiles, hides_names, same_runner_settings
from workers.grading.swebench_rules import Marks
from workers.grading.verdicts import Evidence, check, judge
from workers.sandbox.protocol import CommandResult, LastResult, Sandbox, Sandboxes

STEP_S = 300.0  # for each step before the tests, and for a parser
LOG_KEEP_BYTES = 8 * 1024 * 1024  # of each end
SETTINGS_KEEP_BYTES = 16 * 1024 * 1024  # of the contents of settings files that a patch touches
LOG_TAIL_CHARS = 4000
WATCH_S = 5.0  # between looks at the CPU time of running tests


@dataclass(frozen=True, slots=True)
class Graded:
    """A verdict and the log that it was made of: the eval script's, or what git said of a patch that does not apply."""

    reward: Reward
    log: str


class Grader:
    """Grades patches, each in a container of its own."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    async def grade(self, claim: Claim, patch: bytes) -> Reward:
        """What `patch` is worth. Raises GraderError, TaskBroken or ImageMissing for a failure that is not the patch's."""
        return (await self.grade_with_log(claim, patch)).reward

    async def grade_with_log(self, claim: Claim, patch: bytes) -> Graded:
        """The same, with the whole log, of which the reward has the end."""
        check(claim.request.task)
        if not patch.strip():
            return Graded(Reward(value=0.0, resolved=False, decided_by="empty patch"), "")
        started = time.monotonic()
        try:
            graded = await self._grade(claim, patch)
        except ImageMissing:
            raise
        except SandboxError as error:
            raise GraderError(f"the grading container failed: {error}") from error
        reward = replace(
            graded.reward, log_tail=graded.log[-LOG_TAIL_CHARS:], grade_s=time.monotonic() - started
        )
        return Graded(reward, graded.log)

    async def _grade(self, claim: Claim, patch: bytes) -> Graded:
        task = claim.request.task
        marks = Marks()
        async with self._sandboxes.open(claim, role="grade") as sandbox:
            governing = GoverningFiles(task.verdict.eval_script, sandbox.workdir)
            grading = _Grading(claim, sandbox, patch, marks, governing)
            applied_by, complaints = await grading.apply()
            if not applied_by:
                return Graded(
                    Reward(value=0.0, resolved=False, decided_by="patch does not apply"), complaints
                )
            result = await grading.run_tests()
        if result is None:
            reward = Reward(value=0.0, resolved=False, decided_by="cpu time used up")
            cpu_s = claim.request.limits.grade_cpu_s
            return Graded(replace(reward, applied_by=applied_by, grade_cpu_s=cpu_s), "")
        log = marks.in_log(result.output.decode("utf-8", "replace"))
        evidence = Evidence(
            patch=patch,
            exit_code=result.exit_code,
            log=log,
            runs=witness.testimony(result.notes),
            parsed=await self._parsed(claim, task.verdict, log)
            if isinstance(task.verdict, TestsJson)
            else None,
        )
        reward = await asyncio.to_thread(judge, task, evidence)
        return Graded(replace(reward, applied_by=applied_by, grade_cpu_s=result.cpu_s), log)

    async def _parsed(self, claim: Claim, verdict: TestsJson, log: str) -> bytes | None:
        """The output of the verdict's parser for `log`, in a container where no code of the patch ever ran. None if it failed."""
        files = [
            File(path=scripts.PARSER, content=verdict.parser.encode("utf-8", "surrogateescape")),
            File(path=scripts.LOG, content=log.encode("utf-8", "surrogateescape")),
            File(path=scripts.NO_LOG, content=b""),
        ]
        async with self._sandboxes.open(claim, role="grade") as sandbox:
            await sandbox.put(files)
            result = await sandbox.run(scripts.PARSE, timeout_s=STEP_S, keep_bytes=LOG_KEEP_BYTES)
        if result.exit_code is None:
            raise GraderError(f"the parser took longer than {STEP_S:.0f} s")
        if result.exit_code == scripts.NO_PYTHON:
            raise TaskBroken(f"{claim.request.task.image} has no python3 to run the parser with")
        return result.output if result.exit_code == 0 and not result.dropped_bytes else None


@dataclass(frozen=True, slots=True)
class _Tests:
    """How a test run ended that finished in time."""

    exit_code: int
    output: bytes
    notes: bytes
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Grading:
    """One patch in one container."""

    claim: Claim
    sandbox: Sandbox
    patch: bytes
    marks: Marks
    governing: GoverningFiles

    async def apply(self) -> tuple[str, str]:
        """Applies the patch and puts the hidden tests in place. Files that a patch must not touch are restored.

        Returns the command that applied the patch, "" if none could, and what the commands printed.
        """
        task = self.claim.request.task
        if not self.sandbox.head:
            raise TaskBroken(
                f"workdir: {self.sandbox.workdir} of {task.image} is not a git repository with a commit: set the task's"
                " workdir to the repository's directory in the image"
            )
        await self.sandbox.put(_files(task, self.patch, self.marks))
        touches = self.governing.touched_by(self.patch)
        if touches:
            await self._succeed(scripts.save(self.governing))
        result = await self._step(scripts.apply(self.governing, loosely=not hides_names(self.patch)))
        complaints = result.output.decode("utf-8", "replace")
        if result.exit_code == scripts.DOES_NOT_APPLY:
            return "", complaints
        if result.exit_code not in scripts.APPLIED_BY:
            raise _broken_step("applying the patch", result)
        if touches:
            await self._restore_runner()
        await self._restore_protected()
        return scripts.APPLIED_BY[result.exit_code], complaints

    async def run_tests(self) -> _Tests | None:
        """How the eval script ended, and the container with it; None if it used up its CPU time."""
        limits = self.claim.request.limits
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
            return _Tests(result.exit_code, result.output, result.notes, result.cpu_s)
        if result.cpu_s > limits.grade_cpu_s:
            return None
        raise GraderError(
            f"the tests took {limits.grade_wall_s:.0f} s but only {result.cpu_s:.0f} s of CPU time"
        )

    async def _cpu_s(self, tests: asyncio.Task[LastResult]) -> float:
        """CPU time of the container; 0 while it is ending, when Docker has no useful answer."""
        try:
            return await self.sandbox.cpu_s()
        except SandboxError:
            if (await asyncio.wait({tests}, timeout=WATCH_S))[0]:
                return 0.0
            raise

    async def _restore_runner(self) -> None:
        changed = await self._succeed(scripts.changed_settings(self.governing))
        tampered = b"".join(path + b"\0" for path in self._tampered_settings(changed.output))
        if tampered:
            await self.sandbox.put([File(path=scripts.TAMPERED, content=tampered)])
        await self._succeed(scripts.restore_governing(self.governing))

    def _tampered_settings(self, listing: bytes) -> list[bytes]:
        """The paths in the output of `changed_settings` whose old and new content tell the runner different things."""
        tampered: list[bytes] = []
        for line in listing.splitlines():
            try:
                path, old, new = (
                    None if word == b"-" else base64.b64decode(word) for word in line.split(b" ")
                )
            except (ValueError, binascii.Error) as error:
                raise GraderError(f"unreadable list of settings files: {line[:200]!r}") from error
            assert path is not None
            name = posixpath.basename(path.decode("utf-8", "replace"))
            if not same_runner_settings(name, old, new, self.governing.script):
                tampered.append(path)
        return tampered

    async def _restore_protected(self) -> None:
        """Restores files of the hidden tests from the base commit, then applies the hidden tests."""
        task = self.claim.request.task
        base = self.sandbox.head if task.setup_patch.strip() else task.base_commit
        result = await self._step(scripts.RESTORE_PROTECTED, base, self.sandbox.head)
        if result.exit_code == scripts.TESTS_DO_NOT_APPLY:
            raise TaskBroken(f"the hidden tests do not apply to their base: {_tail(result)}")
        if result.exit_code != 0:
            raise _broken_step("restoring protected files", result)
        if not isinstance(task.verdict, SwebenchLog) and task.verdict.files:
            await self.sandbox.put(task.verdict.files)

    async def _succeed(self, script: str) -> CommandResult:
        result = await self._step(script)
        if result.exit_code != 0 or result.dropped_bytes:
            raise _broken_step("putting the runner's files back", result)
        return result

    async def _step(self, script: str, *arguments: str) -> CommandResult:
        return await self.sandbox.run(
            f"set -- {shlex.join(arguments)}\n{script}",
            timeout_s=STEP_S,
            keep_bytes=SETTINGS_KEEP_BYTES,
            plain=True,
        )


def _files(task: Task, patch: bytes, marks: Marks) -> list[File]:
    """The files that the scripts read. A patch may lack its last newline, without which git calls it corrupt."""
    verdict = task.verdict
    script = marks.in_script(verdict.eval_script) if isinstance(verdict, SwebenchLog) else verdict.eval_script
    hidden = () if isinstance(verdict, SwebenchLog) else verdict.files
    inside = [file.path for file in hidden if not file.path.startswith(("/", ".."))]
    protected = "".join(f"{path}\0" for path in dict.fromkeys((*verdict.protected_paths, *inside)))
    files = [
        File(path=scripts.PATCH, content=_ended(patch)),
        File(path=scripts.EVAL, content=script.encode("utf-8", "surrogateescape")),
        File(path=scripts.PROTECTED, content=protected.encode("utf-8", "surrogateescape")),
        File(path=scripts.WITNESS, content=witness.installer()),
    ]
    if isinstance(verdict, ExitCode) and verdict.test_patch.strip():
        files.append(File(path=scripts.TESTS, content=_ended(verdict.test_patch)))
    return files


def _ended(patch: bytes) -> bytes:
    return patch if patch.endswith(b"\n") else patch + b"\n"


def _broken_step(doing: str, result: CommandResult) -> GraderError:
    how = "took too long" if result.exit_code is None else f"ended with status {result.exit_code}"
    return GraderError(f"{doing} {how}: {_tail(result)}")


def _tail(result: CommandResult) -> str:
    return result.output[-500:].decode("utf-8", "replace").strip()
