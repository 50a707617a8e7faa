"""The grader: runs the hidden tests on a patch in a new container, and once more with contradicted expectations if they pass.

An infrastructure failure is never a verdict: it raises GraderError, or TaskBroken where no other try helps. A patch that
does not apply, tests that fail, tests that use up their CPU time and tests that cannot fail are verdicts. So is whatever else
the patch or its code brings about: a step that fails is tried without the patch, and if it succeeds there, the patch is worth 0.
"""

import contextlib
import dataclasses
import random
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from pipeline.calibration import Calibration, Contradiction, unpack
from pipeline.errors import GraderError, ImageMissing, SandboxError, SandboxRuined, TaskBroken
from pipeline.message import MalformedMessage
from pipeline.request import Claim, Limits
from pipeline.task import File, TestsJson
from pipeline.telemetry import span
from pipeline.trajectory import Control, Reward
from workers.grading import scripts
from workers.grading.container import (
    LOG_KEEP_BYTES,
    STEP_S,
    FinishedTests,
    GradingContainer,
    OutOfTime,
    Starved,
)
from workers.grading.controls.drawing import Shuffles, draw
from workers.grading.controls.outcomes import NOTHING_RAN, Outcomes
from workers.grading.controls.placing import NotAsCalibrated, alike
from workers.grading.judging import LOG_TAIL_CHARS, Remains, decoded, judged, lacking, readable, surviving
from workers.grading.steps import StepFailed, failed_step
from workers.grading.survey import Surveys
from workers.grading.swebench_rules import Marks
from workers.grading.verdicts import check
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded, ProcessLost
from workers.sandbox.protocol import CannotWrite, Sandboxes, is_starved

NAMED_AT_MOST = 5  # tests in `decided_by`
CONTROL_TRIES = 3  # draws of a control that runs into its time limit
# The time that a control may take, by that of the runs it is compared with; and the same in wall time, which a loaded machine
# makes longer.
CONTROL_FACTOR, CONTROL_EXTRA_S = 3.0, 10.0
CONTROL_WALL_FACTOR, CONTROL_EXTRA_WALL_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class Graded:
    """A verdict and the log that it was made of: the eval script's, or what git said of a patch that does not apply."""

    reward: Reward
    log: str


@dataclass(frozen=True, slots=True)
class PatchRun:
    """One run of the tests on a patch: the verdict that it would lead to by itself, and the outcome of each test."""

    reward: Reward
    log: bytes = b""
    recorded: bytes = b""  # the encoded outcomes; empty if the eval script came to no end
    wall_s: float = 0.0  # of the eval script
    readable: bool = True  # the tests could be started, and what they left behind be parsed within limits

    @property
    def outcomes(self) -> Outcomes:
        """Decoded. Code under test decides how long that takes."""
        return decoded(self.recorded) if self.recorded else NOTHING_RAN


class Chance(Shuffles, Protocol):
    """Where random choices come from."""

    def random(self) -> float: ...


class Grader:
    """Grades patches, each run of the tests in a container of its own. Graders of one process may share their `surveys`."""

    def __init__(
        self, sandboxes: Sandboxes, chance: Chance | None = None, surveys: Surveys | None = None
    ) -> None:
        self._sandboxes = sandboxes
        self._surveys = surveys or Surveys()
        self._chance = chance or random.SystemRandom()

    async def grade(self, claim: Claim, patch: bytes) -> Reward:
        """What `patch` is worth. Raises GraderError, TaskBroken or ImageMissing for a failure that is not the patch's."""
        return (await self._grade(claim, patch)).reward

    async def grade_with_log(self, claim: Claim, patch: bytes) -> Graded:
        """The same, with the whole log, of which the reward has the end."""
        tested = await self._grade(claim, patch)
        return Graded(tested.reward, tested.log.decode())

    async def _grade(self, claim: Claim, patch: bytes) -> PatchRun:
        check(claim.request.task)
        calibration = _calibration(claim)
        if not patch.strip():
            return PatchRun(Reward(value=0.0, resolved=False, decided_by="empty patch"))
        started = time.monotonic()
        try:
            tested = await self.run_tests(claim, patch)
            if tested.reward.resolved and calibration is not None:
                with span("expected tests"):
                    tested = await _as_expected(tested, calibration)
            if tested.reward.resolved:
                with span("control"):
                    tested = await self._controlled(claim, patch, calibration or Calibration(), tested)
        except LimitExceeded as error:
            tested = _unresolved(f"the outcomes of the tests could not be compared {error}")
        except ProcessLost as error:
            raise GraderError(str(error)) from error
        reward = replace(tested.reward, grade_s=time.monotonic() - started)
        return dataclasses.replace(tested, reward=reward)

    async def run_tests(
        self,
        claim: Claim,
        patch: bytes,
        contradictions: Sequence[Contradiction] = (),
        limits: Limits | None = None,
    ) -> PatchRun:
        """Runs the hidden tests once in a new container, with these expectations contradicted.

        Raises Starved at the wall deadline of a machine without CPU, and the errors of `grade`.
        """
        limits = limits or claim.request.limits
        with _as_grader_errors():
            try:
                return await self._run_tests(claim, patch, contradictions, limits)
            except (StepFailed, NotAsCalibrated, CannotWrite, SandboxRuined) as failure:
                with span("without the patch"):
                    await self._do_without_patch(claim, contradictions)
                return _blamed(failure)

    async def _do_without_patch(self, claim: Claim, contradictions: Sequence[Contradiction]) -> None:
        """Takes the steps before the tests in a new container without a patch. Raises what fails, which is no patch's fault."""
        calibration = _calibration(claim) or Calibration()
        async with self._sandboxes.open(claim, role="grade") as sandbox:
            container = GradingContainer(
                claim, sandbox, b"", Marks(), claim.request.limits, calibration, self._surveys
            )
            await container.do_without_patch()
            await container.put_script(alike(contradictions, calibration.contradictions))

    async def _controlled(
        self, claim: Claim, patch: bytes, calibration: Calibration, passed: PatchRun
    ) -> PatchRun:
        """`passed`, with what a control run says of it."""
        if not calibration.contradictions:
            return _with_control(passed, "none")
        if self._chance.random() >= claim.request.control_share:
            return _with_control(passed, "off")
        limits = control_limits(claim.request.limits, calibration, passed)
        cpu_s = passed.reward.grade_cpu_s
        for _ in range(CONTROL_TRIES):
            drawn = draw(calibration, self._chance)
            try:
                control = await self.run_tests(claim, patch, drawn, limits)
            except Starved:
                continue
            cpu_s += control.reward.grade_cpu_s
            if control.recorded:
                return await _compared(passed, control, drawn, calibration, cpu_s)
            if not control.readable:
                refused = _refused(passed, f"in the control run {control.reward.decided_by}")
                return _with_control(refused, "refuted", grade_cpu_s=cpu_s)
        return _with_control(passed, "undecided", grade_cpu_s=cpu_s)

    async def _run_tests(
        self, claim: Claim, patch: bytes, contradictions: Sequence[Contradiction], limits: Limits
    ) -> PatchRun:
        marks = Marks()
        async with self._sandboxes.open(claim, role="grade") as sandbox:
            calibration = _calibration(claim) or Calibration()
            container = GradingContainer(claim, sandbox, patch, marks, limits, calibration, self._surveys)
            with span("apply patch"):
                applied = await container.apply()
            if applied.fault:
                return _unresolved(applied.fault, applied_by=applied.by, log=applied.complaints.encode())
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
        reward = replace(tested.reward, applied_by=applied.by, grade_cpu_s=result.cpu_s)
        return dataclasses.replace(tested, reward=reward, wall_s=wall_s)

    async def _judged(
        self, claim: Claim, patch: bytes, ran: FinishedTests, marks: Marks, restored: tuple[str, ...]
    ) -> PatchRun:
        """The verdict on a finished run of the tests, which may have written what cannot be read in bounded time."""
        task, log, parsed = claim.request.task, b"", None
        try:
            log = await isolation.call(readable, ran.output, marks)
            if isinstance(task.verdict, TestsJson):
                parsed = await self._parsed(claim, task.verdict, log)
            remains = Remains(patch, ran.exit_code, log, ran.notes, parsed, restored)
            found = await isolation.call(judged, task, remains)
        except LimitExceeded as error:
            unread = _unresolved(f"the log could not be parsed {error}", log=log)
            return dataclasses.replace(unread, readable=False)
        return PatchRun(found.reward, log, bytes(found.outcomes))

    async def _parsed(self, claim: Claim, verdict: TestsJson, log: bytes) -> bytes | None:
        """The output of the verdict's parser for `log`, in a container where no code of the patch ever ran. None if it failed,
        or if the log was too much for it.
        """
        files = [
            File(path=scripts.PARSER, content=verdict.parser.encode("utf-8", "surrogateescape")),
            File(path=scripts.LOG, content=log),
            File(path=scripts.NO_LOG, content=b""),
        ]
        try:
            async with self._sandboxes.open(claim, role="grade") as sandbox:
                await sandbox.put(files)
                result = await sandbox.run(scripts.PARSE, timeout_s=STEP_S, keep_bytes=LOG_KEEP_BYTES)
        except SandboxRuined:
            return None
        if result.exit_code is None and is_starved(result):
            raise failed_step("parsing the log", result)
        if result.exit_code == scripts.NO_PYTHON:
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
    """The verdict on a patch that brought this failure about, as the same steps succeed without it."""
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


async def _as_expected(tested: PatchRun, calibration: Calibration) -> PatchRun:
    """A pass needs all tests that the known fix passes, and the witness if that reported of the known fix."""
    lacks = await isolation.call(lacking, tested.recorded, calibration)
    return _refused(tested, lacks) if lacks else tested


async def _compared(
    passed: PatchRun,
    control: PatchRun,
    drawn: Sequence[Contradiction],
    calibration: Calibration,
    cpu_s: float,
) -> PatchRun:
    """What the control run says of the pass: each controlled test must have failed."""
    controlled = sorted({name for contradiction in drawn for name in contradiction.fails})
    says = {"num_controlled": len(controlled), "grade_cpu_s": cpu_s}
    wrong = await isolation.call(surviving, controlled, control.recorded, calibration)
    if not wrong:
        return _with_control(passed, "confirmed", **says)
    refused = _refused(passed, f"passes what must fail: {_few(wrong)}")
    log = b"\n--- control run ---\n".join((passed.log, control.log))
    reward = replace(refused.reward, log_tail=control.reward.log_tail)
    return _with_control(dataclasses.replace(refused, reward=reward, log=log), "refuted", **says)


def _with_control(tested: PatchRun, control: Control, **says: float) -> PatchRun:
    return dataclasses.replace(tested, reward=replace(tested.reward, control=control, **says))


def _refused(tested: PatchRun, why: str) -> PatchRun:
    decided_by = f"{tested.reward.decided_by}, but {why}"
    reward = replace(tested.reward, value=0.0, resolved=False, decided_by=decided_by)
    return dataclasses.replace(tested, reward=reward)


def control_limits(limits: Limits, calibration: Calibration, passed: PatchRun) -> Limits:
    """The time that a control may take: several times that of the runs it is compared with."""
    cpu_s = CONTROL_EXTRA_S + CONTROL_FACTOR * max(calibration.control_cpu_s, passed.reward.grade_cpu_s)
    wall_s = CONTROL_EXTRA_WALL_S + CONTROL_WALL_FACTOR * max(calibration.control_wall_s, passed.wall_s)
    return replace(
        limits, grade_cpu_s=min(cpu_s, limits.grade_cpu_s), grade_wall_s=min(wall_s, limits.grade_wall_s)
    )


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(names[:NAMED_AT_MOST])}{more}"
