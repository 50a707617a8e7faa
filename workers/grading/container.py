"""One patch in one grading container: applies the patch, restores files that it must not touch, puts the hidden tests in place, and runs
them.

The tests are judged by the status with which their container ends, never by what a step prints, because code under test could
print the same.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pipeline.errors import GraderError, SandboxError
from pipeline.request import Claim, Limits
from pipeline.task import Calibration, Contradiction, ExitCode, RewardFile, SwebenchLog
from pipeline.trajectory import Reward
from workers.grading import reward_files, steps
from workers.grading.controls.drawing import NOTHING_RAN, Outcomes
from workers.grading.controls.placing import Placement, placed, write
from workers.grading.defence.before import Applied, BeforeTests
from workers.grading.defence.survey import Surveys
from workers.grading.languages.language import reporting
from workers.grading.steps import StepFailed, failed_step
from workers.grading.swebench_rules import Marks
from workers.grading.verdicts import decoded
from workers.sandbox.git import GIT, OWNER, STARTED
from workers.sandbox.protocol import BUSY_FACTOR, LastResult, Sandbox, is_starved
from workers.sandbox.users import ROOT

LOG_KEEP_BYTES = 8 * 1024 * 1024  # bytes kept of each end
WATCH_S = 5.0  # pause between two looks at the CPU time of running tests
# The tests' user executes the eval script, which is alone in its directory.
_HAND_OVER = f"{GIT}{OWNER}chmod -R a+rX {steps.GRADE_DIR} && hand_over {STARTED} "
MOVING_SHARE = 0.02  # share of a CPU that tests which wait for nothing get at a load of a hundred


class OutOfTime(StepFailed):
    """The wall deadline passed although the tests had CPU time left, and the machine had CPU to give."""


class Starved(GraderError):
    """The tests cannot be judged, because the machine had no CPU for them."""


class FailedWhileStarved(Starved):
    """Tests that do not need the fix failed twice while the machine had no CPU. The patch may be the cause of both."""

    is_own = True


@dataclass(frozen=True, slots=True)
class FinishedTests:
    """The end of a test run that finished in time."""

    exit_code: int
    output: bytes
    notes: bytes
    cpu_s: float
    was_starved: bool  # the machine had no CPU for the tests for a large part of the time


@dataclass(frozen=True, slots=True)
class PatchRun:
    """One run of the tests on a patch: the verdict that it alone would lead to, and the outcome of each test."""

    reward: Reward
    log: bytes = b""
    recorded: bytes = b""  # the encoded outcomes; empty if the eval script did not end
    wall_s: float = 0.0  # wall time of the eval script
    readable: bool = True  # the tests could be started, and their output could be parsed within limits
    notes: bytes = b""  # what came over the sandbox's side channel
    user: str = ROOT  # who ran the tests: ids of user and group
    was_starved: bool = False  # the machine had no CPU for the tests for a large part of the time

    @property
    def outcomes(self) -> Outcomes:
        """The decoded outcomes. Code under test decides how long the decoding takes."""
        return decoded(self.recorded) if self.recorded else NOTHING_RAN


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

    @property
    def before(self) -> BeforeTests:
        """The steps before the tests, without the eval script."""
        return BeforeTests(self.claim.request.task, self.sandbox, self.patch, self.calibration, self.surveys)

    async def apply(self) -> Applied:
        """Applies the patch and puts the hidden tests in place. Files that a patch must not touch are restored.

        Raises StepFailed and CannotWrite for failures that may be the patch's fault.
        """
        return await self.before.apply()

    async def put_script(self, contradictions: Sequence[Contradiction]) -> None:
        """Makes these expectations of the hidden tests wrong and puts the eval script in place, alone in its directory.

        Call it between `apply` and `run_tests`. Raises NotAsCalibrated.
        """
        verdict = self.claim.request.task.verdict
        placement = Placement(verdict.eval_script)
        if contradictions:
            placement = await placed(self.sandbox, verdict.eval_script, contradictions)
        script = placement.script
        if isinstance(verdict, SwebenchLog):
            script = self.marks.in_script(script)
        content = script.encode("utf-8", "surrogateescape")
        if isinstance(verdict, ExitCode):
            content = reporting(content)
        if isinstance(verdict, RewardFile):
            content = await reward_files.prepared(self.sandbox, verdict, content)
        await write(self.sandbox, {**placement.texts, steps.EVAL: content})

    async def hand_over(self) -> None:
        """Gives to the tests' user what the steps before the tests, which are root's, have made. `run_tests` calls this first."""
        if self.sandbox.user == self.sandbox.start.owner == ROOT:
            return
        result = await self.sandbox.run(_HAND_OVER + self.sandbox.user, timeout_s=steps.STEP_S, plain=True)
        if result.exit_code != 0:
            raise failed_step("giving files to the tests' user", result)

    async def run_tests(self) -> FinishedTests | None:
        """The end of the eval script, and of the container with it; None if it used up its CPU time.

        Tests that still get CPU time at the wall deadline continue, up to BUSY_FACTOR times as long, so that on a busy machine their CPU
        time decides later. Raises OutOfTime or Starved if it never does.
        """
        limits = self.limits
        longest_s = BUSY_FACTOR * limits.grade_wall_s
        await self.hand_over()
        tests = asyncio.create_task(
            self.sandbox.finish(steps.EVAL, timeout_s=longest_s, keep_bytes=LOG_KEEP_BYTES), name="tests"
        )
        try:
            seen = await self._watch(tests)
            if seen == "cpu time used up":
                return None
            result = await tests
        finally:
            tests.cancel()
            await asyncio.wait({tests})
        if result.exit_code is not None and seen == "ended":
            return FinishedTests(
                result.exit_code, result.output, result.notes, result.cpu_s, is_starved(result)
            )
        if result.cpu_s > limits.grade_cpu_s:
            return None
        wall_s = limits.grade_wall_s if seen == "stopped" else longest_s
        spent = f"{result.cpu_s:.0f} s of CPU time in {wall_s:.0f} s"
        if is_starved(result):
            raise Starved(
                f"the machine had no CPU for the tests for {result.starved_s:.0f} s: they got {spent}"
            )
        raise OutOfTime(f"waited without using CPU: {spent}", cpu_s=result.cpu_s)

    async def _watch(
        self, tests: asyncio.Task[LastResult]
    ) -> Literal["ended", "stopped", "cpu time used up"]:
        """Checks the CPU time of running tests until they end, and kills them once they no longer get any after the wall deadline."""
        limits, began_at = self.limits, time.monotonic()
        seen_at, seen_s = began_at, float("inf")
        while True:
            left_s = began_at + limits.grade_wall_s - time.monotonic()
            # The last look before the deadline is at least WATCH_S before it, so that the CPU time in between is large enough to compare.
            pause_s = left_s if 0 < left_s <= 2 * WATCH_S else WATCH_S
            if (await asyncio.wait({tests}, timeout=pause_s))[0]:
                return "ended"
            cpu_s, now = await self._cpu_s(tests), time.monotonic()
            if cpu_s > limits.grade_cpu_s:
                return "cpu time used up"
            goes_on = cpu_s - seen_s >= MOVING_SHARE * (now - seen_at)
            if now >= began_at + limits.grade_wall_s and not goes_on and not tests.done():
                with suppress(SandboxError):  # the container may have just ended by itself
                    await self.sandbox.interrupt()
                return "stopped"
            seen_at, seen_s = now, cpu_s

    async def _cpu_s(self, tests: asyncio.Task[LastResult]) -> float:
        """The CPU time of the container; 0 while it is ending, when Docker has no useful answer."""
        try:
            return await self.sandbox.cpu_s()
        except SandboxError:
            if (await asyncio.wait({tests}, timeout=WATCH_S))[0]:
                return 0.0
            raise
