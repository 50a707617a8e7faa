"""All attacks that are played on scenes, by family."""

from tests.workers.attacks.answers import ANSWERS
from tests.workers.attacks.bent import BENT
from tests.workers.attacks.choices import CHOICES
from tests.workers.attacks.runs import RUNS, SCRIPT_SCENES
from tests.workers.attacks.scenes import SCENES, Attack, Scene
from tests.workers.attacks.source import SOURCE
from tests.workers.attacks.substitutes import SUBSTITUTES

ALL_SCENES: dict[str, Scene] = {**SCENES, **SCRIPT_SCENES}
FAMILIES: dict[str, dict[str, Attack]] = {
    "tests changed before they run": SOURCE,
    "objects of the runner bent": BENT,
    "functions replaced by Python's own": SUBSTITUTES,
    "answers that agree with the test": ANSWERS,
    "other tests than were meant": CHOICES,
    "another run or script": RUNS,
}
