"""The control: in addition to the true run of the tests there is another one, in which an expectation of one test is wrong, and that test
must fail.

Which run comes first is drawn by chance. The outcomes of a control are judged in a process of its own, because code under test decides
their content.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec.structs import replace

from pipeline.request import Claim, Limits
from pipeline.task import Calibration, Contradiction, RewardFile
from pipeline.telemetry import span
from pipeline.trajectory import Control
from workers.grading.container import PatchRun, Starved
from workers.grading.controls.drawing import (
    OTHERS_SHARE,
    Chance,
    draw,
    few,
    has_others,
    shortfall,
    strays,
    survivors,
    unsteady,
)
from workers.grading.verdicts import decoded
from workers.isolation import calls as isolation

CONTROL_TRIES = 3  # tries of a control while the machine has no CPU for it
# CPU time that a control may take, as a multiple of the runs it is compared with; and the limit in wall time, which a loaded machine makes
# longer.
CONTROL_FACTOR, CONTROL_EXTRA_S = 3.0, 10.0
CONTROL_WALL_FACTOR, CONTROL_EXTRA_WALL_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class ControlRun:
    """A run of the tests in which `drawn` was contradicted."""

    drawn: tuple[Contradiction, ...]
    tested: PatchRun

    @property
    def fails(self) -> list[str]:
        """The contradicted tests."""
        return [name for one in self.drawn for name in one.fails]


class Doubt(msgspec.Struct, frozen=True):
    """The reason why a control run refutes a pass. `may_be_chance`: correct code may behave in the same way in another run."""

    reason: str
    may_be_chance: bool = False


class RunsOnce(Protocol):
    """Runs the hidden tests on a patch in a new container, with these expectations contradicted."""

    async def __call__(
        self,
        claim: Claim,
        patch: bytes,
        contradictions: Sequence[Contradiction] = (),
        limits: Limits | None = None,
    ) -> PatchRun: ...


@dataclass(slots=True)
class Controls:
    """The control runs of one grading."""

    run_tests: RunsOnce
    chance: Chance
    claim: Claim
    patch: bytes
    calibration: Calibration
    # Whether each control run contradicts a test that needs the fix, in an order drawn by chance.
    _wanted: list[bool] = field(init=False)
    _runs: list[ControlRun | None] = field(default_factory=list["ControlRun | None"])

    def __post_init__(self) -> None:
        request, calibration, chance = self.claim.request, self.calibration, self.chance
        self._wanted = []
        if calibration.contradictions and chance.random() < request.control_share:
            self._wanted = [True] * request.num_controls
            if has_others(calibration) and chance.random() < OTHERS_SHARE:
                self._wanted.insert(chance.randrange(len(self._wanted) + 1), False)

    async def run_before(self) -> PatchRun | None:
        """Does the control runs that come before the true run. Returns the verdict of 0 if one of them leads to it alone.

        Where fractions are rewards none does, because a patch that fixes nothing may get one.
        """
        verdict = self.claim.request.task.verdict
        has_fractions = isinstance(verdict, RewardFile) and verdict.fractions
        for needing_fix in self._wanted[: self.chance.randrange(len(self._wanted) + 1)]:
            control = await self._run(needing_fix)
            if control is not None and not has_fractions:
                failed = await _failed_anyway(control, self.calibration)
                if failed is not None:
                    return failed
            self._runs.append(control)
        return None

    async def run_after(self, passed: PatchRun) -> PatchRun:
        """The other control runs. Returns the true run `passed` with the joint result of all of them.

        Tests that fail without being contradicted may be unsteady, so these are given one more control run.
        """
        if not self._wanted:
            return _with_control(passed, "off" if self.calibration.contradictions else "none")
        for needing_fix in self._wanted[len(self._runs) :]:
            self._runs.append(await self._run(needing_fix, passed))
        known = [one for one in self._runs if one is not None]
        for control in known:
            found = await _doubt(control, self.calibration)
            if found is not None and found.may_be_chance:
                again = await self._run(True, passed)
                found = await _doubt(again, self.calibration) if again is not None else None
                control = again or control
            if found is not None:
                return _refuted(passed, control, found.reason)
        if len(known) < len(self._runs):
            return _with_control(passed, "undecided")
        return _with_control(
            passed,
            self.calibration.best_control,
            num_controlled=sum(len(one.fails) for one in known),
            grade_cpu_s=sum((one.tested.reward.grade_cpu_s for one in known), passed.reward.grade_cpu_s),
        )

    async def _run(self, needing_fix: bool, passed: PatchRun | None = None) -> ControlRun | None:
        """A run with contradictions drawn by chance; None if the machine was too busy for any.

        It may take several times as long as the true run `passed`, if that came first.
        """
        limits = self.claim.request.limits
        if passed is not None:
            limits = control_limits(limits, self.calibration, passed)
        for _ in range(CONTROL_TRIES):
            drawn = draw(self.calibration, self.chance, needing_fix=needing_fix)
            with span("control"), contextlib.suppress(Starved):
                return ControlRun(drawn, await self.run_tests(self.claim, self.patch, drawn, limits))
        return None


def control_limits(limits: Limits, calibration: Calibration, passed: PatchRun) -> Limits:
    """The time that a control may take: several times that of the runs it is compared with."""
    cpu_s = CONTROL_EXTRA_S + CONTROL_FACTOR * max(calibration.control_cpu_s, passed.reward.grade_cpu_s)
    wall_s = CONTROL_EXTRA_WALL_S + CONTROL_WALL_FACTOR * max(calibration.control_wall_s, passed.wall_s)
    return replace(
        limits, grade_cpu_s=min(cpu_s, limits.grade_cpu_s), grade_wall_s=min(wall_s, limits.grade_wall_s)
    )


async def as_expected(tested: PatchRun, calibration: Calibration) -> PatchRun:
    """The run, with a verdict of 0 unless a pass has all tests that the known fix passes, and the witness's report if there was one for
    the known fix.
    """
    lacks = await isolation.call(lacking, tested.recorded, calibration)
    if not lacks:
        return tested
    decided_by = f"{tested.reward.decided_by}, but {lacks}"
    reward = replace(tested.reward, value=0.0, resolved=False, decided_by=decided_by)
    return dataclasses.replace(tested, reward=reward)


async def failed_by_chance(tested: PatchRun, calibration: Calibration) -> list[str]:
    """The tests for which a failed run is repeated once; none if the patch does not fix what it should."""
    if tested.reward.resolved or not tested.recorded:
        return []
    return await isolation.call(unsteady_in, tested.recorded, calibration)


async def _failed_anyway(control: ControlRun, calibration: Calibration) -> PatchRun | None:
    """The verdict of 0 to which a control run leads alone, which makes the true run of a wrong patch unnecessary; None if it leads to none.

    A run that did not end would refute a pass. So would tests that fail without being contradicted; if all that need the fix fail, the
    patch fixes nothing.
    """
    tested = control.tested
    if not tested.recorded:
        return tested
    failing = await isolation.call(all_strayed, control.drawn, tested.recorded, calibration)
    if not failing:
        return None
    decided_by = (
        f"{few(failing)} did not pass, in a run in which what {few(control.fails)} expects was made wrong"
    )
    tests = {name: said for name, said in tested.reward.tests.items() if name not in control.fails}
    reward = replace(tested.reward, value=0.0, resolved=False, decided_by=decided_by, tests=tests)
    return dataclasses.replace(tested, reward=reward)


async def _doubt(control: ControlRun, calibration: Calibration) -> Doubt | None:
    """The evidence of a control run against a pass; None if there is none."""
    tested = control.tested
    if not tested.recorded:
        return Doubt(f"in the control run {tested.reward.decided_by}")
    return await isolation.call(doubt, control.drawn, tested.recorded, calibration)


def _refuted(passed: PatchRun, control: ControlRun, reason: str) -> PatchRun:
    decided_by = f"{passed.reward.decided_by}, but {reason}"
    reward = replace(
        passed.reward,
        value=0.0,
        resolved=False,
        decided_by=decided_by,
        control="refuted",
        num_controlled=len(control.fails),
        grade_cpu_s=passed.reward.grade_cpu_s + control.tested.reward.grade_cpu_s,
        log_tail=control.tested.reward.log_tail,
    )
    log = b"\n--- control run ---\n".join((passed.log, control.tested.log))
    return dataclasses.replace(passed, reward=reward, log=log)


def _with_control(tested: PatchRun, control: Control, **says: float) -> PatchRun:
    return dataclasses.replace(tested, reward=replace(tested.reward, control=control, **says))


def lacking(encoded: bytes, calibration: Calibration) -> str | None:
    """The things that a pass lacks compared with the known fix; None if it lacks nothing."""
    return shortfall(decoded(encoded), calibration)


def unsteady_in(encoded: bytes, calibration: Calibration) -> list[str]:
    """The tests of a run that may pass with the same code in another run."""
    return unsteady(decoded(encoded), calibration)


def all_strayed(drawn: tuple[Contradiction, ...], encoded: bytes, calibration: Calibration) -> list[str]:
    """The tests that need the fix and were not contradicted, if none of them passed in the control run; otherwise none."""
    strayed = strays(drawn, decoded(encoded), calibration)
    may_fail = {name for one in drawn for name in (*one.fails, *one.may_fail)}
    untouched = [name for name in calibration.needing_fix if name not in may_fail]
    return strayed if strayed == untouched else []


def doubt(drawn: tuple[Contradiction, ...], encoded: bytes, calibration: Calibration) -> Doubt | None:
    """The evidence in the outcomes of a control run against a pass; None if there is none."""
    control = decoded(encoded)
    wrong = survivors(drawn, control, calibration)
    if wrong:
        return Doubt(f"passes what must fail: {few(wrong)}")
    strayed = strays(drawn, control, calibration)
    if strayed:
        fails = [name for one in drawn for name in one.fails]
        return Doubt(
            f"{few(strayed)} did not pass where only what {few(fails)} expects was made wrong",
            may_be_chance=True,
        )
    return None
