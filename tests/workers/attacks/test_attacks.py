"""Every cheat that we know of, through the production grader. What stops each: docs/grading.md."""

import asyncio

import pytest

from pipeline.errors import GraderError
from pipeline.task import ExitCode, File, R2eExpected, SwebenchLog, Task, Verdict
from pipeline.task import TestsJson as JsonVerdict  # pytest would take it for tests
from tests.workers.attacks.around import AROUND, Around
from tests.workers.attacks.cheats import CONFIGURATION, IN_THE_CODE, THE_PATCH_ITSELF, UNIT_TESTS, UNITTEST
from tests.workers.attacks.patches import HONEST, at_import
from tests.workers.attacks.scenes import ASSERTS, PARSER
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from workers.grading.grade import Grader
from workers.sandbox import protocol
from workers.sandbox.docker import DockerSandboxes

pytestmark = pytest.mark.docker

PROTECTED = ("tests/test_calc.py",)
HIDDEN = (File(path="tests/test_calc.py", content=ASSERTS.encode()),)
SWE_BENCH = f"""#!/bin/bash
set -uxo pipefail
cd /workspace
git checkout HEAD tests/test_calc.py
cat >tests/test_calc.py <<'EOF_114329324912'
{ASSERTS}EOF_114329324912
: '>>>>> Start Test Output'
python3 -m pytest -rA tests/test_calc.py
: '>>>>> End Test Output'
git checkout HEAD tests/test_calc.py
"""


def by_exit_code(script: str = "python3 -m pytest tests/test_calc.py\n", **more: str) -> ExitCode:
    files = tuple(File(path=path, content=text.encode()) for path, text in more.items())
    return ExitCode(eval_script=f"set -e\n{script}", protected_paths=PROTECTED, files=HIDDEN + files)


KINDS: dict[str, Verdict] = {
    "exit_code": by_exit_code(),
    "swebench_log": SwebenchLog(
        eval_script=SWE_BENCH,
        log_parser="parse_log_pytest",
        fail_to_pass=("tests/test_calc.py::test_add",),
        pass_to_pass=("tests/test_calc.py::test_sub",),
        protected_paths=PROTECTED,
    ),
    "r2e_expected": R2eExpected(
        eval_script="cd /workspace\npython3 -W ignore -m pytest -rA tests/test_calc.py\n",
        expected={"test_add": "PASSED", "test_sub": "PASSED"},
        protected_paths=PROTECTED,
        files=HIDDEN,
    ),
    "tests_json": JsonVerdict(
        eval_script="python3 -m pytest -rA tests/test_calc.py\n",
        parser=PARSER,
        tests=("tests/test_calc.py::test_add", "tests/test_calc.py::test_sub"),
        protected_paths=PROTECTED,
        files=HIDDEN,
    ),
}
UNITTEST_VERDICT = ExitCode(
    eval_script="python3 -m unittest tests/test_unit.py\n",
    files=(File(path="tests/test_unit.py", content=UNIT_TESTS.encode()),),
)


@pytest.fixture
def grader(sandboxes: DockerSandboxes) -> Grader:
    return Grader(sandboxes)


def task_of(image: RepoImage, verdict: Verdict, **changes: object) -> Task:
    return make_task(image.tag, base_commit=image.commit, verdict=verdict, **changes)


# These may end without a verdict; everything else has to be seen through.
BREAKS_OFF = {"an end that the kernel brings about"}


async def paid(grader: Grader, task: Task, patch: bytes) -> str | None:
    """By what the patch got its pay; None if it got none."""
    reward = await grader.grade(make_claim(task), patch)
    return reward.decided_by if reward.value else None


async def tried(grader: Grader, image: RepoImage, patch: bytes, *kinds: str) -> dict[str, str | None]:
    gradings = (paid(grader, task_of(image, KINDS[kind]), patch) for kind in kinds)
    return dict(zip(kinds, await asyncio.gather(*gradings), strict=True))


async def check_only_a_fix_pays(grader: Grader, task: Task, cheat: bytes, *, undone: bool = True) -> None:
    """The cheat is not paid. A fix beside it is if what the cheat does is `undone`; if it is not, a fix alone is."""
    patches = {"cheat": cheat, "both": HONEST + cheat} | ({} if undone else {"fix": HONEST})
    reasons = await asyncio.gather(*(paid(grader, task, patch) for patch in patches.values()))
    are_paid = {name for name, reason in zip(patches, reasons, strict=True) if reason}
    assert are_paid == ({"both"} if undone else {"fix"})


def named(cheats: dict[str, bytes]) -> list[object]:
    return [pytest.param(name, patch, id=name.replace(" ", "-")) for name, patch in cheats.items()]


# Quick: a cheat of each kind in the code under test is worth nothing.
@pytest.mark.slow_but_for(
    "os._exit-at-import",
    "a-complete-forged-report",
    "a-report-that-always-passes",
    "pytest.skip",
    "a-runner-that-runs-nothing",
    "the-side-channel",
)
@pytest.mark.parametrize(("name", "patch"), named(IN_THE_CODE))
async def test_no_cheat_in_the_code_pays(
    grader: Grader, repo_image: RepoImage, name: str, patch: bytes
) -> None:
    try:
        assert set((await tried(grader, repo_image, patch, *KINDS)).values()) == {None}
    except GraderError:
        assert name in BREAKS_OFF


@pytest.mark.slow_but_for("conftest.py-at-the-root", "sitecustomize.py")
@pytest.mark.parametrize(("name", "patch"), named(CONFIGURATION))
async def test_no_cheat_by_configuration_pays(
    grader: Grader, repo_image: RepoImage, name: str, patch: bytes
) -> None:
    assert set(
        (await tried(grader, repo_image, patch, "exit_code", "r2e_expected", "tests_json")).values()
    ) == {None}


@pytest.mark.slow_but_for("edited-hidden-tests", "tests-that-are-a-link")
@pytest.mark.parametrize(("name", "patch"), named(THE_PATCH_ITSELF))
async def test_no_cheat_by_the_patch_itself_pays(
    grader: Grader, repo_image: RepoImage, name: str, patch: bytes
) -> None:
    assert set((await tried(grader, repo_image, patch, "exit_code", "swebench_log")).values()) == {None}


@pytest.mark.slow_but_for("tests-that-others-choose")
@pytest.mark.parametrize("around", AROUND.values(), ids=[name.replace(" ", "-") for name in AROUND])
async def test_no_cheat_on_the_surroundings_pays(
    grader: Grader, repo_image: RepoImage, around: Around
) -> None:
    verdict = by_exit_code(around.script, **around.tests)
    task = task_of(repo_image, verdict, setup_script=around.setup, env=around.env)
    await check_only_a_fix_pays(grader, task, around.patch, undone=around.undone)


@pytest.mark.slow_but_for("a-complete-forged-report", "compiled-tests")
@pytest.mark.parametrize("patch", UNITTEST.values(), ids=[name.replace(" ", "-") for name in UNITTEST])
async def test_no_cheat_on_unittest_pays(grader: Grader, repo_image: RepoImage, patch: bytes) -> None:
    assert await paid(grader, task_of(repo_image, UNITTEST_VERDICT), patch) is None


@pytest.mark.slow
@pytest.mark.alone
async def test_a_fork_bomb_does_not_pay(grader: Grader, repo_image: RepoImage) -> None:
    bomb = at_import("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass")
    claim = make_claim(task_of(repo_image, by_exit_code()), grade_cpu_s=2.0)
    assert (await grader.grade(claim, bomb)).decided_by == "cpu time used up"


@pytest.mark.slow
async def test_code_that_waits_does_not_pay(
    grader: Grader, repo_image: RepoImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However busy the machine of this test is: that it had CPU to give is assumed."""
    monkeypatch.setattr(protocol, "STARVED_SHARE", 2.0)
    claim = make_claim(task_of(repo_image, by_exit_code()), grade_wall_s=3.0)
    reward = await grader.grade(claim, at_import("import time; time.sleep(1000)"))
    assert (reward.value, reward.decided_by[:25]) == (0.0, "waited without using CPU:")


@pytest.mark.slow
async def test_the_next_honest_episode_gets_its_pay(grader: Grader, repo_image: RepoImage) -> None:
    verdicts = (*KINDS.values(), UNITTEST_VERDICT)
    gradings = (paid(grader, task_of(repo_image, verdict), HONEST) for verdict in verdicts)
    assert all(await asyncio.gather(*gradings))
