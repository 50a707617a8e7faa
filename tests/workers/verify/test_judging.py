"""What is wrong with a task, and how it is told."""

from typing import Any, cast

import pytest
from msgspec.structs import replace

from pipeline.agent.option import read_agent
from pipeline.errors import TaskBroken
from pipeline.request import Claim, Limits
from pipeline.task import BestControl, Calibration, ExitCode, R2eExpected, SwebenchLog, Verdict
from pipeline.task import TestsJson as JsonVerdict  # pytest would take it for tests
from pipeline.taskfile import Gold, Verification, gold_path, write_gold, write_tasks
from pipeline.trajectory import Reward
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage
from tests.workers.verify.spans import FIX, FIXED, MORE_CASES, TaskFile
from workers.grading.grade import Graded, Grader
from workers.sandbox.docker import DockerSandboxes
from workers.unqueued import DEFAULT_AGENT, LogDirectory
from workers.verify.book import Outputs
from workers.verify.calibrating import Calibrator
from workers.verify.judging import verification
from workers.verify.run import Verifier
from workers.verify.states import Calibrates, GradesWithLog, Probed, Prober, Tries, Try
from workers.verify.submitting import Submitter

pytestmark = pytest.mark.docker


@pytest.mark.slow
def test_what_is_wrong_with_a_task_is_said_of_it(file: TaskFile, capsys: pytest.CaptureFixture[str]) -> None:
    file.add("fine", FIXED)
    file.add("gold-fails", "echo no luck; exit 3")
    file.add("weak", "test -e spans.py")
    file.add("no-image", FIXED, image="swerve-test:never")
    file.add(
        "gold-does-not-apply",
        FIXED,
        gold=FIX.replace('-    return number * {"h": 1, "d": 12}', "-    return nothing"),
    )
    file.add("no-gold", FIXED, gold=None)
    file.tasks[-1] = replace(file.tasks[-1], id="test:not-a-repository", workdir="/usr")
    file.golds.append(Gold(id="test:not-a-repository", patch=FIX))
    file.add("no-gold", FIXED, gold=None)
    status, lines = file.verify()
    assert status == 1
    broken = "infrastructure"
    assert {name.removeprefix("test:"): list(line["states"].values()) for name, line in lines.items()} == {
        "fine": [0, 0, 0, 1, 1],
        "gold-fails": [0, 0, 0, 0, 0],
        "weak": [0, 1, 1, 1, 1],
        "no-image": [broken] * 5,
        "gold-does-not-apply": [0, 0, 0, 0, 0],
        "not-a-repository": [broken] * 5,
        "no-gold": [0, 0, 0, broken, broken],
    }
    reasons = {
        "fine": "",
        "gold-fails": "gold: 0 instead of 1 (exit status 3)",
        "weak": "useless, tests_only: 1 instead of 0 (exit status 0): its tests pass without the fix",
        "no-image": f"no image swerve-test:never on this host: `python -m workers.images pull {file.path}`",
        "gold-does-not-apply": "gold: 0 instead of 1 (patch does not apply)",
        "not-a-repository": "not a git repository",
        "no-gold": "gold: infrastructure: its solution is not in the gold file",
    }
    for name, reason in reasons.items():
        assert reason in lines[f"test:{name}"]["reason"]
        assert lines[f"test:{name}"]["ok"] == (name == "fine")
    printed = capsys.readouterr().out
    assert "| no luck" in printed, "the log of what went wrong"
    assert "1 of 7 tasks are ok" in printed


def prober_of(
    sandboxes: DockerSandboxes,
    calibrator: Calibrates,
    grader: GradesWithLog | None = None,
    num_repeats: int = 1,
    *,
    ends_at_fault: bool = False,
) -> Prober:
    return Prober(
        grader=grader or Grader(sandboxes),
        submitter=Submitter(sandboxes, Grader(sandboxes)),
        calibrator=calibrator,
        sandboxes=sandboxes,
        logs=Outputs(json=None, passing=None, min_control="none", logs=LogDirectory(None)),
        limits=Limits(),
        num_repeats=num_repeats,
        agent_config=read_agent([str(DEFAULT_AGENT)]),
        image_fix="",
        ends_at_fault=ends_at_fault,
    )


class Hopeless:
    """A calibrator that cannot come to an end here."""

    async def calibrate(self, claim: Claim, fix: bytes) -> Calibration:
        raise TaskBroken("no control can be run")


async def test_a_task_whose_controls_could_not_be_tried_is_no_task_without_controls(
    image: RepoImage, sandboxes: DockerSandboxes
) -> None:
    task = make_task(image.tag, verdict=ExitCode(eval_script=FIXED))
    prober = prober_of(sandboxes, Hopeless())
    probed = await prober.probe(task, Gold(id=task.id, patch=FIX), on_step=_ignore)
    assert probed.tries["gold"] == [Try("infrastructure", "no control can be run", None)]
    assert not verification(task, probed, seconds=1.0, verified_at=1.0).ok


def test_a_failure_of_the_infrastructure_among_the_tries_makes_no_task_flaky() -> None:
    task = make_task("an-image", verdict=ExitCode(eval_script=FIXED))
    unsolved, solved = Try(0, "exit status 1", None), Try(1, "exit status 0", None)
    lost = Try("infrastructure", "the host went down", None)
    tries: Tries = {
        "empty": [unsolved] * 2,
        "useless": [unsolved] * 2,
        "tests_only": [unsolved] * 2,
        "gold": [],
        "agent": [solved],
    }
    reasons = [
        verification(task, Probed({**tries, "gold": gold}), seconds=1.0, verified_at=1.0).reason
        for gold in ([solved, lost], [solved, unsolved, lost])
    ]
    assert reasons == ["gold: infrastructure: the host went down", "gold: flaky, 1 0 in 3 tries"]


class Unwanted:
    """A calibrator that nobody should need."""

    async def calibrate(self, claim: Claim, fix: bytes) -> Calibration:
        raise AssertionError("calibrated")


async def test_a_task_that_is_paid_without_its_fix_is_not_calibrated(
    image: RepoImage, sandboxes: DockerSandboxes
) -> None:
    task = make_task(image.tag)  # its eval script is `true`
    prober = prober_of(sandboxes, Unwanted())
    probed = await prober.probe(task, Gold(id=task.id, patch=FIX), on_step=_ignore)
    assert probed.tries["gold"][0].found == 1
    assert probed.calibration is None


class Moody:
    """The production grader, for a task whose tests pass every other time."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader
        self._num_calls = 0

    async def grade_with_log(self, claim: Claim, patch: bytes) -> Graded:
        if not patch:
            return await self._grader.grade_with_log(claim, patch)
        self._num_calls += 1
        verdict = ExitCode(eval_script=f"exit {self._num_calls % 2}\n")
        task = replace(claim.request.task, verdict=verdict)
        return await self._grader.grade_with_log(
            replace(claim, request=replace(claim.request, task=task)), patch
        )


# Quick: a task whose verdict changes is not trained on.
async def test_a_state_that_is_judged_two_ways_is_flaky(image: RepoImage, sandboxes: DockerSandboxes) -> None:
    task = make_task(image.tag)
    prober = prober_of(
        sandboxes,
        Calibrator(Grader(sandboxes), sandboxes, num_controls=0),
        grader=Moody(Grader(sandboxes)),
        num_repeats=3,
    )
    steps: list[tuple[str, int, int]] = []
    gold = Gold(id=task.id, patch=FIX, test_patch=MORE_CASES)
    probed = await prober.probe(task, gold, on_step=lambda *step: steps.append(step))
    states = ["empty", "useless", "tests_only", "gold"]
    assert [name for name, _, _ in steps] == ["base commit", *states * 3]
    assert [done for _, done, _ in steps] == list(range(13))
    assert {total for _, _, total in steps} == {15}, (
        "and the controls and the agent, which a task that is paid without its fix does not get"
    )
    found = verification(task, probed, seconds=1.0, verified_at=1.0)
    assert (found.ok, found.states) == (
        False,
        {"empty": 0, "useless": 1, "tests_only": 1, "gold": 0, "agent": 0},
    )
    assert "gold: flaky, 0 1 0 in 3 tries" in found.reason


async def test_a_task_that_is_wanted_only_if_it_is_ok_is_not_tried_again_after_a_fault(
    image: RepoImage, sandboxes: DockerSandboxes
) -> None:
    task = make_task(image.tag, verdict=ExitCode(eval_script="true\n"))
    calibrator = Calibrator(Grader(sandboxes), sandboxes, num_controls=0)
    prober = prober_of(sandboxes, calibrator, num_repeats=3, ends_at_fault=True)
    steps: list[str] = []
    gold = Gold(id=task.id, patch=FIX)
    probed = await prober.probe(task, gold, on_step=lambda name, *_: steps.append(name))
    assert steps == ["base commit", "empty", "useless", "gold", "agent"]
    found = verification(task, probed, seconds=1.0, verified_at=1.0)
    assert found.states == {"empty": 0, "useless": 1, "tests_only": 1, "gold": 1, "agent": 1}
    assert "its tests pass without the fix" in found.reason


def _ignore(name: str, done: int, total: int) -> None:
    return


def judged(verdict: Verdict, *, tests: dict[str, str] | None = None, log: str = "") -> Verification:
    """A task whose states are all as they should be, with this told of the gold run."""
    reward = Reward(value=1.0, resolved=True, decided_by="", tests=tests or {}, log_tail=log)
    zero, one = Try(0, "", None), Try(1, "", reward)
    tries: Tries = {"empty": [zero], "useless": [zero], "tests_only": [zero], "gold": [one], "agent": [one]}
    return verification(make_task("none", verdict=verdict), Probed(tries), seconds=1.0, verified_at=1.0)


@pytest.mark.parametrize(
    ("changes", "wanted_control", "is_measured"),
    [
        ({"ok": False}, None, True),
        ({"states": {"gold": 0}}, None, False),
        ({"control": "confirmed"}, "confirmed", True),
        ({"control": "confirmed", "ok": False}, "confirmed", False),
        ({"control": "partial"}, "confirmed", False),
        ({"control": "partial"}, "partial", True),
    ],
)
def test_strength_is_not_measured_of_a_task_that_is_not_wanted(
    changes: dict[str, Any], wanted_control: BestControl | None, is_measured: bool
) -> None:
    nothing = cast(Any, None)
    verifier = Verifier(nothing, nothing, nothing, {}, nothing, wanted_control)
    done = judged(ExitCode(eval_script="true"))
    assert verifier._is_measured(replace(done, **changes)) is is_measured


NAMED = (
    SwebenchLog(eval_script="x", log_parser="parse_log_pytest", fail_to_pass=("a",), pass_to_pass=("b",)),
    R2eExpected(eval_script="x", expected={"a": "PASSED", "b": "FAILED"}),
    JsonVerdict(eval_script="x", parser="x", tests=("a", "b")),
)


@pytest.mark.parametrize("verdict", NAMED, ids=lambda verdict: type(verdict).__name__)
def test_every_test_that_a_verdict_names_must_show_in_the_gold_run(verdict: Verdict) -> None:
    assert judged(verdict, tests={"a": "PASSED", "b": "FAILED"}).ok
    lacking = judged(verdict, tests={"a": "PASSED", "b": ""})
    assert (lacking.ok, lacking.reason) == (
        False,
        "gold: 1 of 2 expected tests do not appear in the log: b",
    )


@pytest.mark.parametrize(
    ("log", "ok"),
    [
        ("Ran 0 tests in 0.000s\n\nOK\n", False),
        ("Ran 3 tests in 0.001s\n\nOK\n", True),
        ("===== no tests ran in 0.01s =====\n", False),
        ("===== test session starts =====\n===== 2 passed in 0.01s =====\n", True),
        ("all is well\n", True),
    ],
)
def test_an_eval_script_whose_runner_ran_nothing_is_no_proof(log: str, ok: bool) -> None:
    assert judged(ExitCode(eval_script="./check"), log=log).ok == ok


BROKEN_TEST = """diff --git a/tests/test_days.py b/tests/test_days.py
new file mode 100644
--- /dev/null
+++ b/tests/test_days.py
@@ -0,0 +1,12 @@
+from spans import later
+
+
+def test_a_day_has_24_hours():
+    assert later("1d") == 25
+
+
+def test_a_day_has_25_hours():
+    assert later("1d") == 26
+
+def test_an_hour_is_one():
+    assert later("1h") == 2
"""


@pytest.mark.slow
def test_the_tests_that_did_not_come_out_right_are_named_and_whole_logs_and_outcomes_are_kept(
    file: TaskFile,
) -> None:
    task = file.add("wrong", "python3 -m pytest tests/test_days.py; status=$?; seq 5000; exit $status")
    assert isinstance(task.verdict, ExitCode)
    verdict = replace(task.verdict, test_patch=BROKEN_TEST.encode())
    write_tasks(file.path, [replace(task, id="test:../wrong", verdict=verdict)])
    write_gold(gold_path(file.path), [Gold(id="test:../wrong", patch=FIX, test_patch=BROKEN_TEST)])
    logs = file.path.with_name("logs")
    status, lines = file.verify("--repeat", "2", "--logs", str(logs))
    line = lines["test:../wrong"]
    assert status == 1
    assert line["reason"].endswith(
        "the known solution does not solve it. Tests that did not come out as expected: "
        "tests/test_days.py::test_a_day_has_25_hours (failed)"
    )
    assert [(one["found"], one["why"]) for one in line["tries"]["gold"]] == [(0, "exit status 1")] * 2
    assert line["tries"]["gold"][1]["tests"] == {
        "tests/test_days.py::test_a_day_has_24_hours": "PASSED",
        "tests/test_days.py::test_a_day_has_25_hours": "FAILED",
        "tests/test_days.py::test_an_hour_is_one": "PASSED",
    }
    kept = sorted(str(path.relative_to(logs)) for path in logs.rglob("*.log"))
    states = ("gold-2", "gold", "tests_only-2", "tests_only", "useless-2", "useless")
    assert kept == [f"test:..%2Fwrong/{state}.log" for state in states], "an empty patch is not graded"
    log = (logs / kept[0]).read_text()
    assert "test session starts" in log, "from its beginning"
    assert log.endswith("\n4999\n5000\n")


@pytest.mark.parametrize(
    ("verdict", "tests", "named"),
    [
        (NAMED[0], {"a": "SKIPPED", "b": "SKIPPED"}, "a (skipped)"),
        (NAMED[0], {"a": "PASSED", "b": ""}, "b (not in the log)"),
        (NAMED[1], {"a": "PASSED", "b": "PASSED"}, "b (passed)"),
        (NAMED[2], {"a": "FAILED", "b": "error"}, "a (failed), b (error)"),
        (
            ExitCode(eval_script="x"),
            {name: "FAILED" for name in "abcde"},
            "a (failed), b (failed), c (failed) and 2 more",
        ),
    ],
)
def test_each_kind_of_verdict_knows_which_of_its_tests_are_wrong(
    verdict: Verdict, tests: dict[str, str], named: str
) -> None:
    reward = Reward(value=0.0, resolved=False, decided_by="so", tests=tests)
    zero, wrong = Try(0, "", None), Try(0, "so", reward)
    tries: Tries = {
        "empty": [zero],
        "useless": [zero],
        "tests_only": [zero],
        "gold": [wrong],
        "agent": [wrong],
    }
    found = verification(make_task("none", verdict=verdict), Probed(tries), seconds=1.0, verified_at=1.0)
    assert found.reason == (
        "gold: 0 instead of 1 (so): the known solution does not solve it. "
        f"Tests that did not come out as expected: {named}"
    )
