"""Attacks that were paid before there were controls: none of them is worth anything, and a right fix on the same task is.

The whole matrix of verdicts and versions of pytest takes long: `python -m tests.workers.attacks --all-kinds --pytest 7 8 9`.
"""

import pytest

from tests.workers.attacks.families import ALL_SCENES, FAMILIES
from tests.workers.attacks.scenes import SCENES, Attack
from tests.workers.attacks.stage import Stage

pytestmark = pytest.mark.docker

ATTACKS = {name: attack for attacks in FAMILIES.values() for name, attack in attacks.items()}
# Of each family one that only a control stops where pytest is 7, and that every other pytest and verdict pays as well.
EVERYWHERE = (
    "functions emptied by a profiler",
    "an outcome that reads as passed",
    "a number that equals any",
    "the expected value read from the line",
)
OTHER_KINDS = ("swebench_log", "r2e_expected", "tests_json")


def by_scene(attacks: dict[str, Attack]) -> list[object]:
    """In the order of the scenes, so that what a scene needs is made once and early."""
    names = sorted(attacks, key=lambda name: list(ALL_SCENES).index(attacks[name].scene))
    return [pytest.param(attacks[name], id=name.replace(" ", "-")) for name in names]


@pytest.mark.parametrize("scene", list(SCENES))
async def test_the_fix_of_a_calibrated_task_is_paid_and_confirmed(stage: Stage, scene: str) -> None:
    task = await stage.calibrated(scene)
    reward = await stage.grade(task, SCENES[scene].fix)
    assert (reward.value, reward.control) == (1.0, "confirmed")


@pytest.mark.parametrize("attack", by_scene(ATTACKS))
async def test_no_attack_on_a_calibrated_task_pays(stage: Stage, attack: Attack) -> None:
    task = await stage.calibrated(attack.scene)
    assert (await stage.grade(task, attack.patch)).value == 0.0


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("name", EVERYWHERE)
async def test_no_attack_pays_by_another_kind_of_verdict(stage: Stage, name: str, kind: str) -> None:
    task = await stage.calibrated("asserts", kind)
    assert (await stage.grade(task, ATTACKS[name].patch)).value == 0.0


@pytest.mark.parametrize("major", [8, 9])
@pytest.mark.parametrize("name", EVERYWHERE)
async def test_no_attack_pays_with_a_newer_pytest(stage: Stage, name: str, major: int) -> None:
    task = await stage.calibrated("asserts", major=major)
    assert (await stage.grade(task, ATTACKS[name].patch)).value == 0.0
