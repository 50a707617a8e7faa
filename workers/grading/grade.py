"""The grader: runs the hidden tests on a patch in a new container, and in another one with a contradicted expectation.

Which of the two comes first is drawn by chance, so that no code can conclude from the time, or from traces of an earlier run outside of its
container, whether its run is a control. An infrastructure failure is never a verdict: it raises GraderError, or TaskBroken if no other try
helps. A patch that does not apply, tests that fail, tests that use up their CPU time and tests that cannot fail are verdicts. So are all
other effects of the patch or its code: a step that fails is tried without the patch, and if it succeeds there, the reward is 0.
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pipeline.errors import GraderError, ImageMissing, SandboxError, SandboxRuined, TaskBroken
from pipeline.message import MalformedMessage
from pipeline.request import Claim, Limits
from pipeline.task import Calibration, Contradiction, File, RewardFile, TestsJson, unpack
from pipeline.telemetry import span
from pipeline.trajectory import Reward
from workers.grading import steps
from workers.grading.container import (
    LOG_KEEP_BYTES,
    FailedWhileStarved,
    FinishedTests,
    GradingContainer,
    OutOfTime,
    PatchRun,
)
from workers.grading.controls.drawing import Chance, few
from workers.grading.controls.placing import NotAsCalibrated, alike
from workers.grading.defence.before import NOT_APPLIED
from workers.grading.defence.control import Controls, as_expected, failed_by_chance
from workers.grading.defence.survey import Surveys
from workers.grading.steps import StepFailed, failed_step
from workers.grading.swebench_rules import Marks
from workers.grading.verdicts import LOG_TAIL_CHARS, Remains, check, judged, readable
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded, ProcessLost
from workers.sandbox.protocol import CannotWrite, Sandboxes, is_starved

NAME_CHARS = 200  # length of a name that a patch chose for a file there


class NoReward(StepFailed):
    """The eval script of a reward_file verdict left no reward that can be read."""


@dataclass(frozen=True, slots=True)
class Graded:
    """A verdict and the log that it is based on: the eval script's, or git's output about a patch that does not apply."""

    reward: Reward
    log: str


class Grader:
    """Grades patches, each run of the tests in a container of its own. Graders of one process may share their `surveys`."""

    def __init__(
        self, sandboxes: Sandboxes, chance: Chance | None = None, surveys: Surveys | None = None
    ) -> None:
        self._sandboxes = sandboxes
        self._surveys = surveys or Surveys()
        self._chance = chance or random.SystemRandom()

    async def grade(self, claim: Claim, patch: bytes) -> Reward:
        """The reward of `patch`. Raises GraderError, TaskBroken or ImageMissing for a failure that is not the patch's."""
        return (await self._grade(claim, patch)).reward

    async def grade_with_log(self, claim: Claim, patch: bytes) -> Graded:
        """The same, with the whole log; the reward contains only its end."""
        tested = await self._grade(claim, patch)
        return Graded(tested.reward, tested.log.decode())

    async def can_apply(self, claim: Claim, patch: bytes) -> bool:
        """Whether any of the ways to apply a patch takes this one. No test runs. Raises the errors of `grade`."""
        check(claim.request.task)
        calibration = _calibration(claim) or Calibration()
        with _as_grader_errors():
            async with self._sandboxes.open(claim, role="grade") as sandbox:
                limits = claim.request.limits
                container = GradingContainer(
                    claim, sandbox, patch, Marks(), limits, calibration, self._surveys
                )
                try:
                    return (await container.apply()).fault != NOT_APPLIED
                except (StepFailed, CannotWrite, SandboxRuined):
                    return True  # grading decides whose fault that is

    async def _grade(self, claim: Claim, patch: bytes) -> PatchRun:
        check(claim.request.task)
        calibration = _calibration(claim)
        if not patch.strip():
            return PatchRun(Reward(value=0.0, resolved=False, decided_by="empty patch"))
        started = time.monotonic()
        try:
            tested = await self._tested(claim, patch, calibration or Calibration())
        except LimitExceeded as error:
            tested = _unresolved(f"the outcomes of the tests could not be compared {error}")
        except ProcessLost as error:
            raise GraderError(str(error)) from error
        reward = replace(tested.reward, grade_s=time.monotonic() - started)
        return dataclasses.replace(tested, reward=reward)

    async def _tested(self, claim: Claim, patch: bytes, calibration: Calibration) -> PatchRun:
        """The true run, combined with the results of the control runs before and after it."""
        controls = Controls(self.run_tests, self._chance, claim, patch, calibration)
        failed = await controls.run_before()
        if failed is not None:
            return failed
        tested = await self._true_run(claim, patch, calibration)
        if missing := await failed_by_chance(tested, calibration):
            again = await self._true_run(claim, patch, calibration)
            decided_by = f"{again.reward.decided_by}, in a second run, because {few(missing)} did not pass in the first"
            cpu_s = tested.reward.grade_cpu_s + again.reward.grade_cpu_s
            # A runner's own deadlines run on a machine without CPU, too.
            if again.was_starved and (missing := await failed_by_chance(again, calibration)):
                raise FailedWhileStarved(
                    f"the machine had no CPU for the tests: {few(missing)} did not pass in two runs"
                )
            reward = replace(again.reward, decided_by=decided_by, grade_cpu_s=cpu_s)
            tested = dataclasses.replace(again, reward=reward)
        return await controls.run_after(tested) if tested.reward.resolved else tested

    async def _true_run(self, claim: Claim, patch: bytes, calibration: Calibration) -> PatchRun:
        """A run without contradictions, whose pass has all tests that the known fix passes."""
        tested = await self.run_tests(claim, patch)
        if tested.reward.resolved and calibration.passing:
            with span("expected tests"):
                tested = await as_expected(tested, calibration)
        return tested

    async def run_tests(
        self,
        claim: Claim,
        patch: bytes,
        contradictions: Sequence[Contradiction] = (),
        limits: Limits | None = None,
        *,
        at_start: str = "",
    ) -> PatchRun:
        """Runs the hidden tests once in a new container, with these expectations contradicted. Every Python runs `at_start` first.

        Raises Starved at the wall deadline of a machine without CPU, and the errors of `grade`.
        """
        limits = limits or claim.request.limits
        with _as_grader_errors():
            try:
                return await self._run_tests(claim, patch, contradictions, limits, at_start)
            except (StepFailed, NotAsCalibrated, CannotWrite, SandboxRuined) as failure:
                with span("without the patch"):
                    await self._do_without_patch(claim, contradictions, failure)
                return _blamed(failure)

    async def _do_without_patch(
        self, claim: Claim, contradictions: Sequence[Contradiction], failure: Exception
    ) -> None:
        """Takes the steps before the tests in a new container without a patch; after NoReward also runs the tests.

        Raises the errors of steps, which no patch has caused.
        """
        marks = Marks()
        calibration = _calibration(claim) or Calibration()
        async with self._sandboxes.open(claim, role="grade") as sandbox:
            container = GradingContainer(
                claim, sandbox, b"", marks, claim.request.limits, calibration, self._surveys
            )
            await container.before.do_without_patch()
            await container.put_script(alike(contradictions, calibration.contradictions))
            if not isinstance(failure, NoReward):
                await container.hand_over()
                return
            result = await container.run_tests()
        if result is None:
            raise failure
        await self._judged(claim, b"", result, marks, ())

    async def _run_tests(
        self,
        claim: Claim,
        patch: bytes,
        contradictions: Sequence[Contradiction],
        limits: Limits,
        at_start: str,
    ) -> PatchRun:
        marks = Marks()
        async with self._sandboxes.open(claim, role="grade") as sandbox:
            calibration = _calibration(claim) or Calibration()
            if calibration.passing and calibration.user != sandbox.user:
                raise TaskBroken(
                    f"calibration: made with tests that ran as user {calibration.user}, but those of {sandbox.image} run as"
                    f" {sandbox.user}: run workers.verify on the task again"
                )
            container = GradingContainer(claim, sandbox, patch, marks, limits, calibration, self._surveys)
            with span("apply patch"):
                applied = await container.apply()
            if applied.fault:
                return _unresolved(applied.fault, applied_by=applied.by, log=applied.complaints.encode())
            if at_start:
                await container.before.run_at_start(at_start)
            with span("place tests"):
                await container.put_script(alike(contradictions, calibration.contradictions))
            started = time.monotonic()
            with span("run tests"):
                result = await container.run_tests()
            wall_s = time.monotonic() - started
        if result is None:
            tested = _unresolved("cpu time used up", applied_by=applied.by)
            return dataclasses.replace(tested, reward=replace(tested.reward, grade_cpu_s=limits.grade_cpu_s))
        with span("verdict"):
            tested = await self._judged(claim, patch, result, marks, applied.restored)
        if applied.put_back and not tested.reward.resolved:
            tested = _explained(tested, applied.put_back, applied.searched)
        reward = replace(tested.reward, applied_by=applied.by, grade_cpu_s=result.cpu_s)
        return dataclasses.replace(
            tested, reward=reward, wall_s=wall_s, user=sandbox.user, was_starved=result.was_starved
        )

    async def _judged(
        self, claim: Claim, patch: bytes, ran: FinishedTests, marks: Marks, restored: tuple[str, ...]
    ) -> PatchRun:
        """The verdict on a finished run of the tests, whose output may be impossible to read in bounded time."""
        task, log, parsed = claim.request.task, b"", None
        try:
            log = await isolation.call(readable, ran.output, marks)
            if isinstance(task.verdict, TestsJson):
                parsed = await self._parsed(claim, task.verdict, log)
            remains = Remains(patch, ran.exit_code, log, ran.notes, parsed, restored)
            found = await isolation.call(judged, task, remains)
        except GraderError as error:
            if not isinstance(task.verdict, RewardFile):
                raise
            raise NoReward(str(error), log.decode()[-LOG_TAIL_CHARS:], ran.cpu_s) from error
        except LimitExceeded as error:
            unread = _unresolved(f"the log could not be parsed {error}", log=log)
            return dataclasses.replace(unread, readable=False)
        return PatchRun(found.reward, log, bytes(found.outcomes), notes=ran.notes)

    async def _parsed(self, claim: Claim, verdict: TestsJson, log: bytes) -> bytes | None:
        """The output of the verdict's parser for `log`, in a container where no code of the patch ever ran; None if it failed, or if the
        log was too large for it.
        """
        files = [
            File(path=steps.PARSER, content=verdict.parser.encode("utf-8", "surrogateescape")),
            File(path=steps.LOG, content=log),
            File(path=steps.NO_LOG, content=b""),
        ]
        try:
            async with self._sandboxes.open(claim, role="grade") as sandbox:
                await sandbox.put(files)
                result = await sandbox.run(
                    steps.step("parse_log"), timeout_s=steps.STEP_S, keep_bytes=LOG_KEEP_BYTES, as_root=True
                )
        except SandboxRuined:
            return None
        if result.exit_code is None and is_starved(result):
            raise failed_step("parsing the log", result)
        if result.exit_code == steps.NO_PYTHON:
            raise TaskBroken(f"{claim.request.task.image} has no python3 to run the parser with")
        return result.output if result.exit_code == 0 and not result.dropped_bytes else None


@contextlib.contextmanager
def _as_grader_errors() -> Generator[None]:
    try:
        yield
    except ImageMissing:
        raise
    except SandboxError as error:
        raise GraderError(f"the grading container failed: {error}") from error
    except ProcessLost as error:
        raise GraderError(str(error)) from error


def _blamed(failure: GraderError | SandboxError) -> PatchRun:
    """The verdict on a patch that caused this failure, because the same steps succeed without it."""
    match failure:
        case StepFailed(how=how, output=output, cpu_s=cpu_s):
            tested = _unresolved(how, log=output.encode())
            tested = dataclasses.replace(tested, reward=replace(tested.reward, grade_cpu_s=cpu_s))
        case NotAsCalibrated(path=path):
            tested = _unresolved(f"the patch changed {path}, which holds tests", log=str(failure).encode())
        case _:
            tested = _unresolved(str(failure))
    return dataclasses.replace(tested, readable=isinstance(failure, OutOfTime | SandboxRuined))


def _calibration(claim: Claim) -> Calibration | None:
    try:
        return unpack(claim.request.task.calibration)
    except MalformedMessage as error:
        raise TaskBroken(f"calibration: {error}: run workers.verify on the task again") from error


def _unresolved(decided_by: str, *, applied_by: str = "", log: bytes = b"") -> PatchRun:
    tail = log[-LOG_TAIL_CHARS:].decode("utf-8", "replace")
    reward = Reward(value=0.0, resolved=False, decided_by=decided_by, applied_by=applied_by, log_tail=tail)
    return PatchRun(reward, log)


def _explained(tested: PatchRun, put_back: Sequence[str], searched: Sequence[str]) -> PatchRun:
    """`tested`, with the list of files whose changes were undone, except for import directories, because a correct fix may have
    needed them.
    """
    names, directories = (few([name[:NAME_CHARS] for name in each]) for each in (put_back, searched))
    kept = f", but for the import directories {directories}" if directories else ""
    decided_by = f"{tested.reward.decided_by}; put back, because they govern the tests: {names}{kept}"
    return dataclasses.replace(tested, reward=replace(tested.reward, decided_by=decided_by))
