"""All attacks, by family: those on scenes of their own, and those that the grader knew before there were controls."""

from tests.workers.attacks.answers import ANSWERS
from tests.workers.attacks.around import AROUND
from tests.workers.attacks.bent import BENT
from tests.workers.attacks.cheats import CONFIGURATION, IN_THE_CODE, THE_PATCH_ITSELF, UNITTEST
from tests.workers.attacks.choices import CHOICES
from tests.workers.attacks.runs import RUNS, SCRIPT_SCENES
from tests.workers.attacks.scenes import ASSERTS, SCENES, Attack, Scene
from tests.workers.attacks.source import SOURCE
from tests.workers.attacks.substitutes import SUBSTITUTES

FAMILIES: dict[str, dict[str, Attack]] = {
    "tests changed before they run": SOURCE,
    "objects of the runner bent": BENT,
    "functions replaced by Python's own": SUBSTITUTES,
    "answers that agree with the test": ANSWERS,
    "other tests than were meant": CHOICES,
    "another run or script": RUNS,
}
ALL_SCENES: dict[str, Scene] = {**SCENES, **SCRIPT_SCENES}

# Played by test_attacks.py, which needs no calibrated task for them; here they are for the table.
AROUND_SCENES = {
    name: Scene(
        {"tests/test_calc.py": ASSERTS, **around.tests},
        command=around.script,
        setup=around.setup,
        env=around.env,
    )
    for name, around in AROUND.items()
}
EARLIER: dict[str, dict[str, Attack]] = {
    "files that govern the runner": {name: Attack(patch) for name, patch in CONFIGURATION.items()},
    "code that ends or replaces tests": {name: Attack(patch) for name, patch in IN_THE_CODE.items()},
    "the patch itself": {name: Attack(patch) for name, patch in THE_PATCH_ITSELF.items()},
    "what surrounds the tests": {name: Attack(around.patch, name) for name, around in AROUND.items()},
    "the same with unittest": {name: Attack(patch, "unittest") for name, patch in UNITTEST.items()},
}
