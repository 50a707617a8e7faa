"""A plan that fits and leaves machines idle says so, with what the planner has tried against it."""

import re
from pathlib import Path

import pytest

from tests.trainer.plan.test_plan import command, plan_of
from tests.trainer.plan.test_plan import recipe as recipe
from trainer.plan.__main__ import verdict
from trainer.plan.planning import RunPlan, make_plan, misfits
from trainer.plan.remedies import balances

IDLE = ("plan.utilisation=0.4", "plan.episode_s=300")


def said(plan: RunPlan) -> str:
    return verdict(plan, balances(plan))


def test_a_learner_that_waits_is_no_plain_fit_and_the_exit_status_stays_0(recipe: Path) -> None:
    done = command(recipe, "--set", "learner.recompute=full", "--hosts", "1x2")
    assert (done.returncode, done.stderr) == (0, "")
    line = done.stdout.splitlines()[-1]
    assert re.match(r"everything fits, but the learner waits (99% to )?100% of the time for episodes", line)
    assert "of which 1 are possible at once, by the slots of the hosts. Tried: " in line
    assert re.search(r'with plan.hosts = "\d+x2": a step takes', line)


@pytest.mark.parametrize(
    "changes",
    [
        ("plan.hosts=1x16",),
        ("plan.gpus=16xH100-80", "plan.learner_gpus=12"),
        ("model=Qwen3-32B", "learner.tensor_parallel=8", "plan.engine_gpus=4", "plan.gpus=32xH100-80"),
        ("plan.gpus=8xH100-80+4xL40S-48",),
        (),
    ],
)
def test_what_is_advised_fits_and_makes_a_step_shorter_as_it_says(
    changes: tuple[str, ...], recipe: Path
) -> None:
    plan = plan_of(recipe, *changes)
    found = balances(plan)
    assert found
    before = plan.slow.step_s + plan.fast.step_s
    for balance in found:
        wanted = plan.recipe
        for change in balance.changes:
            wanted = change.apply(wanted)
        again = make_plan(wanted)
        assert misfits(again) == []
        assert again.slow.step_s + again.fast.step_s < 0.96 * before
        before = again.slow.step_s + again.fast.step_s
        assert f"a step takes {again.fast.step_s:,.0f} " in said(plan)


def test_slots_that_bind_are_answered_with_hosts(recipe: Path) -> None:
    plan = plan_of(recipe, *IDLE, "plan.hosts=1x16")
    keys = {change.key for balance in balances(plan) for change in balance.changes}
    assert "plan.hosts" in keys
    assert "by the slots of the hosts" in said(plan)


def test_a_learner_with_too_many_of_the_gpus_is_answered_with_a_division(recipe: Path) -> None:
    plan = plan_of(recipe, "plan.learner_gpus=12", "plan.hosts=99x64", "plan.engine_gpus=2")
    assert plan.fast.waiting > 0.5
    first, *_ = balances(plan)
    (learner,) = (change.value for change in first.changes if change.key == "plan.learner_gpus")
    assert learner < 12
    assert first.plan.fast.waiting < plan.fast.waiting


def test_engines_that_wait_for_the_learner_are_said_and_answered(recipe: Path) -> None:
    plan = plan_of(recipe, "plan.gpus=32xH200-141", "plan.learner_gpus=4", "plan.hosts=99x64")
    text = said(plan)
    assert text.startswith("everything fits, but the engines wait for the learner: ")
    first, *_ = balances(plan)
    (learner,) = (change.value for change in first.changes if change.key == "plan.learner_gpus")
    assert learner > 4


def test_what_is_balanced_is_said_in_two_words(recipe: Path) -> None:
    plan = plan_of(recipe, "plan.utilisation=0.2", "plan.learner_gpus=4", "plan.episode_s=300")
    assert said(plan) == "everything fits"
