"""Attacks that were paid before there were controls: none of them is worth anything, and a right fix on the same task is.

The whole matrix of verdicts and versions of pytest takes long: `python -m tests.workers.attacks --all-kinds --pytest 7 8 9`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable

import pytest

from pipeline.errors import GraderError
from pipeline.task import Task
from tests.workers.attacks.families import ALL_SCENES, FAMILIES, KNOWING_SCENES
from tests.workers.attacks.patches import HONEST
from tests.workers.attacks.runs import SCRIPT_SCENES
from tests.workers.attacks.scenes import SCENES, Attack
from tests.workers.attacks.stage import Stage

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

ATTACKS = {name: attack for attacks in FAMILIES.values() for name, attack in attacks.items()}
# Of the families whose attacks only a control stops, one each.
EVERYWHERE = (
    "functions emptied by a profiler",
    "an outcome that reads as passed",
    "a number that equals any",
    "the expected value read from the line",
)
AT_ONCE = 3
# A control contradicts one thing that a test expects, and an attack that knows the grader may bend another one: it has to be refused in
# one of so many gradings.
MOST_GRADINGS = 4


async def paid(stage: Stage, task: Task, attacks: Iterable[str]) -> dict[str, str]:
    """The attacks that are paid, and by what."""
    places = asyncio.Semaphore(AT_ONCE)

    async def why_paid(attack: Attack) -> str:
        async with places:
            try:
                reward = await stage.grade(task, attack.patch)
            except GraderError:  # no verdict, and so no pay
                return ""
        return reward.decided_by if reward.value else ""

    names = list(attacks)
    reasons = await asyncio.gather(*(why_paid(ATTACKS[name]) for name in names))
    return {name: reason for name, reason in zip(names, reasons, strict=True) if reason}


async def confirmed(stage: Stage, task: Task, scene: str) -> bool:
    """Whether the right fix is paid, after a control."""
    reward = await stage.grade(task, ALL_SCENES[scene].fix)
    return bool(reward.value) and reward.control == "confirmed"


# Quick: an attack of each family is worth nothing, and the honest fix on the same task is worth 1.
async def test_one_attack_of_each_family_is_worth_nothing_and_the_fix_is(stage: Stage) -> None:
    await play_one_of_each(stage)


@pytest.mark.slow
async def test_the_same_holds_where_tests_are_not_roots(stage_of_user: Stage) -> None:
    await play_one_of_each(stage_of_user)


async def play_one_of_each(stage: Stage) -> None:
    chosen: dict[str, list[str]] = defaultdict(list)
    for attacks in FAMILIES.values():
        # Most families have one on asserts; each further scene is one more verification.
        name = next((name for name in attacks if attacks[name].scene == "asserts"), next(iter(attacks)))
        chosen[attacks[name].scene].append(name)
    assert sum(map(len, chosen.values())) == len(FAMILIES)
    for scene, names in chosen.items():
        task = await stage.calibrated(scene)
        paid_each_time = names
        for _ in range(MOST_GRADINGS if scene in KNOWING_SCENES else 1):
            if paid_each_time:
                paid_each_time = list(await paid(stage, task, paid_each_time))
        assert paid_each_time == []
        assert await confirmed(stage, task, scene)


# Those of KNOWING_SCENES are played by test_knowing.py.
@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.replace(" ", "-"))
async def test_no_attack_pays_and_the_fix_does(stage: Stage, scene: str) -> None:
    task = await stage.calibrated(scene)
    attacks = [name for name, attack in ATTACKS.items() if attack.scene == scene]
    assert attacks
    assert await paid(stage, task, attacks) == {}
    assert await confirmed(stage, task, scene)


# The scripts are put back before they run. So no calibration is needed, and a fix that changes one as well is paid.
@pytest.mark.slow_but_for("a-script-of-another-name")
@pytest.mark.parametrize("scene", SCRIPT_SCENES, ids=lambda scene: scene.replace(" ", "-"))
async def test_a_script_of_the_patch_does_not_stand_in_for_the_tests(stage: Stage, scene: str) -> None:
    task, attack = stage.task(scene), ATTACKS[scene].patch
    assert (await stage.grade(task, attack)).value == 0.0
    assert (await stage.grade(task, HONEST + attack)).value == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["swebench_log", "r2e_expected", "tests_json"])
async def test_no_attack_pays_by_another_kind_of_verdict(stage: Stage, kind: str) -> None:
    task = await stage.calibrated("asserts", kind)
    of_kind = [name for name, attack in ATTACKS.items() if attack.scene == "asserts" and kind in attack.kinds]
    assert await paid(stage, task, {*EVERYWHERE, *of_kind}) == {}
    assert await confirmed(stage, task, "asserts")


@pytest.mark.slow
@pytest.mark.parametrize("major", [8, 9])
async def test_no_attack_pays_with_a_newer_pytest(stage: Stage, major: int) -> None:
    task = await stage.calibrated("asserts", major=major)
    assert await paid(stage, task, EVERYWHERE) == {}
    assert await confirmed(stage, task, "asserts")
