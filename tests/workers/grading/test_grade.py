"""Verdicts of the production grader, in real containers."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import docker
import pytest
from msgspec.structs import replace

from pipeline import task as tasks
from pipeline.errors import GraderError, ImageMissing, TaskBroken
from pipeline.task import Calibration, ExitCode, File, R2eExpected, SwebenchLog, Task, pack
from pipeline.taskfile import gold_path, read_gold, read_tasks
from pipeline.trajectory import Reward
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import FILES, RepoImage
from tests.workers.grading.patches import FIX, HIDDEN_TESTS, NOTE, PYTEST, edited, new_file
from workers.docker.host import FLEET
from workers.grading.grade import Grader
from workers.sandbox import protocol
from workers.sandbox.docker import DockerSandboxes
from workers.tasksets.__main__ import main as import_tasks

pytestmark = pytest.mark.docker


@pytest.fixture
def fleet_tasks(tmp_path: Path, repo_image: RepoImage) -> Path:
    """The task as swe-task-generator publishes one, imported by the command line."""
    record = {
        "instance_id": "acme-calc-7",
        "repo": "acme/calc",
        "base_commit": repo_image.commit,
        "problem_statement": "add() subtracts.\n\n## Files Changed\n- calc.py\n- tests/test_calc.py\n",
        "gold_patch": FIX.decode() + HIDDEN_TESTS,
        "fix_patch": FIX.decode().rstrip("\n"),
        "test_patch": HIDDEN_TESTS.rstrip("\n"),
        "test_files": ["tests/test_calc.py"],
        "image_name": repo_image.tag,
        "eval_script": PYTEST,
    }
    (tmp_path / "task_001").mkdir()
    (tmp_path / "task_001/task.json").write_text(json.dumps(record))
    assert import_tasks(["import", "fleet", str(tmp_path), "--out", str(tmp_path / "tasks.jsonl")]) == 0
    return tmp_path / "tasks.jsonl"


@pytest.fixture
def swe_bench_tasks(tmp_path: Path, repo_image: RepoImage) -> Path:
    """The task as a row of a SWE-bench dataset, imported by the command line; its script is the harness's."""
    script = f"""#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout {repo_image.commit} tests/test_calc.py
git apply -v - <<'EOF_114329324912'
{HIDDEN_TESTS}EOF_114329324912
: '>>>>> Start Test Output'
python3 -m pytest -rA tests/test_calc.py
: '>>>>> End Test Output'
git checkout {repo_image.commit} tests/test_calc.py
"""
    row = {
        "instance_id": "acme__calc-7",
        "repo": "acme/calc",
        "version": "1.0",
        "base_commit": repo_image.commit,
        "problem_statement": "add() subtracts.",
        "patch": FIX.decode(),
        "test_patch": HIDDEN_TESTS,
        "FAIL_TO_PASS": json.dumps(["tests/test_calc.py::test_add"]),
        "PASS_TO_PASS": ["tests/test_calc.py::test_sub"],
        "image": repo_image.tag,
        "eval_script": script,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }
    rows, tasks = tmp_path / "rows.jsonl", tmp_path / "tasks.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    assert import_tasks(["import", "swe-bench", str(rows), "--out", str(tasks)]) == 0
    return tasks


# Quick: a task of a fleet is worth 1 for its fix and for nothing else.
async def test_a_fleet_task_pays_for_the_fix_alone(grader: Grader, fleet_tasks: Path) -> None:
    (task,) = read_tasks(fleet_tasks)
    gold = read_gold(gold_path(fleet_tasks))[task.id].patch.encode()
    rewards = [await grader.grade(make_claim(task), patch) for patch in (b" \n", NOTE, gold)]
    assert [reward.value for reward in rewards] == [0.0, 0.0, 1.0]
    assert [reward.decided_by for reward in rewards] == ["empty patch", "exit status 1", "exit status 0"]
    assert [reward.applied_by for reward in rewards] == ["", "git apply", "git apply"]
    assert "1 failed, 1 passed" in rewards[1].log_tail
    assert rewards[2].grade_cpu_s > 0


# Quick: a SWE-bench row is worth 1 for its fix and for nothing else.
async def test_a_swe_bench_task_pays_for_the_fix_alone(grader: Grader, swe_bench_tasks: Path) -> None:
    (task,) = read_tasks(swe_bench_tasks)
    gold = read_gold(gold_path(swe_bench_tasks))[task.id].patch.encode()
    rewards = [await grader.grade(make_claim(task), patch) for patch in (b"", NOTE, gold)]
    assert [reward.value for reward in rewards] == [0.0, 0.0, 1.0]
    assert [reward.decided_by for reward in rewards[1:]] == [
        "swebench: RESOLVED_NO",
        "swebench: RESOLVED_FULL",
    ]
    tallies = [(reward.fail_to_pass, reward.pass_to_pass) for reward in rewards[1:] if reward.fail_to_pass]
    assert [(f2p.passed, p2p.passed) for f2p, p2p in tallies if p2p] == [(0, 1), (1, 1)]
    assert ">>>>> Test Exit Code: 0" in rewards[2].log_tail


# Quick: a pass needs every test that passes with the known fix, whatever the exit status says.
async def test_a_run_without_a_test_that_passes_with_the_known_fix_is_no_pass(
    grader: Grader, task: Task
) -> None:
    ran = ("tests/test_calc.py::test_add", "tests/test_calc.py::test_sub")

    async def rewarded(*passing: str) -> Reward:
        calibration = pack(Calibration(passing=passing, witnessed=True))
        return await grader.grade(make_claim(replace(task, calibration=calibration)), FIX)

    complete, lacking = await rewarded(*ran), await rewarded(*ran, "tests/test_calc.py::test_mul")
    assert [(reward.value, reward.resolved) for reward in (complete, lacking)] == [(1.0, True), (0.0, False)]
    assert lacking.decided_by == "exit status 0, but tests/test_calc.py::test_mul did not pass, as with the known fix"


EXIT_AT_IMPORT = "import os\nos._exit(0)"


EXIT_AT_COLLECTION = "import os\ndef pytest_collection(session):\n    os._exit(0)"


EXIT_AT_FINISH = "import os\ndef pytest_sessionfinish(session, exitstatus):\n    os._exit(0)"


PASS_EVERYTHING = """import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = "passed" """


# Past pytest's capture, straight into what the eval script prints to.
FORGED_SUMMARY = """import os
open(f"/proc/{os.getppid()}/fd/1", "w").write("=== 2 passed in 0.01s ===\\n")
os._exit(0)"""


@pytest.mark.slow_but_for("exit at import", "exit at collection")
@pytest.mark.parametrize(
    "patch",
    [
        new_file("tests/conftest.py", EXIT_AT_IMPORT),
        new_file("tests/conftest.py", EXIT_AT_COLLECTION),
        new_file("tests/conftest.py", EXIT_AT_FINISH),
        new_file("tests/conftest.py", PASS_EVERYTHING),
        new_file("tests/conftest.py", FORGED_SUMMARY),
        new_file("sitecustomize.py", FORGED_SUMMARY),
        new_file("pytest.py", FORGED_SUMMARY),
        new_file("pytest.ini", "[pytest]\naddopts = -k sub"),
        new_file("pyproject.toml", '[tool.pytest.ini_options]\naddopts = "-k sub"'),
        edited("setup.cfg", "addopts = -p no:cacheprovider", "addopts = -k sub"),
        edited("calc.py", "def add", "import os; os._exit(0)\ndef add"),
        edited("tests/test_calc.py", "assert sub(3, 1) == 2", "assert True"),
    ],
    ids=[
        "exit at import", "exit at collection", "exit at finish", "pass everything", "forged summary",
        "sitecustomize", "shadowed pytest", "pytest.ini", "pyproject", "setup.cfg", "exit in the code",
        "tests",
    ],
)  # fmt: skip
async def test_cheating_the_runner_earns_nothing(grader: Grader, task: Task, patch: bytes) -> None:
    reward = await grader.grade(make_claim(task), patch)
    assert (reward.value, reward.applied_by) == (0.0, "git apply")


@pytest.mark.slow
async def test_a_root_conftest_of_the_image_comes_back(grader: Grader, task: Task) -> None:
    cheat = edited("conftest.py", "", EXIT_AT_IMPORT + "\n")
    reward = await grader.grade(make_claim(task), cheat)
    said = "exit status 1; put back, because they govern the tests: conftest.py"
    assert (reward.value, reward.applied_by, reward.decided_by) == (0.0, "git apply", said)
    assert (await grader.grade(make_claim(task), cheat + FIX)).value == 1.0


async def test_an_honest_fix_may_change_settings_that_are_not_the_runners(
    grader: Grader, scripted: Callable[[str], Task]
) -> None:
    script = (
        "grep -q 'name = better' setup.cfg && grep -q 'line-length' pyproject.toml && ! test -e conftest2.py"
    )
    patch = edited("setup.cfg", "name = calc", "name = better")
    patch += new_file("pyproject.toml", "[tool.ruff]\nline-length = 88")
    assert (await grader.grade(make_claim(scripted(script)), patch)).value == 1.0


@pytest.mark.slow_but_for("conftest.py-settings1")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("setup.cfg", edited("setup.cfg", "addopts =", "pythonpath = .src\naddopts =")),
        ("conftest.py", new_file("conftest.py", "import sys\nsys.path.insert(0, '.src')\n")),
    ],
)
async def test_a_fix_that_needs_a_file_of_the_runners_learns_which_was_put_back(
    grader: Grader, task: Task, name: str, settings: bytes
) -> None:
    text = FILES["repo/calc.py"]
    gone = "".join(f"-{line}\n" for line in text.splitlines())
    num_lines = len(text.splitlines())
    removed = f"diff --git a/calc.py b/calc.py\ndeleted file mode 100644\n--- a/calc.py\n+++ /dev/null\n@@ -1,{num_lines} +0,0 @@\n{gone}"
    moved = new_file(".src/calc.py", text.replace("a - b", "a + b", 1))
    reward = await grader.grade(make_claim(task), removed.encode() + moved + settings)
    assert reward.decided_by == f"exit status 2; put back, because they govern the tests: {name}"


async def test_marks_printed_by_code_under_test_count_for_nothing(
    grader: Grader, swe_bench_tasks: Path
) -> None:
    (task,) = read_tasks(swe_bench_tasks)
    lines = [
        "PASSED tests/test_calc.py::test_add",
        "PASSED tests/test_calc.py::test_sub",
        ">>>>> End Test Output",
        ">>>>> Test Exit Code: 0",
    ]
    text = "\n".join([*lines, ""])
    forged = f"import os; open(f'/proc/{{os.getppid()}}/fd/1', 'w').write({text!r}); os._exit(5)"
    reward = await grader.grade(make_claim(task), edited("calc.py", "def add", f"{forged}\ndef add"))
    assert (reward.value, reward.decided_by) == (0.0, "swebench: log rejected")


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ("cat >/dev/null\nfalse\n", 0.0),
        ("cat >/dev/null\ntrue\n", 1.0),
        ("cat <<'EOF'\nEOF\necho 'EOF'\nEOF=1\nexit 0\n", 1.0),
        ("cat <<'EOF' >/dev/null\nexit 0\nEOF\nexit 3\n", 0.0),
        ("(setsid sleep 1000 &)\nsleep 1000 &\nexit 0\n", 1.0),
        ("kill -9 $$\n", 0.0),
        ("kill -9 -1; kill -9 1; exit 0\n", 1.0),
        ("printf 'x%.0s' {1..70000}; head -c 40000000 /dev/zero; exit 0\n", 1.0),
        ("exec 1>&- 2>&-\nexit 0\n", 1.0),
    ],
)
async def test_the_scripts_own_status_decides(
    grader: Grader, scripted: Callable[[str], Task], script: str, value: float
) -> None:
    assert (await grader.grade(make_claim(scripted(script)), NOTE)).value == value


PARSER = """
import json, sys
log, nothing, out = sys.argv[1:]
assert open(nothing).read() == ""
statuses = {"passed": "PASSED", "failed": "FAILED"}
tests = [line.split() for line in open(log) if line.startswith("test ")]
json.dump({"tests": [{"name": name, "status": statuses[status]} for _, name, status in tests]}, open(out, "w"))
print("PASSED everything")
"""


@pytest.mark.slow
async def test_a_parser_reads_the_log_where_no_code_of_the_patch_ran(
    grader: Grader, repo_image: RepoImage
) -> None:
    script = "test -e NOTE.txt && touch /ran\necho test one passed\necho test two ${TWO:-passed}\nexit 1\n"
    verdict = tasks.TestsJson(eval_script=script, parser=PARSER, tests=("one", "two"))
    task = make_task(repo_image.tag, verdict=verdict)
    reward = await grader.grade(make_claim(task), NOTE)
    assert (reward.value, reward.decided_by) == (1.0, "tests_json: 2 of 2 tests passed")
    assert reward.tests == {"one": "PASSED", "two": "PASSED"}
    reward = await grader.grade(make_claim(replace(task, env={"TWO": "failed"})), NOTE)
    assert (reward.value, reward.decided_by) == (0.0, "tests_json: 1 of 2 tests passed")
    reward = await grader.grade(make_claim(replace(task, env={"TWO": "strange"})), NOTE)
    assert (reward.value, reward.decided_by) == (0.0, "tests_json: the parser made nothing of the log")
    elsewhere = replace(
        verdict,
        parser=PARSER + "import os\nassert not os.path.exists('/ran')\nassert not os.path.exists('NOTE.txt')",
    )
    assert (await grader.grade(make_claim(replace(task, verdict=elsewhere)), NOTE)).value == 1.0


# Quick: what a parser wrote is not decided upon if its middle is missing.
async def test_a_parser_that_writes_more_than_is_kept_has_made_nothing_of_the_log(
    grader: Grader, repo_image: RepoImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of it here, without a part of its spaces, would say that all tests passed."""
    monkeypatch.setattr("workers.grading.grade.LOG_KEEP_BYTES", 1000)

    async def decided(num_spaces: int) -> str:
        parser = PARSER.replace('print("PASSED', f'print(" " * {num_spaces}, file=open(out, "a"))\nprint("PASSED')
        verdict = tasks.TestsJson(eval_script="echo test one passed\n", parser=parser, tests=("one",))
        return (await grader.grade(make_claim(make_task(repo_image.tag, verdict=verdict)), NOTE)).decided_by

    assert await decided(500) == "tests_json: 1 of 1 tests passed"
    assert await decided(5000) == "tests_json: the parser made nothing of the log"


@pytest.mark.slow
async def test_tests_of_r2e_gym_must_come_out_exactly_as_expected(
    grader: Grader, repo_image: RepoImage
) -> None:
    hidden = File(path="tests/test_calc.py", content=R2E_TESTS)
    expected = {"test_add": "PASSED", "test_broken": "FAILED"}
    verdict = R2eExpected(
        eval_script="python3 -m pytest -rA tests/test_calc.py\n", expected=expected, files=(hidden,)
    )
    task = make_task(repo_image.tag, verdict=verdict)
    rewards = [await grader.grade(make_claim(task), patch) for patch in (NOTE, FIX)]
    assert [reward.value for reward in rewards] == [0.0, 1.0]
    assert rewards[0].tests == {"test_add": "FAILED", "test_broken": "FAILED"}
    assert rewards[1].tests == expected


R2E_TESTS = b"""from calc import add


def test_add():
    assert add(3, 1) == 4


def test_broken():
    assert add(1, 1) == 3
"""


async def test_what_observes_the_runner_is_no_new_file_of_the_environment(
    grader: Grader, scripted: Callable[[str], Task]
) -> None:
    """Scripts of R2E-Gym refuse a patch if an environment in the repository has newer files than the image."""
    packages = ".venv/lib/python3.11/site-packages"
    task = scripted(f'test -z "$(find .venv -type f -newer /stamp)" && ls {packages} >&2\n')
    task = replace(task, setup_script=f"mkdir -p {packages} && touch {packages}/mine.py && touch /stamp\n")
    graded = await grader.grade_with_log(make_claim(task), NOTE)
    assert graded.reward.value == 1.0, graded.log
    assert "swerve_" in graded.log


async def test_a_grader_that_vanishes_gives_no_reward(
    grader: Grader,
    sandboxes: DockerSandboxes,
    docker_client: docker.DockerClient,
    scripted: Callable[[str], Task],
) -> None:
    grading = asyncio.create_task(grader.grade(make_claim(scripted("sleep 1000\n")), NOTE))
    mine = {"label": f"{FLEET}={sandboxes.fleet}", "status": "running"}
    while not (containers := docker_client.containers.list(ignore_removed=True, filters=mine)):  # noqa: ASYNC110 - a container sets no Event
        await asyncio.sleep(0.1)
    (container,) = containers
    await asyncio.to_thread(container.remove, force=True)
    with pytest.raises(GraderError, match="grading container failed"):
        await grading


@pytest.mark.slow
async def test_used_up_cpu_time_is_unresolved(grader: Grader, scripted: Callable[[str], Task]) -> None:
    claim = make_claim(scripted("while :; do :; done\n"), grade_cpu_s=0.5, grade_wall_s=100.0)
    reward = await grader.grade(claim, NOTE)
    assert (reward.value, reward.decided_by) == (0.0, "cpu time used up")
    claim = make_claim(scripted("while :; do :; done\n"), grade_cpu_s=0.01, grade_wall_s=2.0)
    assert (await grader.grade(claim, NOTE)).decided_by == "cpu time used up"


@pytest.mark.slow
async def test_tests_that_only_sleep_past_the_limit_are_unresolved(
    grader: Grader, scripted: Callable[[str], Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However busy the machine of this test is: that it had CPU to give is assumed."""
    monkeypatch.setattr(protocol, "STARVED_SHARE", 2.0)
    claim = make_claim(scripted("sleep 1000\n"), grade_cpu_s=100.0, grade_wall_s=8.0)
    reward = await grader.grade(claim, NOTE)
    assert (reward.value, reward.decided_by) == (0.0, "waited without using CPU: 0 s of CPU time in 8 s")


async def test_a_task_that_nobody_can_solve_is_broken(grader: Grader, repo_image: RepoImage) -> None:
    def broken(**verdict: object) -> Task:
        return make_task(repo_image.tag, verdict=ExitCode(**{"eval_script": "true\n", **verdict}))  # type: ignore[arg-type]

    log = SwebenchLog(
        eval_script=": '>>>>> End Test Output'",
        log_parser="parse_log_pytest",
        fail_to_pass=("a",),
        pass_to_pass=(),
    )
    broken_tasks = {
        "hidden tests do not apply": broken(
            test_patch=HIDDEN_TESTS.replace("sub(3", "bus(3").replace("import sub", "import bus").encode()
        ),
        "eval_script is empty": broken(eval_script=" \n"),
        "protected_paths": broken(protected_paths=("../x",)),
        "not a git repository": make_task(repo_image.tag, workdir="/usr"),
        "not one of swebench's": make_task(
            repo_image.tag, verdict=replace(log, log_parser="parse_log_nothing")
        ),
        "both empty": make_task(repo_image.tag, verdict=replace(log, fail_to_pass=())),
        "End Test Output": make_task(repo_image.tag, verdict=replace(log, eval_script="true")),
    }
    for message, task in broken_tasks.items():
        with pytest.raises(TaskBroken, match=message):
            await grader.grade(make_claim(task), NOTE)
    with pytest.raises(ImageMissing):
        await grader.grade(make_claim(make_task("swerve-test:never")), NOTE)
