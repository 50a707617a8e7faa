"""Attacks that know what the grader does: none of them is paid again and again, and a right fix of the same task is.

`python -m tests.workers.attacks --all-kinds --pytest 7 8 9` plays all of them everywhere.
"""

import asyncio

import pytest

from pipeline.task import unpack
from tests.workers.attacks.chances import CHANCES
from tests.workers.attacks.families import ALL_SCENES, KNOWING_SCENES
from tests.workers.attacks.stage import Stage
from tests.workers.attacks.test_families import ATTACKS, MOST_GRADINGS, paid

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(1200)]

BY_LOG = (
    "an expectation in a local",
    "a point",
    "what works comes first",
    "a checker of the repository",
    "the first failure ends the run",
)
NEWER = (
    (8, "an expectation in a local"),
    (8, "a fixture"),
    (9, "an expectation in a local"),
    (9, "what works comes first"),
    (9, "an error with a message"),
)
# A cheat that is right in half of all gradings is refused less than twice in so many of them once in 7,000 runs of this test.
MOST_TRIES, ENOUGH_REFUSALS = 17, 2


# What these bend cannot be contradicted, or code can change it once it is imported: a snapshot or cases outside of the test's file, an
# example in the code under test, a name that the eval script gives. Such tests are known at verification, so a pass is never called
# confirmed, and `min_control` leaves the task out.
UNCONTROLLED = (
    "a snapshot",
    "cases of the package",
    "a doctest in another module",
    "a reference of the package",
    "a value in the command",
    "rounds of the package",
    "pairs of the package",
)
# The attacks on these that nothing stops.
UNSTOPPED = (
    "a sum that reads the snapshot",
    "a doctest taken out",
    "a sum that reads what the doctest wants",
    "a command that does not agree with the code",
)


async def check(stage: Stage, scene: str, kind: str = "exit_code", major: int = 7) -> None:
    task = await stage.calibrated(scene, kind, major)
    attacks = [
        name
        for name, attack in ATTACKS.items()
        if attack.scene == scene and (kind == "exit_code" or kind in attack.kinds)
    ]
    assert attacks
    calibration = unpack(task.calibration)
    assert calibration is not None
    assert (calibration.best_control == "confirmed") == (scene not in UNCONTROLLED)
    paid_each_time = [name for name in attacks if name not in UNSTOPPED]
    for _ in range(MOST_GRADINGS):
        if paid_each_time:
            paid_each_time = list(await paid(stage, task, paid_each_time))
    assert paid_each_time == []
    assert (await stage.grade(task, ALL_SCENES[scene].fix)).value == 1.0


@pytest.mark.parametrize("scene", KNOWING_SCENES, ids=lambda scene: scene.replace(" ", "-"))
async def test_no_attack_that_knows_the_grader_pays_each_time_and_the_fix_does(
    stage: Stage, scene: str
) -> None:
    await check(stage, scene)


# The one of test_families.py beside them is played there by every kind of verdict.
@pytest.mark.parametrize("scene", BY_LOG, ids=lambda scene: scene.replace(" ", "-"))
async def test_no_attack_pays_on_a_row_of_swe_bench(stage: Stage, scene: str) -> None:
    await check(stage, scene, "swebench_log")


@pytest.mark.parametrize(("major", "scene"), NEWER, ids=lambda part: str(part).replace(" ", "-"))
async def test_no_attack_pays_with_newer_runners(stage: Stage, major: int, scene: str) -> None:
    await check(stage, scene, major=major)


async def test_cheats_by_chance_are_refused_again_and_again(stage: Stage) -> None:
    """Each is right in half of its gradings at most, so two refusals of seventeen gradings are as good as certain."""
    task = await stage.calibrated("asserts")

    async def refusals(patch: bytes) -> int:
        refused = 0
        for _ in range(MOST_TRIES):
            refused += not (await stage.grade(task, patch)).value
            if refused == ENOUGH_REFUSALS:
                break
        return refused

    found = await asyncio.gather(*(refusals(attack.patch) for attack in CHANCES.values()))
    assert dict(zip(CHANCES, found, strict=True)) == dict.fromkeys(CHANCES, ENOUGH_REFUSALS)
