"""Right fixes that look like cheats are paid: modules with names of libraries, and what the base does to the runner."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from pipeline.request import Claim
from pipeline.task import Calibration, ExitCode, File, Task, Verdict, pack
from tests.workers.attacks.governing import written
from tests.workers.attacks.patches import edited, edited_text, new
from tests.workers.attacks.test_attacks import KINDS, UNITTEST_VERDICT, task_of
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.grading.patches import FIX, HIDDEN_TESTS, NOTE
from workers.grading.container import FailedWhileStarved
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import LastResult, Role, Sandbox

pytestmark = pytest.mark.docker

VERDICTS = KINDS | {"unittest": UNITTEST_VERDICT}
# The fix lies in modules that have the names of a standard, an installed, and the runner's module.
OWN_MODULES = (
    edited("calc.py", "def add(a, b):\n    return a - b\n", "from sums.statistics import total as add\n")
    + new(
        "sums/statistics.py",
        "from .attr import plus\nfrom .vendor.packaging import same\nfrom .lib.six import one\n"
        "\n\ndef total(a, b):\n    return one(same(plus(a, b)))",
    )
    + new("sums/attr.py", "from .coverage import plus")
    + new("sums/coverage.py", "def plus(a, b):\n    return a + b")
    + new("sums/vendor/packaging/__init__.py", "def same(number):\n    return number")
    + new("sums/lib/six.py", "def one(number):\n    return number")
)
WRAPS_PYTEST = """import pytest

_run = pytest.Function.runtest


def run(self):
    _run(self)


pytest.Function.runtest = run
"""
WRAPS_UNITTEST = """import unittest

_run = unittest.TestCase.run


def run(self, result=None):
    return _run(self, result)


unittest.TestCase.run = run
"""
RUNTESTS = f"import sys\nimport unittest\n\n{WRAPS_UNITTEST.partition('import unittest')[2]}\nunittest.main('tests.test_unit')\n"


async def value(grader: Grader, task: Task, patch: bytes) -> float:
    return (await grader.grade(make_claim(task), patch)).value


@pytest.mark.slow_but_for("exit_code", "r2e_expected")
@pytest.mark.parametrize("verdict", VERDICTS.values(), ids=list(VERDICTS))
async def test_a_fix_may_name_modules_of_its_own_package_as_it_likes(
    grader: Grader, repo_image: RepoImage, verdict: Verdict
) -> None:
    task = task_of(repo_image, verdict, setup_script="mkdir sums && touch sums/__init__.py")
    assert await value(grader, task, OWN_MODULES) == 1.0


@pytest.mark.slow_but_for("exit_code", "swebench_log")
@pytest.mark.parametrize("verdict", KINDS.values(), ids=list(KINDS))
async def test_a_base_whose_conftest_wraps_pytest_is_paid(
    grader: Grader, repo_image: RepoImage, verdict: Verdict
) -> None:
    task = task_of(repo_image, verdict, setup_script=written("conftest.py", WRAPS_PYTEST, "644"))
    also = edited_text("conftest.py", WRAPS_PYTEST, f"{WRAPS_PYTEST}# wrapped\n")
    assert await asyncio.gather(value(grader, task, FIX), value(grader, task, FIX + also)) == [1.0, 1.0]


async def test_a_base_whose_runner_wraps_unittest_is_paid(grader: Grader, repo_image: RepoImage) -> None:
    verdict = replace(UNITTEST_VERDICT, eval_script="python3 runtests.py\n")
    task = task_of(repo_image, verdict, setup_script=written("runtests.py", RUNTESTS, "644"))
    also = edited_text("runtests.py", RUNTESTS, f"{RUNTESTS}# wrapped\n")
    assert await asyncio.gather(value(grader, task, FIX), value(grader, task, FIX + also)) == [1.0, 1.0]


SCRIPT = "#!/bin/bash\necho $(($1 - $2))\n"


async def test_a_script_that_the_known_fix_changes_is_under_test(
    grader: Grader, repo_image: RepoImage
) -> None:
    verdict = ExitCode(eval_script="set -e\n[ $(bash add.sh 3 1) = 4 ]\n")
    task = task_of(repo_image, verdict, setup_script=written("add.sh", SCRIPT))
    fix = edited_text("add.sh", SCRIPT, SCRIPT.replace("-", "+"))
    assert await value(grader, task, fix) == 0.0
    known = replace(task, calibration=pack(Calibration(fix_paths=("add.sh",))))
    assert await value(grader, known, fix) == 1.0


async def test_source_that_the_script_only_names_may_be_fixed(grader: Grader, repo_image: RepoImage) -> None:
    docs = ">>> add(3, 1)\n4\n"
    before = f'def add(a, b):\n    """Adds.\n\n    {docs.strip().replace(chr(10), chr(10) + "    ")}\n    """\n    return a - b\n'
    verdict = ExitCode(
        eval_script="python3 -m pytest --doctest-modules sums.py tests/test_calc.py\n",
        files=(File(path="tests/test_calc.py", content=b"def test_it(): pass\n"),),
    )
    task = task_of(repo_image, verdict, setup_script=written("sums.py", before, "644"))
    assert await value(grader, task, edited_text("sums.py", before, before.replace("a - b", "a + b"))) == 1.0


STEADY = "import os\n\n\ndef test_steady():\n    assert not os.path.exists('/tmp/busy')"
BROKEN = edited(
    "calc.py", "a - b\n\n\ndef sub(a, b):\n    return a - b", "a + b\n\n\ndef sub(a, b):\n    return b"
)


def task_with_steady(repo_image: RepoImage) -> Task:
    """A task with a test that passes unless `/tmp/busy` is there."""
    verdict = ExitCode(
        eval_script="cd /workspace && python3 -m pytest tests",
        test_patch=HIDDEN_TESTS.encode() + new("tests/test_steady.py", STEADY),
    )
    names = [f"tests/test_calc.py::test_{name}" for name in ("add", "sub")]
    calibration = Calibration(
        passing=(*names, "tests/test_steady.py::test_steady"), needing_fix=(names[0],), witnessed=True
    )
    return make_task(
        repo_image.tag, base_commit=repo_image.commit, verdict=verdict, calibration=pack(calibration)
    )


@pytest.mark.parametrize(
    ("patch", "worth", "num_runs"),
    [(FIX, 1.0, 2), (BROKEN, 0.0, 2), (NOTE, 0.0, 1)],
    ids=["a right fix", "a fix that breaks something", "no fix"],
)
async def test_tests_run_again_if_only_one_that_does_not_need_the_fix_failed(
    sandboxes: DockerSandboxes,
    repo_image: RepoImage,
    monkeypatch: pytest.MonkeyPatch,
    patch: bytes,
    worth: float,
    num_runs: int,
) -> None:
    opened: list[Sandbox] = []
    open_any = sandboxes.open

    @asynccontextmanager
    async def open_one(claim: Claim, *, role: Role) -> AsyncGenerator[Sandbox]:
        """Opens a container; the first one has a file that `STEADY` takes for a busy machine."""
        async with open_any(claim, role=role) as sandbox:
            if not opened:
                await sandbox.put([File(path="/tmp/busy", content=b"")])
            opened.append(sandbox)
            yield sandbox

    monkeypatch.setattr(sandboxes, "open", open_one)
    reward = await Grader(sandboxes).grade(make_claim(task_with_steady(repo_image)), patch)
    assert (reward.value, len(opened)) == (worth, num_runs), reward
    assert ("in a second run, because tests/test_steady.py" in reward.decided_by) == (patch == FIX)


@pytest.mark.parametrize("starved_share", [0.0, 0.9])
async def test_tests_that_fail_twice_for_want_of_cpu_are_a_failure_of_the_infrastructure(
    sandboxes: DockerSandboxes,
    repo_image: RepoImage,
    monkeypatch: pytest.MonkeyPatch,
    starved_share: float,
) -> None:
    open_any = sandboxes.open

    @asynccontextmanager
    async def open_one(claim: Claim, *, role: Role) -> AsyncGenerator[Sandbox]:
        """Opens a container in which `STEADY` fails, of whose time the machine had no CPU for this share."""
        async with open_any(claim, role=role) as sandbox:
            await sandbox.put([File(path="/tmp/busy", content=b"")])
            finish = sandbox.finish

            async def finish_starved(*words: Any, **options: Any) -> LastResult:
                result = await finish(*words, **options)
                return dataclasses.replace(result, starved_s=starved_share * result.wall_s)

            monkeypatch.setattr(sandbox, "finish", finish_starved)
            yield sandbox

    monkeypatch.setattr(sandboxes, "open", open_one)
    grading = Grader(sandboxes).grade(make_claim(task_with_steady(repo_image)), FIX)
    if starved_share:
        with pytest.raises(FailedWhileStarved, match="test_steady did not pass in two runs"):
            await grading
    else:
        assert (await grading).value == 0.0
