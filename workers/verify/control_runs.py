"""Runs of one task's tests with the known fix and contradicted expectations, bounded in number and in CPU time.

The CPU time of trials is bounded by a multiple of what the tests take by themselves, and each run has the limits of a
control.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from pipeline.calibration import Calibration, Contradiction, pack
from pipeline.request import Claim, Limits
from pipeline.task import Task
from workers.grading.container import Starved
from workers.grading.controls.placing import NotAsCalibrated
from workers.grading.grade import PatchRun, control_limits

MOST_RUNS = 40
RESERVED_RUNS = 12  # of these, for runs as a grader makes them
# CPU time of all trials, as a multiple of what the tests take by themselves; that counts as a second at least.
MOST_CPU_FACTOR, LEAST_CPU_S = 100.0, 1.0
FAILURES_SHARE = 0.5  # of the CPU time that a control may take beyond the tests themselves: what its failures are meant to take
NO_TRACEBACKS = "--tb=no"


class RunsTests(Protocol):
    """Runs the hidden tests on a patch. Raises RolloutError."""

    async def run_tests(
        self,
        claim: Claim,
        patch: bytes,
        contradictions: Sequence[Contradiction] = (),
        limits: Limits | None = None,
    ) -> PatchRun: ...


@dataclass(slots=True)
class ControlRuns:
    """The runs of one task, what they cost, and how much may still be spent on them."""

    grader: RunsTests
    claim: Claim
    fix: bytes
    plain: PatchRun  # a run without contradictions
    num_left: int = MOST_RUNS
    cpu_left_s: float = field(init=False)
    # CPU time and wall time of the slowest run that was as a grader's.
    cpu_s: float = 0.0
    wall_s: float = 0.0
    _trial_claim: Claim = field(init=False)

    def __post_init__(self) -> None:
        self.cpu_left_s = MOST_CPU_FACTOR * max(self.plain.reward.grade_cpu_s, LEAST_CPU_S)
        self._trial_claim = self.claim

    @property
    def may_try(self) -> bool:
        """Whether there are runs and CPU time left for trials."""
        return self.num_left > RESERVED_RUNS and self.cpu_left_s > 0

    async def shorten_trials(self, names: Iterable[str]) -> None:
        """Has trials print no tracebacks if all of these tests pass so, too.

        For each traceback, pytest parses the whole test file again, which takes 0.2 s if that has 7,000 lines. Only runs of
        the known fix may differ from a grader's: it has no interest in telling them apart.
        """
        claim = without_tracebacks(self.claim)
        run = await self.grader.run_tests(claim, self.fix)
        if all(run.outcomes.passed(name) for name in names):
            self._trial_claim = claim

    async def try_out(self, contradictions: Sequence[Contradiction]) -> PatchRun | None:
        """None if they cannot be placed, or if the run came to no end within the time that a control may take."""
        return await self._run(self._trial_claim, contradictions)

    async def as_graded(self, contradictions: Sequence[Contradiction]) -> PatchRun | None:
        """The same, as a grader runs a control."""
        run = await self._run(self.claim, contradictions)
        if run is not None:
            self.cpu_s = max(self.cpu_s, run.reward.grade_cpu_s)
            self.wall_s = max(self.wall_s, run.wall_s)
        return run

    def most_failing(self, run: PatchRun, num_failing: int) -> float:
        """How many tests may fail at once, by the time that so many failures took in `run`."""
        limits, plain = self._limits(), self.plain
        spare_cpu_s = FAILURES_SHARE * (limits.grade_cpu_s - plain.reward.grade_cpu_s)
        by_cpu = _ratio(spare_cpu_s, run.reward.grade_cpu_s - plain.reward.grade_cpu_s)
        by_wall = _ratio(limits.grade_wall_s - plain.wall_s, run.wall_s - plain.wall_s)
        return max(1, num_failing * min(by_cpu, by_wall))

    async def _run(self, claim: Claim, contradictions: Sequence[Contradiction]) -> PatchRun | None:
        self.num_left -= 1
        limits = self._limits()
        try:
            run = await self.grader.run_tests(claim, self.fix, contradictions, limits)
        except (Starved, NotAsCalibrated):
            return None
        self.cpu_left_s -= run.reward.grade_cpu_s
        return run if run.outcomes.finished else None

    def _limits(self) -> Limits:
        return control_limits(self.claim.request.limits, Calibration(), self.plain)


def calibrated(task: Task, calibration: Calibration) -> Task:
    """The task with this calibration."""
    return replace(task, calibration=pack(calibration))


def claim_with(claim: Claim, calibration: Calibration) -> Claim:
    """The claim of the same task, calibrated."""
    return replace(claim, request=replace(claim.request, task=calibrated(claim.request.task, calibration)))


def without_tracebacks(claim: Claim) -> Claim:
    """The claim of the same task, in which pytest prints no tracebacks."""
    task = claim.request.task
    options = f"{task.env.get('PYTEST_ADDOPTS', '')} {NO_TRACEBACKS}".strip()
    task = replace(task, env=task.env | {"PYTEST_ADDOPTS": options})
    return replace(claim, request=replace(claim.request, task=task))


def _ratio(spare_s: float, extra_s: float) -> float:
    return math.inf if extra_s <= 0 else max(0.0, spare_s) / extra_s
