"""The known fix measured: which tests it passes, and under which contradictions they fail."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from pipeline.calibration import Calibration, Contradiction, pack
from pipeline.request import Claim, Limits
from pipeline.task import Task, Verdict
from tests.workers.attacks.patches import HONEST
from tests.workers.attacks.test_attacks import KINDS, UNITTEST_VERDICT, by_exit_code, task_of
from tests.workers.claims import make_claim
from tests.workers.conftest import RepoImage
from workers.grading.grade import Grader, PatchRun
from workers.sandbox.docker import DockerSandboxes
from workers.verify.calibrating import Calibrator

pytestmark = pytest.mark.docker

VERDICTS = KINDS | {"unittest": UNITTEST_VERDICT}


@pytest.fixture
def grader(sandboxes: DockerSandboxes) -> Grader:
    return Grader(sandboxes)


@pytest.fixture
def calibrator(sandboxes: DockerSandboxes, grader: Grader) -> Calibrator:
    return Calibrator(grader, sandboxes, num_controls=2, chance=random.Random(1))


def calibrated(task: Task, calibration: Calibration) -> Claim:
    return make_claim(replace(task, calibration=pack(calibration)))


def controlled(calibration: Calibration) -> set[str]:
    return {name for one in calibration.contradictions for name in one.fails}


# Quick: a verification: each test can be made to fail, and the known fix is worth 1.
@pytest.mark.slow_but_for("unittest")
@pytest.mark.parametrize("verdict", VERDICTS.values(), ids=list(VERDICTS))
async def test_each_test_can_be_made_to_fail_and_the_known_fix_is_paid(
    calibrator: Calibrator, grader: Grader, repo_image: RepoImage, verdict: Verdict
) -> None:
    task = task_of(repo_image, verdict)
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert len(calibration.passing) == 2
    assert calibration.witnessed
    assert not calibration.stops_early
    assert controlled(calibration) == set(calibration.passing)
    reward = await grader.grade(calibrated(task, calibration), HONEST)
    assert (reward.value, reward.control, reward.num_controlled) == (1.0, "confirmed", 2)


@pytest.mark.slow
async def test_a_pass_by_values_that_equal_everything_is_refuted(
    calibrator: Calibrator, grader: Grader, repo_image: RepoImage
) -> None:
    task = task_of(repo_image, by_exit_code())
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    cheat = HONEST.replace(
        b"+    return a + b", b"+    return type('', (int,), {'__eq__': lambda *_: True})()"
    )
    assert cheat != HONEST
    reward = await grader.grade(make_claim(task), cheat)
    assert (reward.value, reward.control) == (1.0, "none")
    reward = await grader.grade(calibrated(task, calibration), cheat)
    assert (reward.value, reward.control) == (0.0, "refuted")
    assert "passes what must fail: tests/test_calc.py::test_add" in reward.decided_by


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
    assert (reward.control, reward.num_controlled) == ("confirmed", 1)


@pytest.mark.slow
async def test_the_share_of_controls_is_the_requests(
    calibrator: Calibrator, grader: Grader, repo_image: RepoImage
) -> None:
    task = task_of(repo_image, by_exit_code())
    claim = calibrated(task, await calibrator.calibrate(make_claim(task), HONEST))
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
    monkeypatch.setattr("workers.grading.grade.CONTROL_EXTRA_S", 0.5)
    monkeypatch.setattr("workers.grading.container.WATCH_S", 0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("short_limits")
async def test_where_failures_take_long_few_tests_are_controlled_at_once(
    calibrator: Calibrator, grader: Grader, repo_image: RepoImage
) -> None:
    task = with_tests(repo_image, FOUR_TESTS, setup_script=SLOW_FAILURES)
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert calibration.needing_fix == ("tests/test_four.py::test_2",)
    assert 0 < calibration.most_controlled < 4
    assert controlled(calibration) == set(calibration.passing)
    reward = await grader.grade(calibrated(task, calibration), HONEST)
    assert (reward.value, reward.control) == (1.0, "confirmed")
    assert 0 < reward.num_controlled < 4


@pytest.mark.slow
@pytest.mark.usefixtures("short_limits")
async def test_one_test_that_is_slow_to_fail_costs_the_others_nothing(
    calibrator: Calibrator, repo_image: RepoImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Short for a failure without an end, and long enough for the others on a busy machine, whose CPU time varies.
    monkeypatch.setattr("workers.grading.grade.CONTROL_EXTRA_S", 2.0)
    task = with_tests(repo_image, FOUR_TESTS + SLOW_TO_FAIL)
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert len(calibration.passing) == 5
    assert controlled(calibration) == {*calibration.passing} - {"tests/test_four.py::test_slow"}
    assert calibration.most_controlled == 0


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
    ) -> PatchRun:
        run = await self.grader.run_tests(claim, patch, contradictions, limits)
        self.runs.append((claim, run))
        return run

    def of_trials(self) -> list[PatchRun]:
        return [run for claim, run in self.runs if claim.request.task.env.get("PYTEST_ADDOPTS") == "--tb=no"]


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
    assert 0 < calibration.most_controlled < 4


@pytest.mark.slow
async def test_trials_print_tracebacks_where_tests_need_them(
    sandboxes: DockerSandboxes, grader: Grader, repo_image: RepoImage
) -> None:
    recorded = RecordedRuns(grader)
    task = with_tests(repo_image, FOUR_TESTS, setup_script=NEEDS_TRACEBACKS)
    calibrator = Calibrator(recorded, sandboxes, num_controls=1, chance=random.Random(1))
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert len(recorded.of_trials()) == 1
    assert controlled(calibration) == set(calibration.passing)


@pytest.mark.slow
async def test_trials_end_with_their_cpu_time(
    calibrator: Calibrator, grader: Grader, repo_image: RepoImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.verify.control_runs.MOST_CPU_FACTOR", 0.0)
    task = with_tests(repo_image, FOUR_TESTS)
    calibration = await calibrator.calibrate(make_claim(task), HONEST)
    assert len(calibration.passing) == 4
    assert not calibration.contradictions
    assert (await grader.grade(calibrated(task, calibration), HONEST)).control == "none"
