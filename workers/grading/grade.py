"""The grader: a fresh container, the patch, the hidden tests, a verdict.

An infrastructure failure is never a verdict: whatever breaks raises GraderError, and TaskBroken where no
other try helps. A patch that does not apply, tests that fail and tests that use up their CPU time are
verdicts. No step is believed by what it prints, which code under test could print too, but by its exit status
alone, which comes over the sandbox's own channel.
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
from pipeline.task import ExitCode, File, SwebenchLog, Task
from pipeline.trajectory import Reward
from workers.grading import scripts, swebench_rules
from workers.grading.runner import contradiction, same_pytest_settings, touches_runner
from workers.sandbox.command import CommandResult
from workers.sandbox.docker import DockerSandbox, DockerSandboxes

STEP_S = 300.0  # for each step before the tests
LOG_KEEP_BYTES = 8 * 1024 * 1024  # of each end
LOG_TAIL_CHARS = 4000
WATCH_S = 5.0  # between looks at the CPU time of running tests


class Grader:
    """Grades patches, each in a container of its own."""

    def __init__(self, sandboxes: DockerSandboxes) -> None:
        self._sandboxes = sandboxes

    async def grade(self, claim: Claim, patch: bytes) -> Reward:
        """What `patch` is worth.

        Raises GraderError, TaskBroken or ImageMissing; never returns for a failure of ours.
        """
        _check(claim.request.task)
        if not patch.strip():
            return Reward(value=0.0, resolved=False, decided_by="empty patch")
        started = time.monotonic()
        try:
            async with self._sandboxes.open(claim, role="grade") as sandbox:
                reward = await _Grading(claim, sandbox).grade(patch)
        except ImageMissing:
            raise
        except SandboxError as error:
            raise GraderError(f"the grading container failed: {error}") from error
        return replace(reward, grade_s=time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Grading:
    """One patch in one container."""

    claim: Claim
    sandbox: DockerSandbox

    async def grade(self, patch: bytes) -> Reward:
        task = self.claim.request.task
        if not self.sandbox.head:
            raise TaskBroken(f"{task.workdir} of {task.image} is not a git repository with a commit")
        marks = swebench_rules.Marks()
        await self.sandbox.put(_files(task, patch, marks))
        applied_by = await self._apply(patch)
        if not applied_by:
            return Reward(value=0.0, resolved=False, decided_by="patch does not apply")
        await self._restore_protected()
        result = await self._run_tests()
        if result is None:
            cpu_s = self.claim.request.limits.grade_cpu_s
            return Reward(
                value=0.0,
                resolved=False,
                decided_by="cpu time used up",
                applied_by=applied_by,
                grade_cpu_s=cpu_s,
            )
        log = marks.in_log(result.output.decode("utf-8", "replace"))
        cpu_s, reward = await asyncio.gather(
            self.sandbox.cpu_s(), asyncio.to_thread(_judge, task, result.exit_code, log)
        )
        return replace(reward, applied_by=applied_by, grade_cpu_s=cpu_s, log_tail=log[-LOG_TAIL_CHARS:])

    async def _apply(self, patch: bytes) -> str:
        """The rung of the ladder that took the patch, "" if none did; what governs the runner is put back."""
        touches = touches_runner(patch)
        if touches:
            await self._succeed(scripts.SAVE)
        result = await self._step(scripts.APPLY)
        if result.exit_code == scripts.DOES_NOT_APPLY:
            return ""
        if result.exit_code not in scripts.APPLIED_BY:
            raise _broken_step("applying the patch", result)
        if touches:
            await self._restore_runner()
        return scripts.APPLIED_BY[result.exit_code]

    async def _restore_runner(self) -> None:
        changed = await self._succeed(scripts.CHANGED_SETTINGS)
        tampered = b"".join(path + b"\0" for path in _tampered_settings(changed.output))
        if tampered:
            await self.sandbox.put([File(path=scripts.TAMPERED, content=tampered)])
        await self._succeed(scripts.RESTORE_CONTROL)

    async def _restore_protected(self) -> None:
        """Files of the hidden tests as at the base commit, then the hidden tests themselves."""
        task = self.claim.request.task
        result = await self._step(scripts.RESTORE_PROTECTED, task.base_commit, self.sandbox.head)
        if result.exit_code == scripts.TESTS_DO_NOT_APPLY:
            raise TaskBroken(f"the hidden tests do not apply to their base: {_tail(result)}")
        if result.exit_code != 0:
            raise _broken_step("restoring protected files", result)
        if isinstance(task.verdict, ExitCode) and task.verdict.files:
            await self.sandbox.put(task.verdict.files)

    async def _run_tests(self) -> CommandResult | None:
        """How the eval script ended; None if it used up its CPU time."""
        limits = self.claim.request.limits
        tests = asyncio.create_task(
            self.sandbox.run(
                f"exec bash {scripts.EVAL}", timeout_s=limits.grade_wall_s, keep_bytes=LOG_KEEP_BYTES
            )
        )
        try:
            while not (await asyncio.wait({tests}, timeout=WATCH_S))[0]:
                if await self.sandbox.cpu_s() > limits.grade_cpu_s:
                    return None
            result = await tests
        finally:
            tests.cancel()
            await asyncio.wait({tests})
        if result.exit_code is None:
            cpu_s = await self.sandbox.cpu_s()
            if cpu_s > limits.grade_cpu_s:
                return None
            raise GraderError(
                f"the tests took {limits.grade_wall_s:.0f} s but only {cpu_s:.0f} s of CPU time"
            )
        return result

    async def _succeed(self, script: str) -> CommandResult:
        result = await self._step(script)
        if result.exit_code != 0 or result.dropped_bytes:
            raise _broken_step("putting the runner's files back", result)
        return result

    async def _step(self, script: str, *arguments: str) -> CommandResult:
        return await self.sandbox.run(f"set -- {shlex.join(arguments)}\n{script}", timeout_s=STEP_S)


def _check(task: Task) -> None:
    """Raises TaskBroken for a task that cannot be graded."""
    verdict = task.verdict
    if not verdict.eval_script.strip():
        raise TaskBroken("eval_script is empty: any patch would do")
    for path in verdict.protected_paths:
        if (
            path.startswith("/")
            or "\0" in path
            or posixpath.normpath(path).split("/")[0] in (".", "..", ".git")
        ):
            raise TaskBroken(f"protected_paths: {path!r} is not a path inside the repository")
    if isinstance(verdict, SwebenchLog):
        swebench_rules.check(verdict)


def _files(task: Task, patch: bytes, marks: swebench_rules.Marks) -> list[File]:
    """What the scripts read. A patch may lack its last newline, without which git calls it corrupt."""
    verdict = task.verdict
    script = marks.in_script(verdict.eval_script) if isinstance(verdict, SwebenchLog) else verdict.eval_script
    protected = "".join(f"{path}\0" for path in verdict.protected_paths)
    files = [
        File(path=scripts.PATCH, content=_ended(patch)),
        File(path=scripts.EVAL, content=script.encode("utf-8", "surrogateescape")),
        File(path=scripts.PROTECTED, content=protected.encode("utf-8", "surrogateescape")),
    ]
    if isinstance(verdict, ExitCode) and verdict.test_patch.strip():
        files.append(File(path=scripts.TESTS, content=_ended(verdict.test_patch)))
    return files


def _ended(patch: bytes) -> bytes:
    return patch if patch.endswith(b"\n") else patch + b"\n"


def _tampered_settings(listing: bytes) -> list[bytes]:
    """Paths out of CHANGED_SETTINGS' lines whose old and new content say different things to pytest."""
    tampered: list[bytes] = []
    for line in listing.splitlines():
        try:
            path, old, new = (None if word == b"-" else base64.b64decode(word) for word in line.split(b" "))
        except (ValueError, binascii.Error) as error:
            raise GraderError(f"unreadable list of settings files: {line[:200]!r}") from error
        assert path is not None
        if not same_pytest_settings(posixpath.basename(path.decode("utf-8", "replace")), old, new):
            tampered.append(path)
    return tampered


def _judge(task: Task, exit_code: int | None, log: str) -> Reward:
    match task.verdict:
        case ExitCode(eval_script=script):
            belied = contradiction(script, log) if exit_code == 0 else None
            decided_by = f"exit status {exit_code}" + (f", but {belied}" if belied else "")
            resolved = exit_code == 0 and belied is None
            return Reward(value=float(resolved), resolved=resolved, decided_by=decided_by)
        case SwebenchLog() as verdict:
            report = swebench_rules.report(verdict, task.id, log)
            return Reward(
                value=float(report.resolved),
                resolved=report.resolved,
                decided_by=f"swebench: {report.status}",
                fail_to_pass=report.fail_to_pass,
                pass_to_pass=report.pass_to_pass,
            )


def _broken_step(doing: str, result: CommandResult) -> GraderError:
    how = "took too long" if result.exit_code is None else f"ended with status {result.exit_code}"
    return GraderError(f"{doing} {how}: {_tail(result)}")


def _tail(result: CommandResult) -> str:
    return result.output[-500:].decode("utf-8", "replace").strip()
