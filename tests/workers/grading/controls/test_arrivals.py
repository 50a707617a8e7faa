"""Controls from end to end, for every way in which hidden tests arrive: calibrated by the known fix, then graded."""

import asyncio
import random

import pytest
from msgspec.structs import replace

from pipeline.task import ExitCode, File, R2eExpected, SwebenchLog, Verdict, pack
from pipeline.task import TestsJson as JsonVerdict  # pytest would take it for tests
from tests.workers.attacks.patches import HONEST
from tests.workers.attacks.scenes import ASSERTS as TESTS
from tests.workers.attacks.scenes import PARSER
from tests.workers.attacks.stage import RunOnce
from tests.workers.attacks.test_attacks import HIDDEN, PROTECTED, task_of
from tests.workers.claims import make_claim
from tests.workers.conftest import RepoImage
from tests.workers.grading.patches import HIDDEN_TESTS
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes
from workers.verify.calibrating import Calibrator

pytestmark = pytest.mark.docker

PYTEST = "python3 -m pytest -rA -p no:cacheprovider tests/test_calc.py\n"
MARKED = (
    f": '>>>>> Start Test Output'\n{PYTEST}: '>>>>> End Test Output'\ngit checkout HEAD tests/test_calc.py\n"
)
NAMES = ("tests/test_calc.py::test_add", "tests/test_calc.py::test_sub")
EQUALS_ALL = HONEST.replace(b"return a + b", b"return type('', (int,), {'__eq__': lambda *_: True})()")
# Tests that were in the repository before the fix, and fail without it.
IN_REPOSITORY = f"cat >tests/test_calc.py <<'EOF'\n{TESTS}EOF\n"
COMMITTED = f"{IN_REPOSITORY}git add -A && git commit -qm tests && git checkout -q HEAD~1\n"


def swebench(script: str) -> SwebenchLog:
    return SwebenchLog(
        eval_script=f"#!/bin/bash\nset -uxo pipefail\ncd /workspace\n{script}{MARKED}",
        log_parser="parse_log_pytest",
        fail_to_pass=NAMES[:1],
        pass_to_pass=NAMES[1:],
        protected_paths=PROTECTED,
    )


# Verdict and setup script.
WAYS: dict[str, tuple[Verdict, str]] = {
    "in the repository already": (ExitCode(eval_script=PYTEST), IN_REPOSITORY),
    "by a test patch": (ExitCode(eval_script=PYTEST, test_patch=HIDDEN_TESTS.encode()), ""),
    "as files": (ExitCode(eval_script=PYTEST, files=HIDDEN, protected_paths=PROTECTED), ""),
    "by a patch in the script": (
        swebench(f"git checkout HEAD tests/test_calc.py\ngit apply -v - <<'EOF_1'\n{HIDDEN_TESTS}EOF_1\n"),
        "",
    ),
    "by a patch that the script writes to a file": (
        swebench(
            "git checkout HEAD tests/test_calc.py\n"
            f"cat >/tmp/hidden.diff <<'EOF_1'\n{HIDDEN_TESTS}EOF_1\n"
            "git apply -v /tmp/hidden.diff || git apply -v --3way /tmp/hidden.diff || exit 1\n"
        ),
        "",
    ),
    "by a file in the script": (swebench(f"cat >tests/test_calc.py <<'EOF_1'\n{TESTS}EOF_1\n"), ""),
    "copied by the script": (
        R2eExpected(
            eval_script=f"rm -rf r2e_tests\ncp -a /r2e_vault/r2e_tests r2e_tests\n{PYTEST.replace('tests/', 'r2e_tests/')}",
            expected={"test_add": "PASSED", "test_sub": "PASSED"},
            protected_paths=("r2e_tests",),
        ),
        f"mkdir -p /r2e_vault/r2e_tests; cat >/r2e_vault/r2e_tests/test_calc.py <<'EOF'\n{TESTS}EOF\n",
    ),
    "checked out by the script": (
        JsonVerdict(
            eval_script=f"git checkout solution -- tests/test_calc.py || exit 1\nbash /run.sh {PROTECTED[0]}\n",
            parser=PARSER,
            tests=NAMES,
            protected_paths=PROTECTED,
            files=(File(path="/run.sh", content=PYTEST.encode()),),
        ),
        COMMITTED.replace("git checkout", "git branch solution && git checkout"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS, ids=[name.replace(" ", "-") for name in WAYS])
async def test_a_right_fix_is_confirmed_and_a_pass_that_cannot_fail_is_refuted(
    sandboxes: DockerSandboxes, repo_image: RepoImage, name: str
) -> None:
    verdict, setup = WAYS[name]
    task = task_of(repo_image, verdict, setup_script=setup)
    grader = Grader(sandboxes)
    calibrator = Calibrator(RunOnce(grader), sandboxes, num_controls=1, chance=random.Random(1))
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert {name for one in calibration.contradictions for name in one.fails} == set(calibration.passing)
    assert len(calibration.passing) == 2
    claim = make_claim(replace(task, calibration=pack(calibration)))
    honest, uncontrolled, cheat = await asyncio.gather(
        grader.grade(claim, HONEST),
        grader.grade(make_claim(task), EQUALS_ALL),
        grader.grade(claim, EQUALS_ALL),
    )
    assert (honest.value, honest.control) == (1.0, "confirmed")
    assert (uncontrolled.value, uncontrolled.control) == (1.0, "none")
    assert (cheat.value, cheat.control) == (0.0, "refuted")
    assert "passes what must fail" in cheat.decided_by
    assert "test_add" in cheat.decided_by
    assert "test_sub" not in cheat.decided_by


@pytest.mark.slow
async def test_tests_in_the_repository_that_a_patch_changes_are_those_of_the_repository(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    """Neither task nor script names them; the calibration does."""
    verdict = ExitCode(eval_script=PYTEST.replace("tests/test_calc.py", "tests"))
    task = task_of(repo_image, verdict, setup_script=IN_REPOSITORY)
    grader = Grader(sandboxes)
    calibrator = Calibrator(RunOnce(grader), sandboxes, num_controls=1, chance=random.Random(1))
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert calibration.test_files == PROTECTED
    claim = make_claim(replace(task, calibration=pack(calibration)))
    removed = "diff --git a/tests/test_calc.py b/tests/test_calc.py\n--- a/tests/test_calc.py\n+++ b/tests/test_calc.py\n"
    removed += "@@ -5,3 +5,3 @@\n def test_add():\n-    assert add(3, 1) == 4\n+    pass\n \n"
    assert (await grader.grade(make_claim(task), removed.encode())).value == 1.0
    assert (await grader.grade(claim, removed.encode())).value == 0.0
    fixed = await grader.grade(claim, HONEST + removed.encode())
    assert (fixed.value, fixed.control) == (1.0, "confirmed")


@pytest.mark.slow
async def test_a_patch_that_changes_tests_which_cannot_be_put_back_is_worth_nothing(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    setup = (
        f"{IN_REPOSITORY}mv tests/test_calc.py tests/test_kept.py; echo test_kept.py >>.git/info/exclude\n"
    )
    # A file that the script names would be put back.
    script = PYTEST.replace("tests/test_calc.py", "tests")
    task = task_of(repo_image, ExitCode(eval_script=script), setup_script=setup)
    grader = Grader(sandboxes)
    calibrator = Calibrator(RunOnce(grader), sandboxes, num_controls=1, chance=random.Random(1))
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert len(calibration.contradictions) == 2
    claim = make_claim(replace(task, calibration=pack(calibration)))
    honest = await grader.grade(claim, HONEST)
    assert (honest.value, honest.control) == (1.0, "confirmed")
    changed = "diff --git a/tests/test_kept.py b/tests/test_kept.py\n--- a/tests/test_kept.py\n+++ b/tests/test_kept.py\n"
    changed += "@@ -1,3 +1,4 @@\n+\n from calc import add, sub\n \n \n"
    reward = await grader.grade(claim, HONEST + changed.encode())
    assert (reward.value, reward.decided_by) == (
        0.0,
        "the patch changed tests/test_kept.py, which holds tests",
    )
