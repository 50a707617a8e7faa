"""All attacks, by family: those on scenes of their own, and those that the grader knew before there were controls."""

from tests.workers.attacks.answers import ANSWERS
from tests.workers.attacks.around import AROUND
from tests.workers.attacks.bent import BENT
from tests.workers.attacks.chances import CHANCES
from tests.workers.attacks.cheats import CONFIGURATION, IN_THE_CODE, THE_PATCH_ITSELF, UNITTEST
from tests.workers.attacks.choices import CHOICES
from tests.workers.attacks.endless import ENDLESS
from tests.workers.attacks.expectations import EXPECTATION_SCENES
from tests.workers.attacks.finding import FINDING
from tests.workers.attacks.first_failure import FIRST_FAILURE, FIRST_FAILURE_SCENES
from tests.workers.attacks.lookalikes import LOOKALIKES
from tests.workers.attacks.parts import PART_SCENES, PARTS
from tests.workers.attacks.remembering import REMEMBERING, REMEMBERING_SCENES
from tests.workers.attacks.runs import RUNS, SCRIPT_SCENES
from tests.workers.attacks.scenes import ASSERTS, SCENES, Attack, Scene
from tests.workers.attacks.siblings import SIBLINGS
from tests.workers.attacks.source import SOURCE
from tests.workers.attacks.substitutes import SUBSTITUTES
from tests.workers.attacks.telltales import TELLTALE_SCENES, TELLTALES
from tests.workers.attacks.untested import UNTESTED, UNTESTED_SCENES

FAMILIES: dict[str, dict[str, Attack]] = {
    "tests changed before they run": SOURCE,
    "objects of the runner altered": BENT,
    "functions replaced by Python's own": SUBSTITUTES,
    "answers that agree with the test": ANSWERS,
    "other tests than were meant": CHOICES,
    "another run or script": RUNS,
    "the expected value found": FINDING,
    "answers that look like what is expected": LOOKALIKES,
    "other tests asked": SIBLINGS,
    "an earlier failure noticed": TELLTALES,
    "what decides is elsewhere": UNTESTED,
    "scripts that end at the first failure": FIRST_FAILURE,
    "a control without an end": ENDLESS,
    "contradictions recognised, answers searched for": REMEMBERING,
    "a part of what is expected, any condition": PARTS,
}
# Paid now and then.
BY_CHANCE = {"one run distinguished from the other by chance": CHANCES}
KNOWING_SCENES: dict[str, Scene] = {
    **EXPECTATION_SCENES,
    **TELLTALE_SCENES,
    **UNTESTED_SCENES,
    **FIRST_FAILURE_SCENES,
    **REMEMBERING_SCENES,
    **PART_SCENES,
}
ALL_SCENES: dict[str, Scene] = {**SCENES, **SCRIPT_SCENES, **KNOWING_SCENES}

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
