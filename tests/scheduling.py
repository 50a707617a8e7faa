"""Which tests a worker of xdist runs one after the other, and which come first: what shares something costly stays together.

A file is one unit of work: its fixtures are made once. In the folders of SINGLY, whose fixtures are those of a session or of a test, each
test is one, or all on one scene are, which share its calibration: so the longest file does not keep one worker busy alone at the end.
"""

import re

import pytest
from xdist.scheduler import LoadScopeScheduling

SINGLY = ("tests/workers/attacks/",)
# Of these, the tests on one scene. Those on PLAIN are one unit, because the fuzzer's tests need both.
CALIBRATED = tuple(f"tests/workers/attacks/test_{name}.py" for name in ("families", "knowing", "fuzz"))
PLAIN = ("asserts", "unittest", "8", "9", "swebench_log", "r2e_expected", "tests_json")
# From the longest unit on; all other tests follow as they were collected. Measured in tests/README.md.
FIRST = (
    "tests/infra/test_chaos.py",
    "tests/trainer/learner/test_layouts.py",
    "tests/workers/attacks/test_families.py",
    "tests/workers/attacks/",
    "tests/trainer/test_resume.py",
    "tests/trainer/test_run.py",
    "tests/trainer/learner/",
    "tests/workers/verify/",
    "tests/workers/grading/",
    "tests/workers/",
    "tests/trainer/",
    "tests/infra/",
)


def unit(nodeid: str) -> str:
    """The unit of work that a test belongs to."""
    file, _, test = nodeid.partition("::")
    if not file.startswith(SINGLY):
        return file
    if file not in CALIBRATED:
        return nodeid
    scene = re.sub(r"^\d-", "", test.partition("[")[2].removesuffix("]"))
    return f"attacks on {scene if scene and scene not in PLAIN else PLAIN[0]}"


def rank(nodeid: str) -> int:
    """The place of a test in the order of units."""
    return next((place for place, start in enumerate(FIRST) if nodeid.startswith(start)), len(FIRST))


class Scheduling(LoadScopeScheduling):
    """`--dist loadscope` by `unit`. Units are given out in the order in which their tests were collected."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
