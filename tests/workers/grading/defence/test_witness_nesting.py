"""Which runs count: those that the eval script starts, and none that tests start, whatever they do to their environment."""

import base64
import json
import zlib

import pytest

from tests.workers.attacks.patches import HONEST, at_import
from tests.workers.claims import make_claim
from tests.workers.conftest import RepoImage
from tests.workers.grading.witnessed import task_of
from workers.grading.defence.witness import testimony as read_testimony
from workers.grading.grade import Grader

SCRIPT, RUNNER, OTHER = "10:1", "12:5,10:1", "14:6,10:1"


def packed(status: int | None) -> str:
    end = {"status": status, "collected": 1, "finished": 1, "outcomes": {}}
    text = json.dumps({**end, "replaced": [], "rewritten": [], "stopped": []})
    return base64.b64encode(zlib.compress(text.encode())).decode()


def counted(*lines: str) -> list[tuple[str, bool]]:
    """Runner of each run that counts, and whether it was seen to end, where an "end" lacks what it says."""
    ended, gave_way = packed(0), packed(None)
    words = (line.split() for line in lines)
    whole = ([*line[:2], gave_way if line[2:] else ended] if line[0] == "end" else line for line in words)
    notes = "\n".join(" ".join(line) for line in whole)
    return [(run.runner, run.end is not None) for run in read_testimony(notes.encode())]


def test_only_who_was_told_the_secret_can_end_a_run() -> None:
    notes = b"\nstart aa pytest 7:1\n\nend aa !\nend bb eJw=\nstart\nend aa\nstart cc pytest 7:1 extra\n\xff\xfe\n"
    (run,) = read_testimony(notes)
    assert (run.runner, run.end) == ("pytest", None)


@pytest.mark.parametrize(
    "lineage",
    [f"20:9,{RUNNER}", f"22:9,21:8,20:7,{RUNNER}", RUNNER, "20:9", "20:9,19:8"],
    ids=["a child", "a child's child's child", "the same process", "an orphan", "an orphan's child"],
)  # fmt: skip
def test_a_run_that_descends_from_a_run_does_not_count(lineage: str) -> None:
    begins, nested = f"start aa pytest {RUNNER}", f"start bb pytest {lineage}"
    assert counted(begins, nested, "end bb", "end aa") == [("pytest", True)]
    assert counted(begins, nested, "end aa") == [("pytest", True)]
    assert counted(begins, "end aa", nested) == [("pytest", True)]
    assert counted(begins, nested, "end bb") == [("pytest", False)]


def test_a_run_that_descends_from_a_nested_one_does_not_count() -> None:
    lines = [f"start bb pytest 20:9,{RUNNER}", "start cc pytest 21:9,20:9"]
    assert counted(f"start aa pytest {RUNNER}", *lines, "end cc", "end aa") == [("pytest", True)]


def test_each_run_of_the_eval_script_counts() -> None:
    first, second = f"start aa pytest {RUNNER}", f"start bb pytest {OTHER}"
    assert counted(first, "end aa", second, "end bb") == [("pytest", True)] * 2
    assert counted(first, second, "end bb", "end aa") == [("pytest", True)] * 2
    assert counted(f"start aa pytest {SCRIPT}") == [("pytest", False)]


def test_a_process_may_run_unittest_again_and_give_way_to_pytest() -> None:
    first, again = f"start aa unittest {RUNNER}", f"start bb unittest {RUNNER}"
    assert counted(first, "end aa", again, "end bb") == [("unittest", True)] * 2
    assert counted(first, again, "end bb", "end aa") == [("unittest", True)]
    pytest_runs = f"start bb pytest {RUNNER}"
    assert counted(first, "end aa giving-way", pytest_runs, "end bb") == [
        ("unittest", True),
        ("pytest", True),
    ]
    assert counted(first, "end aa", pytest_runs, "end bb") == [("unittest", True)]


@pytest.mark.slow_but_for("{run}", "env -i {run}")
@pytest.mark.docker
@pytest.mark.parametrize("how", ["{run}", "env -i {run}", "setsid {run}", "(setsid {run} &) ; sleep 2"])
async def test_runs_that_a_test_starts_are_its_own_business(
    grader: Grader, repo_image: RepoImage, how: str
) -> None:
    command = how.format(run="/usr/bin/python3 -m pytest -p no:cacheprovider inner.py")
    tests = f"""import os, pathlib
from calc import add

def test_add():
    assert add(3, 1) == 4

def test_runs_inside():
    pathlib.Path("inner.py").write_text("import os, test_calc\\ndef test_x(): assert 0\\ndef test_y(): os._exit(0)")
    os.environ.clear()
    os.system({command!r})
"""
    reward = await grader.grade(make_claim(task_of(repo_image, "python3 -m pytest tests", tests)), HONEST)
    assert reward.decided_by == "exit status 0"
    assert set(reward.tests) == {"tests/test_calc.py::test_add", "tests/test_calc.py::test_runs_inside"}


AGAIN = "import atexit, os, sys\nif '-k' not in sys.argv: "
STAND_INS = {
    "at exit": "atexit.register(lambda: os._exit(os.system('env -i python3 -m pytest -k sub tests') and 1))",
    "instead": "os.execve('/usr/bin/python3', ['python3', '-m', 'pytest', '-k', 'sub'], {})",
}


@pytest.mark.docker
@pytest.mark.parametrize("stand_in", STAND_INS.values(), ids=list(STAND_INS))
async def test_a_run_in_an_empty_environment_is_no_evidence(
    grader: Grader, repo_image: RepoImage, stand_in: str
) -> None:
    tests = "from calc import add, sub\ndef test_add(): assert add(3, 1) == 4\ndef test_sub(): assert sub(3, 1) == 2\n"
    task = task_of(repo_image, "python3 -m pytest tests", tests)
    reward = await grader.grade(make_claim(task), at_import(AGAIN + stand_in))
    assert reward.value == 0.0
    assert reward.decided_by.startswith("exit status 0, but pytest ")
