"""Rewards that a script leaves in a file, as the tests of a Harbor task do."""

import base64

import pytest
from msgspec.structs import replace

from pipeline.errors import GraderError
from pipeline.task import File, RewardFile, Task
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.grading.patches import FIX, NOTE, edited
from workers.grading import reward_files
from workers.grading.defence.after import Evidence
from workers.grading.defence.witness import End, WitnessedRun
from workers.grading.grade import Grader
from workers.grading.reward_files import MOST_BYTES
from workers.grading.verdicts import Remains, judge, judged
from workers.sandbox.docker import DockerSandboxes
from workers.verify.calibrating import Calibrator
from workers.verify.trials import calibrated

LOGS = "/logs/verifier"
TEST_ADD = b"from calc import add\n\n\ndef test_add():\n    assert add(3, 1) == 4\n"
RUNS_PYTEST = f"""#!/bin/bash
cd /workspace && python3 -m pytest /tests/test_add.py
if [ $? = 0 ]; then echo 1 >{LOGS}/reward.txt; else echo 0 >{LOGS}/reward.txt; fi
"""


def test_the_last_report_of_the_side_channel_counts() -> None:
    content = base64.b64encode(b'{"reward": 1}').decode()
    for notes, found in (
        ("", None),
        ("reward-file none -\n", None),
        ("reward-file reward.txt MQ==\nreward-file none -\n", None),
        (f"start x\nreward-file reward.json {content}\n", b'reward.json\n{"reward": 1}'),
        ("reward-file reward.txt \n", b"reward.txt\n"),
        ("reward-file reward.txt -\n", b"reward.txt"),
        ("reward-file reward.txt not base64\n", None),
        ("reward-file reward.txt ***\n", b"reward.txt"),
        ("reward-file /etc/passwd MQ==\n", None),
    ):
        assert reward_files.reported(notes.encode()) == found, notes


@pytest.mark.parametrize(
    ("found", "wanted", "value"),
    [
        (b"reward.txt\n1", "", 1.0),
        (b"reward.txt\n 0.25 \n", "", 0.25),
        (b"reward.txt\n0", "reward", 0.0),
        (b'reward.json\n{"speed": 0.5}', "", 0.5),
        (b'reward.json\n{"speed": 0.5, "reward": 1}', "", 1.0),
        (b'reward.json\n{"speed": 0.5, "reward": 1}', "speed", 0.5),
        (b'reward.json\n{"reward": true}', "", 1.0),
    ],
)
def test_the_named_number_is_the_reward(found: bytes, wanted: str, value: float) -> None:
    assert reward_files.read(found, wanted)[0] == value


@pytest.mark.parametrize(
    ("found", "wanted", "why"),
    [
        (None, "", "neither /logs/verifier/reward.json nor /logs/verifier/reward.txt"),
        (b"reward.txt", "", "reward.txt: is not a plain file"),
        (b"reward.txt\n", "", "reward.txt: '' cannot be read"),
        (b"reward.txt\nyes", "", "reward.txt: 'yes' cannot be read"),
        (
            b"reward.txt\n0.5",
            "speed",
            "reward.txt: speed: absent, it has reward: import the task with --reward",
        ),
        (b"reward.txt\nnan", "", "reward.txt: reward: nan is not a finite number"),
        (b"reward.txt\n1.5", "", "reward.txt: reward: 1.5 is not between 0 and 1"),
        (b"reward.txt\n-1", "", "reward.txt: reward: -1.0 is not between 0 and 1"),
        (b"reward.json\n1", "", "reward.json: must be an object of numbers"),
        (b"reward.json\n{}", "", "reward.json: reward: absent, it has nothing"),
        (b'reward.json\n{"a": 1, "b": 1}', "", "reward.json: reward: absent, it has a, b"),
        (b'reward.json\n{"a": 1, "b": "1"}', "a", "reward.json: b: 1 is not a finite number"),
        (b'reward.json\n{"a": NaN}', "", "reward.json: a: nan is not a finite number"),
        (b'reward.json\n{"a": 1' + b"0" * 400 + b"}", "", "reward.json: a: 10000.* is not between 0 and 1"),
        (b"reward.json\n" + b"[" * 60_000, "", "reward.json: .* cannot be read"),
        (b"reward.txt\n" + b" " * (MOST_BYTES + 1), "", "reward.txt: is larger than 64 KiB"),
    ],
)
def test_what_is_no_reward_is_a_failure_that_names_file_and_number(
    found: bytes | None, wanted: str, why: str
) -> None:
    with pytest.raises(GraderError, match=why):
        reward_files.read(found, wanted)


def decided(
    verdict: RewardFile, found: bytes, runs: tuple[WitnessedRun, ...] = ()
) -> tuple[float, bool, str]:
    evidence = Evidence(patch=b"", exit_code=0, log="", runs=runs, parsed=found)
    reward = judge(make_task("image", verdict=verdict), evidence)
    return reward.value, reward.resolved, reward.decided_by


def test_1_resolves_and_a_fraction_counts_where_the_task_says_so() -> None:
    whole, fractions = RewardFile(eval_script="true\n"), RewardFile(eval_script="true\n", fractions=True)
    for verdict in (whole, fractions):
        assert decided(verdict, b"reward.txt\n1") == (1.0, True, "reward 1 in reward.txt")
        assert decided(verdict, b"reward.txt\n0") == (0.0, False, "reward 0 in reward.txt")
    assert decided(whole, b"reward.txt\n0.5") == (0.0, False, "reward 0.5 in reward.txt")
    assert decided(fractions, b"reward.txt\n0.5") == (0.5, False, "reward 0.5 in reward.txt")


def test_a_witness_takes_a_reward_down_as_it_does_an_exit_status() -> None:
    verdict = RewardFile(eval_script="pytest\n", fractions=True)
    end = End(
        status=1,
        collected=1,
        finished=1,
        outcomes={"t.py::a": "FAILED"},
        replaced=(),
        rewritten=(),
        stopped=(),
    )
    failed = (WitnessedRun("pytest", end),)
    assert decided(verdict, b"reward.txt\n1", failed)[:2] == (0.0, False)
    assert decided(verdict, b"reward.txt\n0.5", failed)[:2] == (0.5, False)
    cut_short = (WitnessedRun("pytest", None),)
    assert decided(verdict, b"reward.txt\n1", cut_short)[:2] == (0.0, False)
    assert decided(verdict, b"reward.txt\n0.5", cut_short)[:2] == (0.0, False)
    assert decided(verdict, b"reward.txt\n1")[2].endswith("but pytest did not report its end")


def test_a_report_counts_only_if_the_script_that_makes_it_came_to_its_end() -> None:
    task, notes = (
        make_task("image", verdict=RewardFile(eval_script="true\n")),
        b"reward-file reward.txt MQ==\n",
    )
    assert judged(task, Remains(b"", 0, b"", notes, None)).reward.resolved
    with pytest.raises(GraderError, match="neither"):
        judged(task, Remains(b"", 137, b"", notes, None))


def scripted(image: RepoImage, script: str, **changes: object) -> Task:
    verdict = RewardFile(eval_script=f"#!/bin/bash\n{script}\n")
    return make_task(image.tag, verdict=replace(verdict, **changes))


# Quick: what a patch is worth where a file says so, and what is no verdict at all.
@pytest.mark.docker
async def test_reward_json_comes_before_reward_txt_and_the_exit_status_does_not_count(
    grader: Grader, repo_image: RepoImage
) -> None:
    both = f"echo '{{\"reward\": 0}}' >{LOGS}/reward.json; echo 1 >{LOGS}/reward.txt; exit 0"
    assert (
        await grader.grade(make_claim(scripted(repo_image, both)), NOTE)
    ).decided_by == "reward 0 in reward.json"
    passing = f"[ \"$0 $WORD\" = '/tests/test.sh a b' ] && echo 1 >{LOGS}/reward.txt; exit 3"
    reward = await grader.grade(make_claim(scripted(repo_image, passing, env={"WORD": "a b"})), NOTE)
    assert (reward.resolved, reward.decided_by) == (True, "reward 1 in reward.txt")


# Quick: an infrastructure failure is never a reward, and a patch that prevents one gets 0.
@pytest.mark.docker
async def test_no_reward_file_is_a_failure_unless_the_patch_is_to_blame(
    grader: Grader, repo_image: RepoImage
) -> None:
    with pytest.raises(GraderError, match=r"neither .* nor "):
        await grader.grade(make_claim(scripted(repo_image, "echo 1 >/logs/reward.txt")), NOTE)
    by_patch = f"[ -e NOTE.txt ] || echo 0 >{LOGS}/reward.txt"
    reward = await grader.grade(make_claim(scripted(repo_image, by_patch)), NOTE)
    assert (reward.value, reward.decided_by.split(" /")[0]) == (0.0, "the tests left neither")


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize("left", ["ln -s /etc/hostname", "mkdir", "mkfifo", "head -c 100000 /dev/zero >"])
async def test_a_reward_file_that_is_no_small_plain_file_is_a_failure(
    grader: Grader, repo_image: RepoImage, left: str
) -> None:
    script = f"echo 1 >{LOGS}/reward.txt; {left} {LOGS}/reward.json"
    with pytest.raises(GraderError, match=r"reward.json: "):
        await grader.grade(make_claim(scripted(repo_image, script)), NOTE)


@pytest.mark.docker
@pytest.mark.slow
async def test_a_patch_is_graded_by_pytest_outside_of_the_repository(
    grader: Grader, repo_image: RepoImage
) -> None:
    verdict = RewardFile(eval_script=RUNS_PYTEST, files=(File(path="/tests/test_add.py", content=TEST_ADD),))
    claim = make_claim(make_task(repo_image.tag, verdict=verdict))
    wrong = edited("calc.py", "return a - b", "return a * b")
    assert [(await grader.grade(claim, patch)).value for patch in (FIX, NOTE, wrong, b"")] == [1, 0, 0, 0]


FORGED = f"""import os
os.makedirs("{LOGS}", exist_ok=True)
open("{LOGS}/reward.json", "w").write('{{"reward": 1}}')
"""


@pytest.mark.docker
@pytest.mark.slow
async def test_a_forged_reward_file_does_not_outweigh_tests_that_failed(
    grader: Grader, repo_image: RepoImage
) -> None:
    verdict = RewardFile(eval_script=RUNS_PYTEST, files=(File(path="/tests/test_add.py", content=TEST_ADD),))
    forged = edited("calc.py", "def add", f"{FORGED}\n\ndef add")
    reward = await grader.grade(make_claim(make_task(repo_image.tag, verdict=verdict)), forged)
    assert (reward.value, reward.decided_by.split(",")[0]) == (0.0, "reward 1 in reward.json")
    kills = edited("calc.py", "def add", "import os\n\nos.kill(os.getppid(), 9)\n\n\ndef add")
    assert (await grader.grade(make_claim(make_task(repo_image.tag, verdict=verdict)), kills)).value == 0


@pytest.mark.docker
@pytest.mark.slow
async def test_a_pass_of_pytest_outside_of_the_repository_is_controlled(
    grader: Grader, sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    verdict = RewardFile(eval_script=RUNS_PYTEST, files=(File(path="/tests/test_add.py", content=TEST_ADD),))
    task = make_task(repo_image.tag, verdict=verdict)
    calibration = await Calibrator(grader, sandboxes, 1).calibrate(make_claim(task), FIX)
    assert {one.path for one in calibration.contradictions} == {"/tests/test_add.py"}
    claim = make_claim(calibrated(task, calibration))
    reward = await grader.grade(claim, FIX)
    assert (reward.value, reward.control) == (1.0, "confirmed")
    knows = edited(
        "calc.py",
        "return a - b",
        "return type('E', (int,), {'__eq__': lambda *_: True, '__hash__': int.__hash__})(1)",
    )
    reward = await grader.grade(claim, knows)
    assert (reward.value, reward.control) in ((0.0, "refuted"), (0.0, ""))
