"""How strong are a task's tests? Partial fixes are graded by the production grader; the share that passes is the task's weakness."""

import asyncio
import base64
import binascii
import random
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.request import Claim, Limits
from pipeline.task import ExitCode, SwebenchLog, Task
from pipeline.taskfile import Gold, Strength, fingerprint
from workers.grading.grade import Graded
from workers.grading.witness import touched_paths
from workers.sandbox.protocol import CommandResult
from workers.unqueued.attempts import Broken, tried
from workers.unqueued.claims import unqueued_claim
from workers.verify.partial_fixes import PartialFix, partial_fixes, touched_files

DOES_NOT_APPLY = "patch does not apply"  # as the grader decides it
READ_S = 60.0
KEEP_BYTES = 32 * 1024 * 1024  # of the contents of all files that a fix touches

# A line in base64 for each of the arguments, "-" for what is no file.
_READ = 'for path; do if [ -f "$path" ]; then base64 -w 0 -- "$path" && echo || exit 1; else echo -; fi; done'


class GradesPartialFixes(Protocol):
    """The production grader. Raises RolloutError; never returns a verdict for an infrastructure failure."""

    async def grade_with_log(self, claim: Claim, patch: bytes) -> Graded: ...


class Base(Protocol):
    """A container of the task, set up, in which no patch is. Raises SandboxError."""

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int = 0, plain: bool = False
    ) -> CommandResult: ...


class OpensBases(Protocol):
    """Opens a container of the claim's task as the grader does."""

    def open(self, claim: Claim, *, role: Literal["grade"]) -> AbstractAsyncContextManager[Base]: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """The strength of a task's tests; None if no partial fix could be graded. `warning` says what could not."""

    strength: Strength | None
    warning: str = ""


@dataclass(frozen=True, slots=True)
class StrengthMeter:
    """Grades partial fixes of tasks, at most `most` of each task."""

    grader: GradesPartialFixes
    sandboxes: OpensBases
    limits: Limits
    most: int
    image_fix: str  # what to do about an image that is not on this host

    async def measure(self, task: Task, gold: Gold, *, on_fix: Callable[[int, int], None]) -> Measured:
        """The strength of the tests of a calibrated task; `on_fix` is given the number of the partial fix that begins, and of all."""
        fix = gold.patch.encode("utf-8", "surrogateescape")
        paths = touched_files(fix)
        texts = await tried(lambda: self._texts(task, paths), task, image_fix=self.image_fix)
        if isinstance(texts, Broken):
            return Measured(None, f"strength: the files of the fix could not be read: {texts.why}")
        chance = random.Random(fingerprint(task))
        made = await asyncio.to_thread(
            partial_fixes, fix, texts, tests=_test_paths(task, gold), most=self.most, chance=chance
        )
        num_graded, broken = 0, list[str]()
        passing: list[PartialFix] = []
        for number, one in enumerate(made, 1):
            on_fix(number, len(made))
            graded = await self._graded(task, one.patch)
            if isinstance(graded, Broken):
                broken.append(graded.why)
            elif graded.reward.decided_by != DOES_NOT_APPLY:
                num_graded += 1
                passing += [one] * graded.reward.resolved
        warning = (
            f"strength: {len(broken)} of {len(made)} partial fixes could not be graded: {broken[0]}"
            if broken
            else ""
        )
        if broken and not num_graded:
            return Measured(None, warning)
        return Measured(
            Strength(num_partial_fixes=num_graded, passing=tuple(one.what for one in passing)), warning
        )

    async def _graded(self, task: Task, patch: bytes) -> Graded | Broken:
        claim = unqueued_claim(task, command="verify", limits=self.limits)
        return await tried(lambda: self.grader.grade_with_log(claim, patch), task, image_fix=self.image_fix)

    async def _texts(self, task: Task, paths: Sequence[str]) -> dict[str, bytes]:
        """The contents of these files in the workdir, without those that are not there or too large to keep."""
        claim = unqueued_claim(task, command="verify", limits=self.limits)
        async with self.sandboxes.open(claim, role="grade") as base:
            command = f"set -- {shlex.join(paths)}\n{_READ}"
            result = await base.run(command, timeout_s=READ_S, keep_bytes=KEEP_BYTES, plain=True)
        lines = result.output.splitlines()
        if result.exit_code != 0 or result.dropped_bytes or len(lines) != len(paths):
            return {}
        try:
            return {
                path: base64.b64decode(line, validate=True)
                for path, line in zip(paths, lines, strict=True)
                if line != b"-"
            }
        except binascii.Error:
            return {}


def _test_paths(task: Task, gold: Gold) -> frozenset[str]:
    """Paths of the hidden tests, a change of which is no part of a fix."""
    verdict = task.verdict
    files = () if isinstance(verdict, SwebenchLog) else verdict.files
    patch = gold.test_patch.encode("utf-8", "surrogateescape")
    patch += verdict.test_patch if isinstance(verdict, ExitCode) else b""
    return frozenset((*verdict.protected_paths, *(file.path for file in files), *touched_paths(patch)))
