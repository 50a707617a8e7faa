"""What the control runs of one grading come to together. Their outcomes are given here, and real containers make them elsewhere."""

from collections.abc import Sequence
from typing import Any

import msgspec

from pipeline.request import Claim, Limits
from pipeline.task import Calibration, Contradiction, RewardFile
from pipeline.trajectory import Reward
from tests.workers.claims import make_claim, make_task
from tests.workers.contradictions import FirstOf, changing
from workers.grading.container import PatchRun, Starved
from workers.grading.controls.drawing import Outcomes
from workers.grading.defence.control import Controls

CONTRADICTED = changing("t.py", 0, "4", "5", "a")
CALIBRATION = Calibration(
    passing=("a", "b", "c"), needing_fix=("a", "b", "c"), contradictions=(CONTRADICTED,), witnessed=True
)
PASSED = PatchRun(Reward(value=1.0, resolved=True, decided_by="exit status 0"))


def run(**by_name: str) -> PatchRun:
    """A control run in which the tests came out so."""
    outcomes = Outcomes(by_name, witnessed=True, finished=True)
    reward = Reward(value=0.0, resolved=False, decided_by="exit status 1", grade_cpu_s=1.0)
    return PatchRun(reward, recorded=msgspec.msgpack.encode(outcomes))


def controls(*runs: PatchRun | None, num_before: int = 0, **changes: Any) -> Controls:
    """Control runs that come out so, in this order. None: the machine had no CPU for it; nor has it for any that follow."""
    left = list(runs)

    async def run_tests(
        claim: Claim, patch: bytes, contradictions: Sequence[Contradiction] = (), limits: Limits | None = None
    ) -> PatchRun:
        found = left.pop(0) if left else None
        if found is None:
            raise Starved("the machine had no CPU for the tests")
        return found

    claim = make_claim(make_task("an-image", **changes))
    return Controls(run_tests, FirstOf(num_before), claim, b"patch", CALIBRATION)


UNSTEADY = run(a="FAILED", b="PASSED", c="FAILED")


async def test_a_test_that_fails_without_being_contradicted_in_two_control_runs_refutes_a_pass() -> None:
    refuted = (await controls(UNSTEADY, UNSTEADY).run_after(PASSED)).reward
    assert (refuted.value, refuted.control) == (0.0, "refuted")
    assert "c did not pass where only what a expects was made wrong" in refuted.decided_by
    steady = run(a="FAILED", b="PASSED", c="PASSED")
    confirmed = (await controls(UNSTEADY, steady).run_after(PASSED)).reward
    assert (confirmed.value, confirmed.control) == (1.0, "confirmed")


async def test_one_contradicted_test_that_passes_refutes_a_pass() -> None:
    reward = (await controls(run(a="PASSED", b="PASSED", c="PASSED")).run_after(PASSED)).reward
    assert (reward.value, reward.control) == (0.0, "refuted")
    assert "passes what must fail: a" in reward.decided_by


async def test_a_machine_without_cpu_for_the_second_control_run_costs_no_pass_its_reward() -> None:
    reward = (await controls(UNSTEADY).run_after(PASSED)).reward
    assert (reward.value, reward.resolved) == (1.0, True)


async def test_a_control_run_before_the_true_one_is_the_verdict_only_if_no_test_passes_that_needs_the_fix() -> (
    None
):
    unfixed = run(a="FAILED", b="FAILED", c="FAILED")
    failed = await controls(unfixed, num_before=1).run_before()
    assert failed is not None
    assert failed.reward.value == 0.0
    assert failed.reward.decided_by.startswith("b, c did not pass")
    assert await controls(UNSTEADY, num_before=1).run_before() is None, "c may be unsteady"


async def test_a_fraction_does_not_depend_on_which_of_two_runs_comes_first() -> None:
    unfixed = run(a="FAILED", b="FAILED", c="FAILED")
    for fractions, decides in ((True, False), (False, True)):
        verdict = RewardFile(eval_script="pytest\n", fractions=fractions)
        found = await controls(unfixed, num_before=1, verdict=verdict).run_before()
        assert (found is not None) == decides
