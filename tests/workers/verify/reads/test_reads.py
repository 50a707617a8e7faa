"""What tests read is as in the repository when they run, and right fixes of the package stay right."""

import asyncio
import dataclasses
import random

import pytest
from msgspec.structs import replace

from pipeline.task import Calibration, ExitCode, File, Task, pack
from tests.workers.attacks.patches import HONEST, edited_text, gone_text, link, new
from tests.workers.attacks.stage import RunOnce
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import FILES, RepoImage
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes
from workers.verify.calibrating import Calibrator
from workers.verify.fixed import record

pytestmark = pytest.mark.docker

CALC = FILES["repo/calc.py"]
# The repository besides calc.py, whose `add` subtracts.
REPO = {
    "tools/__init__.py": "",
    "tools/units.py": "from calc import add\n\n\ndef total(*numbers):\n    return add(*numbers)\n",
    "tools/names.json": '["a"]\n',
    "tests/__init__.py": "",
    "tests/support/__init__.py": "",
    "tests/support/checks.py": "def check(found, expected):\n    assert found == expected\n",
    "tests/table.py": "TABLE = [(3, 1, 4)]\n",
    "tests/data/cases.json": "[[3, 1, 4]]\n",
    "golden/total.txt": "4\n",
}
TESTS = """import json
import pathlib

import calc
from tools.units import total

from .support.checks import check
from .table import TABLE

HERE = pathlib.Path(__file__).parent


def test_checks():
    check(calc.add(3, 1), 4)


def test_table():
    more = HERE / "more.json"
    try:
        cases = json.loads(more.read_text())
    except FileNotFoundError:
        cases = TABLE
    for a, b, expected in cases:
        assert calc.add(a, b) == expected


def test_cases():
    for a, b, expected in json.loads((HERE / "data" / "cases.json").read_text()):
        assert calc.add(a, b) == expected


def test_golden():
    with open("golden/total.txt") as file:
        assert total(3, 1) == int(file.read())


def test_names():
    assert len(json.loads((HERE.parent / "tools" / "names.json").read_text())) == 1
"""
CHECKS, TABLE, CASES, GOLDEN = (
    "tests/support/checks.py",
    "tests/table.py",
    "tests/data/cases.json",
    "golden/total.txt",
)
NEEDING_FIX = ("test_checks", "test_table", "test_cases", "test_golden")


def setup_of(files: dict[str, str]) -> str:
    """Writes these files."""
    return "".join(
        f"mkdir -p $(dirname {path})\ncat >{path} <<'EOF'\n{text}EOF\n" for path, text in files.items()
    )


def task_of(image: RepoImage, *, only: str = "", files: dict[str, str] = REPO, tests: str = TESTS) -> Task:
    options = f" -k '{only}'" if only else ""
    verdict = ExitCode(
        eval_script=f"set -e\npython3 -m pytest{options} tests/test_all.py\n",
        files=(File(path="tests/test_all.py", content=tests.encode()),),
    )
    return make_task(image.tag, base_commit=image.commit, setup_script=setup_of(files), verdict=verdict)


def changed(path: str, old: str, becomes: str) -> bytes:
    return edited_text(path, REPO[path], REPO[path].replace(old, becomes))


@pytest.fixture
def grader(sandboxes: DockerSandboxes) -> Grader:
    return Grader(sandboxes)


@pytest.fixture
def calibrator(sandboxes: DockerSandboxes, grader: Grader) -> Calibrator:
    return Calibrator(grader, sandboxes, num_controls=0, chance=random.Random(1))


def calibrated(task: Task, calibration: Calibration) -> Task:
    return replace(task, calibration=pack(calibration))


def replaced_by_link(path: str, becomes: str) -> bytes:
    """The file becomes a link to another one, in a folder of its own."""
    other = f"others/{path.replace('/', '_')}"
    return gone_text(path, REPO[path]) + link(path, f"{'../' * path.count('/')}{other}") + new(other, becomes)


# Each makes all tests pass that need the fix, without it.
CHEATS = {
    "edited and added": changed(CHECKS, "assert found == expected", "pass")
    + new("tests/more.json", "[]")
    + changed(CASES, "4", "2")
    + changed(GOLDEN, "4", "2"),
    "behind links": replaced_by_link(CHECKS, "def check(found, expected):\n    pass\n")
    + replaced_by_link(TABLE, "TABLE = []\n")
    + gone_text(CASES, REPO[CASES])
    + link("tests/data", "../others")
    + new("others/cases.json", "[]\n")
    + replaced_by_link(GOLDEN, "2\n"),
    "hidden by packages": new("tests/support/checks/__init__.py", "def check(found, expected):\n    pass\n")
    + link("tests/table", "../others")
    + new("others/__init__.py", "TABLE = []\n")
    + changed(CASES, "[[3, 1, 4]]", "[]")
    + changed(GOLDEN, "4", "2"),
}
# The fix is in a module that the tests import, too.
ELSEWHERE = edited_text(
    "tools/units.py",
    REPO["tools/units.py"],
    REPO["tools/units.py"].replace("from calc import add\n", "def add(a, b):\n    return a + b\n"),
) + edited_text(
    "calc.py", CALC, CALC.replace("def add(a, b):\n    return a - b\n", "from tools.units import add\n")
)


@pytest.mark.slow
async def test_what_tests_read_is_restored_and_what_is_under_test_is_not(
    calibrator: Calibrator, grader: Grader, repo_image: RepoImage
) -> None:
    task = task_of(repo_image)
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert {CHECKS, TABLE, CASES, GOLDEN} <= set(calibration.reads)
    assert not {"calc.py", "tools/units.py", "tools/names.json"} & set(calibration.reads)
    assert (calibration.in_fix, calibration.from_package) == ((), ("tests/test_all.py::test_names",))
    known = calibrated(task, calibration)
    unknown = await asyncio.gather(*(grader.grade(make_claim(task), cheat) for cheat in CHEATS.values()))
    assert [reward.value for reward in unknown] == [1.0] * len(CHEATS)
    cheats = await asyncio.gather(*(grader.grade(make_claim(known), cheat) for cheat in CHEATS.values()))
    for reward in cheats:
        assert reward.value == 0.0
        outcomes = {name.rpartition("::")[2]: outcome for name, outcome in reward.tests.items()}
        assert {outcomes[name] for name in NEEDING_FIX} == {"FAILED"}
    assert "put back, because they govern the tests: golden/total.txt" in cheats[0].decided_by
    fixes = await asyncio.gather(*(grader.grade(make_claim(known), fix) for fix in (HONEST, ELSEWHERE)))
    assert [reward.value for reward in fixes] == [1.0, 1.0]


FLAGGED = {
    "other.py": 'from tools.known import KNOWN\n\n\ndef one():\n    """One.\n\n    >>> one()\n    1\n    """\n    return len(KNOWN)\n',
    "tools/cases.py": "CASES = [(3, 1, 4)]\n",
    "tools/known.py": "KNOWN = [(2, 1, 3)]\n",
    "tests/support.py": "def check(found, expected):\n    assert found == expected\n",
    "tests/conftest.py": "import subprocess\nimport sys\n\nimport pytest\n\n\n@pytest.fixture\ndef total():\n"
    "    run = [sys.executable, 'tests/command.py', '3', '1']\n"
    "    return int(subprocess.run(run, check=True, stdout=subprocess.PIPE).stdout)\n",
    "tests/command.py": "import sys\nfrom pathlib import Path\n\nsys.path[:0] = ['.']\nfrom calc import add\n\n"
    "if __name__ == '__main__':\n    more = int(Path('tests/more.txt').read_text())\n"
    "    print(add(*map(int, sys.argv[1:])) + more)\n",
    "tests/more.txt": "0\n",
}
FLAGGED_TESTS = """from calc import add
from tools.cases import CASES
from tools.known import KNOWN

from support import check


def test_checked():
    check(add(3, 1), 4)


def test_cases():
    for a, b, expected in [*CASES, *KNOWN]:
        assert add(a, b) == expected
"""


@pytest.mark.slow
async def test_tests_that_a_patch_may_change_or_tell_what_to_expect_are_flagged(
    calibrator: Calibrator, grader: Grader, repo_image: RepoImage
) -> None:
    verdict = ExitCode(
        eval_script="set -e\npython3 -m pytest --doctest-modules calc.py other.py tests\n",
        files=(
            File(path="tests/test_all.py", content=FLAGGED_TESTS.encode()),
            File(path="tests/test_run.py", content=b"def test_run(total):\n    assert total == 4\n"),
        ),
    )
    task = make_task(repo_image.tag, setup_script=setup_of(FLAGGED), verdict=verdict)
    documented = '    """Adds.\n\n    >>> add(3, 1)\n    4\n    """\n    return a + b\n'
    support = FLAGGED["tests/support.py"]
    fix = edited_text("calc.py", CALC, CALC.replace("    return a - b\n", documented, 1)) + edited_text(
        "tests/support.py", support, f"{support}    assert expected == found\n"
    )
    calibrator = dataclasses.replace(calibrator, grader=RunOnce(grader), num_controls=1)
    calibration = await calibrator.calibrate(make_claim(task), fix)
    assert set(calibration.in_fix) == {
        "calc.py::calc.add",
        "other.py::other.one",
        "tests/test_all.py::test_cases",
        "tests/test_all.py::test_checked",
    }
    assert calibration.from_package == ("tests/test_all.py::test_cases",)
    assert {"tests/conftest.py", "tests/command.py", "tests/more.txt"} <= set(calibration.reads)
    assert "tools/cases.py" in calibration.reads, "no module of the package imports it"
    restored = {*calibration.reads, *calibration.test_files}
    assert not {"calc.py", "other.py", "tools/known.py", "tests/support.py"} & restored


BY_UNITTEST = """import unittest
from pathlib import Path

from calc import sub
from tests.table import TABLE


class Test(unittest.TestCase):
    def test_sub(self):
        with self.assertRaises(FileNotFoundError):
            Path("tests/local.txt").read_text()
        self.assertEqual([sub(a, b) for a, b, _ in TABLE], [int(Path("golden/total.txt").read_text()) - 2])


if __name__ == "__main__":
    unittest.main()
"""


@pytest.mark.parametrize("command", ["python3 -m unittest tests.test_unit", "python3 -m tests.test_unit"])
async def test_whatever_runs_the_tests_is_recorded(
    sandboxes: DockerSandboxes, repo_image: RepoImage, command: str
) -> None:
    verdict = ExitCode(
        eval_script=f"{command}\n", files=(File(path="tests/test_unit.py", content=BY_UNITTEST.encode()),)
    )
    task = make_task(repo_image.tag, setup_script=setup_of(REPO), verdict=verdict)
    read = {
        (one.kind, one.path)
        for one in (await record(sandboxes, make_claim(task), HONEST, Calibration())).reads
    }
    assert {("run", TABLE), ("opened", GOLDEN), ("missing", "tests/local.txt"), ("run", "calc.py")} <= read
    assert ("run", "tests/test_unit.py") in read
