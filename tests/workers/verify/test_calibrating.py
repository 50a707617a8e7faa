"""The known fix measured: which tests it passes, and under which contradictions they fail."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from pipeline.request import Claim, Limits
from pipeline.task import Calibration, Contradiction, Task, Verdict, pack
from pipeline.trajectory import Reward
from tests.workers.attacks.governing import written
from tests.workers.attacks.patches import HONEST, edited
from tests.workers.attacks.test_attacks import KINDS, UNITTEST_VERDICT, by_exit_code, task_of
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.contradictions import FirstOf, changing
from workers.grading.container import PatchRun
from workers.grading.controls.drawing import Chance, Outcomes, strays
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes
from workers.verify import calibrating
from workers.verify.calibrating import Calibrator
from workers.verify.trials import TRIAL_OPTIONS, ControlRuns

pytestmark = pytest.mark.docker


VERDICTS = KINDS | {"unittest": UNITTEST_VERDICT}
Measure = Callable[[Task], Awaitable[Calibration]]


@pytest.fixture
def grader(sandboxes: DockerSandboxes) -> Grader:
    return Grader(sandboxes)


@pytest.fixture
def calibrator(sandboxes: DockerSandboxes, grader: Grader) -> Calibrator:
    return Calibrator(grader, sandboxes, num_controls=2, chance=random.Random(1))


@pytest.fixture(scope="module")
def measured() -> dict[bytes, Calibration]:
    """Calibrations by task. Seven tests begin with that of one task, and the calibrator of each would draw the same."""
    return {}


@pytest.fixture
def measure(calibrator: Calibrator, measured: dict[bytes, Calibration]) -> Measure:
    """Calibrates a task with the known fix, each task once in this file."""

    async def calibration_of(task: Task) -> Calibration:
        key = msgspec.json.encode(task, order="deterministic")
        if key not in measured:
            measured[key] = await calibrator.calibrate(make_claim(task), HONEST)
        return measured[key]

    return calibration_of


def calibrated(task: Task, calibration: Calibration) -> Claim:
    return make_claim(replace(task, calibration=pack(calibration)))


def controlled(calibration: Calibration) -> set[str]:
    return {name for one in calibration.contradictions for name in one.fails}


def test_a_test_that_the_fix_or_the_package_tells_what_to_expect_is_uncontrolled() -> None:
    contradictions = tuple(changing("t.py", 10 * place, "4", "5", name) for place, name in enumerate("abc"))
    calibration = Calibration(
        needing_fix=("a", "b", "c", "d"), contradictions=contradictions, in_fix=("a",), from_package=("b",)
    )
    assert calibrating._with_uncontrolled(calibration).uncontrolled == ("a", "b", "d")


@dataclass(slots=True)
class RunsOf:
    """Runs in which contradicted tests fail and the others pass, but for what each answer says of a test; "" if it does not run."""

    answers: list[dict[str, str]]
    made: list[list[str]] = field(default_factory=list[list[str]])

    async def run_tests(
        self,
        claim: Claim,
        patch: bytes,
        contradictions: Sequence[Contradiction] = (),
        limits: Limits | None = None,
        *,
        at_start: str = "",
    ) -> PatchRun:
        fails = [name for one in contradictions for name in one.fails]
        self.made.append(fails)
        by_name = {name: "FAILED" if name in fails else "PASSED" for name in "abc"} | self.answers.pop(0)
        outcomes = Outcomes({name: said for name, said in by_name.items() if said}, finished=True)
        return PatchRun(PASSED, recorded=msgspec.msgpack.encode(outcomes))


PASSED = Reward(value=1.0, resolved=True, decided_by="exit status 0")


async def pairs(
    *answers: dict[str, str], tries_alone: bool = True, **changes: Any
) -> tuple[set[str], RunsOf]:
    """The tests whose contradictions may be paired: a has two, the others have one. Runs with several come out
    so; all others as they should.
    """
    contradictions = tuple(changing("t.py", 10 * place, "4", "5", name) for place, name in enumerate("aabc"))
    calibration = Calibration(passing=("a", "b", "c"), needing_fix=("a",), contradictions=contradictions)
    grader = RunsOf([*({} for _ in contradictions if tries_alone), *answers, *({} for _ in range(9))])
    runs = ControlRuns(grader, make_claim(make_task("an-image")), b"fix", PatchRun(PASSED))
    calibrator = Calibrator(grader, cast(Any, None), num_controls=2, chance=random.Random(1))
    runs.num_left = runs.num_left if tries_alone else calibrating.MOST_TOGETHER
    checked = await calibrator._checked(replace(calibration, **changes), runs)
    return {name for one in checked.contradictions if one.may_be_paired for name in one.fails}, grader


async def test_contradictions_may_be_paired_whose_tests_failed_together_and_alone() -> None:
    found, grader = await pairs()
    assert found == {"a", "b", "c"}
    assert sorted(grader.made[:4]) == [["a"], ["a"], ["b"], ["c"]]
    assert [sorted(names) for names in grader.made[4:]] == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"c": ""}, set[str]()),  # a test did not run beside the others
        ({"b": "PASSED"}, {"a", "c"}),  # it does not fail beside the others
    ],
)
async def test_what_did_not_fail_beside_others_or_kept_one_from_running_is_not_paired(
    answer: dict[str, str], expected: set[str]
) -> None:
    assert (await pairs(answer))[0] == expected


async def test_what_was_not_tried_alone_is_not_paired() -> None:
    assert (await pairs(tries_alone=False))[0] == set()


@pytest.mark.parametrize("changes", [{"witnessed": True}, {"stops_early": True}])
async def test_nothing_is_paired_where_a_witness_reports_or_the_script_ends_at_a_failure(
    changes: dict[str, Any],
) -> None:
    found, grader = await pairs(**changes)
    assert found == set()
    assert {len(names) for names in grader.made} == {1}


# Quick: a verification: each test can be made to fail, and the known fix is worth 1.
@pytest.mark.slow_but_for("unittest")
@pytest.mark.parametrize("verdict", VERDICTS.values(), ids=list(VERDICTS))
async def test_each_test_can_be_made_to_fail_and_the_known_fix_is_paid(
    measure: Measure, grader: Grader, repo_image: RepoImage, verdict: Verdict
) -> None:
    task = task_of(repo_image, verdict)
    calibration = await measure(task)
    assert len(calibration.passing) == 2
    assert calibration.witnessed
    assert not calibration.stops_early
    assert controlled(calibration) == set(calibration.passing)
    reward = await grader.grade(calibrated(task, calibration), HONEST)
    assert (reward.value, reward.control) == (1.0, "confirmed")


@pytest.mark.slow
async def test_a_pass_by_values_that_equal_everything_is_refuted(
    measure: Measure, grader: Grader, repo_image: RepoImage
) -> None:
    task = task_of(repo_image, by_exit_code())
    calibration = await measure(task)
    assert calibration.needing_fix == ("tests/test_calc.py::test_add",)
    assert (calibration.uncontrolled, calibration.best_control) == ((), "confirmed")
    cheat = HONEST.replace(
        b"+    return a + b", b"+    return type('', (int,), {'__eq__': lambda *_: True})()"
    )
    assert cheat != HONEST
    reward = await grader.grade(make_claim(task), cheat)
    assert (reward.value, reward.control) == (1.0, "none")
    of_add = [one for one in calibration.contradictions if one.fails == ("tests/test_calc.py::test_add",)]
    only = replace(calibration, contradictions=tuple(of_add))
    reward = await grader.grade(calibrated(task, only), cheat)
    assert (reward.value, reward.control) == (0.0, "refuted")
    assert reward.decided_by.endswith("passes what must fail: tests/test_calc.py::test_add")


class RecordedGrader(Grader):
    """Records of each run how many contradictions it had."""

    def __init__(self, sandboxes: DockerSandboxes, chance: Chance) -> None:
        super().__init__(sandboxes, chance)
        self.num_contradicted: list[int] = []

    async def run_tests(
        self,
        claim: Claim,
        patch: bytes,
        contradictions: Sequence[Contradiction] = (),
        limits: Limits | None = None,
        at_start: str = "",
    ) -> PatchRun:
        self.num_contradicted.append(len(contradictions))
        return await super().run_tests(claim, patch, contradictions, limits, at_start=at_start)


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 1])
async def test_in_whichever_order_the_runs_come_the_verdict_is_the_same(
    measure: Measure, sandboxes: DockerSandboxes, repo_image: RepoImage, num_before: int
) -> None:
    task = task_of(repo_image, by_exit_code())
    calibration = await measure(task)
    claim = calibrated(task, calibration)
    recorded = RecordedGrader(sandboxes, chance=FirstOf(num_before))
    paid = await recorded.grade(claim, HONEST)
    assert (paid.value, paid.control) == (1.0, "confirmed")
    assert recorded.num_contradicted == ([1, 0] if num_before else [0, 1])
    recorded.num_contradicted.clear()
    wrong = await recorded.grade(claim, HONEST.replace(b"a + b", b"a * b"))
    assert (wrong.value, wrong.control) == (0.0, "")
    assert recorded.num_contradicted == ([1, 0] if num_before else [0])


SPINS = edited(
    "calc.py",
    "    return a - b",
    """    class Sum(int):
        def __repr__(self):
            while True:
                pass
    return Sum(a + b)""",
)


@pytest.mark.slow
@pytest.mark.parametrize("num_before", [0, 1])
async def test_a_control_that_uses_up_its_cpu_time_refutes_the_pass(
    measure: Measure,
    sandboxes: DockerSandboxes,
    repo_image: RepoImage,
    num_before: int,
) -> None:
    task = task_of(repo_image, by_exit_code())
    calibration = await measure(task)
    claim = calibrated(task, calibration)
    claim = replace(claim, request=replace(claim.request, limits=Limits(grade_cpu_s=6.0)))
    reward = await Grader(sandboxes, chance=FirstOf(num_before)).grade(claim, SPINS)
    assert (reward.value, reward.control) == (0.0, "" if num_before else "refuted")
    assert "cpu time used up" in reward.decided_by


TWO_TESTS = """from calc import add


def test_one():
    assert add(3, 1) == 4


def test_two():
    assert add(3, 2) == 5
"""
KNOWS_THE_TESTS = edited(
    "calc.py",
    "    return a - b",
    f"""    with open("tests/test_two.py") as file:
        is_true_run = file.read() == {TWO_TESTS!r}
    return a + b if is_true_run else a - b""",
)


@pytest.mark.slow_but_for("1")
@pytest.mark.parametrize("num_before", [0, 1])
async def test_tests_that_fail_without_being_contradicted_refute_a_pass(
    measure: Measure, sandboxes: DockerSandboxes, repo_image: RepoImage, num_before: int
) -> None:
    """What finds out that its run is the control, and behaves as without a fix, fails more than it should."""
    tests = {"tests/test_two.py": TWO_TESTS}
    task = task_of(repo_image, by_exit_code("python3 -m pytest tests/test_two.py\n", **tests))
    calibration = await measure(task)
    assert len(calibration.needing_fix) == 2
    grader = Grader(sandboxes, chance=FirstOf(num_before))
    reward = await grader.grade(calibrated(task, calibration), KNOWS_THE_TESTS)
    assert (reward.value, reward.control) == (0.0, "" if num_before else "refuted")
    said = "did not pass, in a run in which what" if num_before else "did not pass where only what"
    assert f"{said} tests/test_two.py::test_" in reward.decided_by


async def test_a_fix_that_does_not_pass_calibrates_nothing(
    calibrator: Calibrator, repo_image: RepoImage
) -> None:
    wrong = HONEST.replace(b"a + b", b"a * b")
    assert await calibrator.calibrate(make_claim(task_of(repo_image, by_exit_code())), wrong) == Calibration()


@pytest.mark.slow
async def test_a_script_that_ends_at_the_first_failure_is_known(
    calibrator: Calibrator, grader: Grader, repo_image: RepoImage
) -> None:
    task = task_of(repo_image, by_exit_code("python3 -m pytest -x tests/test_calc.py\n"))
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert calibration.stops_early
    assert controlled(calibration) == set(calibration.passing)
    reward = await grader.grade(calibrated(task, calibration), HONEST)
    assert reward.control == "confirmed"


@pytest.mark.slow
async def test_the_share_of_controls_is_the_requests(
    measure: Measure, grader: Grader, repo_image: RepoImage
) -> None:
    task = task_of(repo_image, by_exit_code())
    claim = calibrated(task, await measure(task))
    never = replace(claim, request=replace(claim.request, control_share=0.0))
    assert (await grader.grade(never, HONEST)).control == "off"


# Each failure takes 0.6 s of CPU time, as reports of failures in large files do.
SLOW_FAILURES = """cat >conftest.py <<'EOF'
import time


def pytest_runtest_logreport(report):
    until = time.process_time() + 0.6
    while report.failed and time.process_time() < until:
        pass
EOF
"""
SLOW_TRACEBACKS = """cat >conftest.py <<'EOF'
import time

import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    outcome = yield
    until = time.process_time() + 0.6
    while item.config.option.tbstyle != "no" and outcome.get_result().failed and time.process_time() < until:
        pass
EOF
"""
NEEDS_TRACEBACKS = """cat >conftest.py <<'EOF'
def pytest_runtest_setup(item):
    assert item.config.option.tbstyle != "no"
EOF
"""
FOUR_TESTS = "from calc import add, sub\n\n\n" + "\n\n\n".join(
    f"def test_{number}():\n    assert {call} == {number}"
    for number, call in enumerate(["sub(1, 1)", "sub(2, 1)", "add(1, 1)", "sub(4, 1)"])
)
SLOW_TO_FAIL = """


def test_slow():
    try:
        assert sub(9, 4) == 5
    except AssertionError:
        while True:
            pass
"""


def with_tests(repo_image: RepoImage, text: str, *, setup_script: str = "") -> Task:
    verdict = by_exit_code("python3 -m pytest tests/test_four.py\n", **{"tests/test_four.py": text + "\n"})
    return task_of(repo_image, verdict, setup_script=setup_script)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.grading.defence.control.CONTROL_EXTRA_S", 0.5)
    monkeypatch.setattr("workers.grading.container.WATCH_S", 0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("short_limits")
async def test_where_failures_take_long_each_test_has_a_control_nevertheless(
    calibrator: Calibrator, grader: Grader, repo_image: RepoImage
) -> None:
    task = with_tests(repo_image, FOUR_TESTS, setup_script=SLOW_FAILURES)
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert calibration.needing_fix == ("tests/test_four.py::test_2",)
    assert controlled(calibration) == set(calibration.passing)
    reward = await grader.grade(calibrated(task, calibration), HONEST)
    assert (reward.value, reward.control) == (1.0, "confirmed")


@pytest.mark.slow
@pytest.mark.usefixtures("short_limits")
async def test_one_test_that_is_slow_to_fail_costs_the_others_nothing(
    calibrator: Calibrator, repo_image: RepoImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short for a failure without an end, and long enough for the others on a busy machine, whose CPU time varies.
    monkeypatch.setattr("workers.grading.defence.control.CONTROL_EXTRA_S", 2.0)
    task = with_tests(repo_image, FOUR_TESTS + SLOW_TO_FAIL)
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert len(calibration.passing) == 5
    assert controlled(calibration) == {*calibration.passing} - {"tests/test_four.py::test_slow"}


@dataclass
class RecordedRuns:
    """A grader that records its runs."""

    grader: Grader
    runs: list[tuple[Claim, PatchRun]] = field(default_factory=list[tuple[Claim, PatchRun]])

    async def run_tests(
        self,
        claim: Claim,
        patch: bytes,
        contradictions: Sequence[Contradiction] = (),
        limits: Limits | None = None,
        at_start: str = "",
    ) -> PatchRun:
        run = await self.grader.run_tests(claim, patch, contradictions, limits, at_start=at_start)
        self.runs.append((claim, run))
        return run

    def of_trials(self) -> list[PatchRun]:
        return [
            run for claim, run in self.runs if claim.request.task.env.get("PYTEST_ADDOPTS") == TRIAL_OPTIONS
        ]


@pytest.mark.slow
@pytest.mark.usefixtures("short_limits")
async def test_trials_do_not_wait_for_tracebacks(
    sandboxes: DockerSandboxes, grader: Grader, repo_image: RepoImage
) -> None:
    recorded = RecordedRuns(grader)
    task = with_tests(repo_image, FOUR_TESTS, setup_script=SLOW_TRACEBACKS)
    calibrator = Calibrator(recorded, sandboxes, num_controls=2, chance=random.Random(1))
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert recorded.of_trials()
    assert all(run.outcomes.finished for run in recorded.of_trials())
    assert controlled(calibration) == set(calibration.passing)


@pytest.mark.slow
async def test_trials_print_tracebacks_where_tests_need_them(
    sandboxes: DockerSandboxes, grader: Grader, repo_image: RepoImage
) -> None:
    recorded = RecordedRuns(grader)
    task = with_tests(repo_image, FOUR_TESTS, setup_script=NEEDS_TRACEBACKS)
    calibrator = Calibrator(recorded, sandboxes, num_controls=1, chance=random.Random(1))
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert len(recorded.of_trials()) == 2, (
        "one of the base, and one of the fix that shows that its tests need them"
    )
    assert controlled(calibration) == set(calibration.passing)


@pytest.mark.slow
async def test_trials_end_with_their_cpu_time(
    calibrator: Calibrator, grader: Grader, repo_image: RepoImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.verify.trials.MOST_CPU_FACTOR", 0.0)
    task = with_tests(repo_image, FOUR_TESTS)
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert len(calibration.passing) == 4
    assert not calibration.contradictions
    assert (await grader.grade(calibrated(task, calibration), HONEST)).control == "none"


MANUAL = ">>> from calc import add, sub\n>>> sub(3, 1)\n2\n>>> add(3, 1)\n4\n>>> sub(5, 1)\n4\n"


@pytest.mark.slow
async def test_a_manual_is_contradicted_in_the_example_that_fails_without_the_fix(
    calibrator: Calibrator, grader: Grader, repo_image: RepoImage
) -> None:
    verdict = by_exit_code("python3 -m pytest --doctest-glob='*.rst'\n")
    task = task_of(repo_image, verdict, setup_script=written("docs/sums.rst", MANUAL, "644"))
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    manual = "docs/sums.rst::sums.rst"
    assert manual in calibration.needing_fix
    assert (calibration.uncontrolled, calibration.best_control) == ((), "confirmed")
    assert "docs/sums.rst" in calibration.reads
    of_manual = [one for one in calibration.contradictions if one.fails == (manual,)]
    changes = [change for one in of_manual for change in one.changes]
    assert {(change.offset_bytes, change.was) for change in changes} == {(MANUAL.index("4\n"), "4")}
    only = replace(calibration, contradictions=tuple(of_manual))
    reward = await grader.grade(calibrated(task, only), HONEST)
    assert (reward.value, reward.control) == (1.0, "confirmed")


FAILS_A, FAILS_B = {"a": "FAILED"}, {"b": "FAILED"}
ALL_PASS = dict.fromkeys("abc", "PASSED")


@pytest.mark.parametrize(
    ("outcomes", "stops_early", "left"),
    [
        # Each test that fails keeps those after it from running; c is the last.
        ([FAILS_A, {"a": "PASSED", **FAILS_B}, ALL_PASS | {"c": "FAILED"}], True, "abc"),
        ([ALL_PASS | FAILS_A, ALL_PASS | FAILS_B, ALL_PASS | {"c": "FAILED"}], False, "abc"),
        # One of three failures ends the process, and its test has no other contradiction.
        ([FAILS_A, ALL_PASS | FAILS_B, ALL_PASS | {"c": "FAILED"}], False, "abc"),
        # The same where the test has another one.
        ([FAILS_A, ALL_PASS | FAILS_B, ALL_PASS | {"c": "FAILED"}, ALL_PASS | FAILS_A], False, "bca"),
        # A contradiction under which its test does not run shows nothing, and is dropped.
        ([{"b": "PASSED"}, ALL_PASS | FAILS_B, ALL_PASS | {"c": "FAILED"}], False, "bc"),
        ([None, ALL_PASS | FAILS_B, ALL_PASS | {"c": "FAILED"}], False, "bc"),
    ],
)
@pytest.mark.parametrize("witnessed", [False, True])
def test_a_script_ends_at_the_first_failure_if_most_failures_keep_other_tests_from_running(
    outcomes: list[dict[str, str] | None], witnessed: bool, stops_early: bool, left: str
) -> None:
    contradictions = tuple(
        changing("t.go", 10 * place, "4", "5", name) for place, name in enumerate("abca"[: len(outcomes)])
    )
    calibration = Calibration(passing=("a", "b", "c"), needing_fix=("a",), contradictions=contradictions)
    alone = {
        id(one): None
        if by_name is None
        else Outcomes(by_name, witnessed, stopped_early=witnessed and len(by_name) < 3, finished=True)
        for one, by_name in zip(contradictions, outcomes, strict=True)
    }
    found, tried = calibrating._with_alone(calibration, alone)
    assert found.stops_early is stops_early
    assert "".join(name for one in found.contradictions for name in one.fails) == left
    assert [one for one in found.contradictions if not one.may_end] == (
        [*found.contradictions] if stops_early else tried
    )


def test_what_was_not_tried_alone_may_end_the_process_where_another_did() -> None:
    """It is not paired, does not replace one that is known to end the process, and tests that it may keep from running do not stray."""
    contradictions = tuple(changing("t.go", 10 * place, "4", "5", name) for place, name in enumerate("abcab"))
    calibration = Calibration(
        passing=("a", "b", "c"), needing_fix=("a", "b", "c"), contradictions=contradictions
    )
    by_name = [FAILS_A, ALL_PASS | FAILS_B, ALL_PASS | {"c": "FAILED"}]
    alone = {
        id(one): Outcomes(said, finished=True) for one, said in zip(contradictions, by_name, strict=False)
    }
    found, tried = calibrating._with_alone(calibration, alone)
    assert [(one.fails, one.may_fail, one.may_end) for one in found.contradictions] == [
        (("a",), (), True),
        (("b",), (), False),
        (("c",), (), False),
        (("a",), (), True),
        (("b",), (), True),
    ]
    assert tried == [*found.contradictions[1:3]]
    for one in found.contradictions:
        missing = Outcomes({name: "FAILED" for name in one.fails}, finished=True)
        assert bool(strays([one], missing, found)) is not one.may_end
