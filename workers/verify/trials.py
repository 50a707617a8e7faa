"""Trials of contradictions on the known fix: the choice of the next ones, and the runs of the task's tests for them.

The runs are bounded in number and in CPU time. The CPU time of trials is bounded by a multiple of the time of the tests alone, and
each run has the limits of a control.
"""

import contextlib
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from pipeline.request import Claim, Limits
from pipeline.runners import PYTEST, UNITTEST
from pipeline.task import Calibration, Contradiction, Task, pack
from workers.grading.container import PatchRun, Starved
from workers.grading.controls.drawing import ChangedText, Outcomes
from workers.grading.controls.placing import NotAsCalibrated
from workers.grading.defence.control import control_limits

MOST_RUNS = 40
RESERVED_RUNS = 8  # runs of a task that are reserved for runs exactly as a grader makes them
# Limit for the CPU time of all trials, as a multiple of the CPU time of the tests alone, which counts as at least one second.
MOST_CPU_FACTOR, LEAST_CPU_S = 100.0, 1.0
# Share of the CPU time that a control may take beyond the tests alone; trials are planned so that failures take this share of it.
FAILURES_SHARE = 0.5
STARVED_TRIES = 3  # tries of one run while the machine has no CPU for it
# Options of pytest for trials: no tracebacks, and no stop at the first failure, even if the project's settings ask for it.
TRIAL_OPTIONS = "--tb=no --maxfail=1000000"
_FIRST_FAILURE = re.compile(r"(?<=\s)(?:-x|--exitfirst|--maxfail[= ]\d+|-f|--failfast)(?=\s)")


class RunsTests(Protocol):
    """Runs the hidden tests on a patch. Raises RolloutError."""

    async def run_tests(
        self,
        claim: Claim,
        patch: bytes,
        contradictions: Sequence[Contradiction] = (),
        limits: Limits | None = None,
        *,
        at_start: str = "",
    ) -> PatchRun: ...


@dataclass(slots=True)
class ControlRuns:
    """The runs of one task, their cost, and the remaining budget."""

    grader: RunsTests
    claim: Claim
    fix: bytes
    plain: PatchRun  # a run without contradictions
    num_left: int = MOST_RUNS
    cpu_left_s: float = field(init=False)
    # CPU time and wall time of the slowest of the runs made by `as_graded`.
    cpu_s: float = 0.0
    wall_s: float = 0.0
    _trial_claim: Claim = field(init=False)

    def __post_init__(self) -> None:
        self.cpu_left_s = MOST_CPU_FACTOR * max(self.plain.reward.grade_cpu_s, LEAST_CPU_S)
        self._trial_claim = self.claim

    @property
    def may_try(self) -> bool:
        """Whether there are runs and CPU time left for trials."""
        return self.num_left > RESERVED_RUNS and self.cpu_left_s > 0

    async def shorten_trials(self, names: Iterable[str]) -> None:
        """Makes later trials print no tracebacks and continue after a failed check, if all of these tests also pass in that mode.

        For each traceback, pytest parses the whole test file again, which takes 0.2 s for a file of 7,000 lines. Only runs of
        the known fix may differ from a grader's runs: the known fix, unlike a policy's patch, gains nothing by detecting which is which.
        """
        claim = for_trials(self.claim)
        run = await self.grader.run_tests(claim, self.fix)
        if all(run.outcomes.passed(name) for name in names):
            self._trial_claim = claim

    async def try_out(self, contradictions: Sequence[Contradiction]) -> PatchRun | None:
        """Runs the tests with these contradictions. Returns None if they cannot be inserted, or if the run exceeded a control's time."""
        return await self._run(self._trial_claim, contradictions)

    async def as_graded(self, contradictions: Sequence[Contradiction]) -> PatchRun | None:
        """Does the same as `try_out`, but runs the tests exactly as a grader runs a control."""
        run = await self._run(self.claim, contradictions)
        if run is not None:
            self.cpu_s = max(self.cpu_s, run.reward.grade_cpu_s)
            self.wall_s = max(self.wall_s, run.wall_s)
        return run

    def most_failing(self, run: PatchRun, num_failing: int) -> float:
        """Returns how many tests may fail in one run, extrapolated from the time that `num_failing` failures took in `run`."""
        limits, plain = self.limits, self.plain
        spare_cpu_s = FAILURES_SHARE * (limits.grade_cpu_s - plain.reward.grade_cpu_s)
        by_cpu = _ratio(spare_cpu_s, run.reward.grade_cpu_s - plain.reward.grade_cpu_s)
        by_wall = _ratio(limits.grade_wall_s - plain.wall_s, run.wall_s - plain.wall_s)
        return max(1, num_failing * min(by_cpu, by_wall))

    async def _run(self, claim: Claim, contradictions: Sequence[Contradiction]) -> PatchRun | None:
        self.num_left -= 1
        try:
            run = await self._where_there_is_cpu(claim, contradictions)
        except NotAsCalibrated:
            return None
        self.cpu_left_s -= run.reward.grade_cpu_s
        return run if run.outcomes.finished else None

    async def _where_there_is_cpu(self, claim: Claim, contradictions: Sequence[Contradiction]) -> PatchRun:
        """Runs the tests, and repeats the run while the machine has no CPU for it. Raises Starved if none of the tries had CPU.

        Otherwise a busy machine could leave a task without controls.
        """
        for _ in range(STARVED_TRIES - 1):
            with contextlib.suppress(Starved):
                return await self.grader.run_tests(claim, self.fix, contradictions, self.limits)
        return await self.grader.run_tests(claim, self.fix, contradictions, self.limits)

    @property
    def limits(self) -> Limits:
        """The limits of a control, derived from the run without contradictions."""
        return control_limits(self.claim.request.limits, Calibration(), self.plain)


def calibrated(task: Task, calibration: Calibration) -> Task:
    """The task with this calibration."""
    return replace(task, calibration=pack(calibration))


def claim_with(claim: Claim, calibration: Calibration) -> Claim:
    """The claim of the same task, calibrated."""
    return replace(claim, request=replace(claim.request, task=calibrated(claim.request.task, calibration)))


def for_trials(claim: Claim) -> Claim:
    """The claim of the same task, in which pytest prints no tracebacks, and no runner ends at the first failure."""
    task = claim.request.task
    options = f"{task.env.get('PYTEST_ADDOPTS', '')} {TRIAL_OPTIONS}".strip()
    script = "".join(
        _FIRST_FAILURE.sub("", line) if PYTEST.named.search(line) or UNITTEST.named.search(line) else line
        for line in task.verdict.eval_script.splitlines(keepends=True)
    )
    verdict = replace(task.verdict, eval_script=script)
    task = replace(task, env=task.env | {"PYTEST_ADDOPTS": options}, verdict=verdict)
    return replace(claim, request=replace(claim.request, task=task))


def _ratio(spare_s: float, extra_s: float) -> float:
    return math.inf if extra_s <= 0 else max(0.0, spare_s) / extra_s


KINDS = ("value", "opposite", "nothing")
FAILURES_WANTED = 2  # runs in which a contradiction's tests must have failed


@dataclass(slots=True)
class Trial:
    """One contradiction, the tests that may fail under it, and their observed outcomes."""

    contradiction: Contradiction
    names: frozenset[str]
    failing: frozenset[str] = frozenset()  # tests that failed under it whenever it was tried
    # Other tests that may read what it changes, and those of them that failed under it
    others: frozenset[str] = frozenset()
    others_failing: frozenset[str] = frozenset()
    num_failures: int = 0
    dropped: bool = False
    # Whether the expected value is read from a file, which code under test could read, too.
    is_in_a_file: bool = False
    # The ranges in which it is checked, in bytes of the file `checked_in`; empty if that is not known.
    checked: tuple[tuple[int, int], ...] = ()
    checked_in: str = ""
    # The ranges in which the text of an error is checked, if the expectation is the class of the error.
    texts: tuple[tuple[int, int], ...] = ()
    # It is tried only for tests that have no other contradiction.
    is_last: bool = False

    def enter(self, outcomes: Outcomes) -> bool:
        """Records the outcomes of a run with this contradiction. Returns False if its tests did not run."""
        under_it = {name: self.contradiction.renamed.get(name, name) for name in self.names}
        if not any(name in outcomes.by_name for name in under_it.values()):
            return False
        failed = frozenset(name for name, called in under_it.items() if outcomes.failed(called))
        self.failing = failed & self.failing if self.num_failures else failed
        self.others_failing |= {name for name in self.others if outcomes.failed(name)}
        self.num_failures += 1
        self.dropped = not self.failing
        return True

    @property
    def touched(self) -> set[str]:
        """All tests that may have another outcome or another name under it."""
        return {*self.names, *self.others, *self.contradiction.renamed.values()}

    @property
    def is_kept(self) -> bool:
        return not self.dropped and self.num_failures >= FAILURES_WANTED

    @property
    def is_promising(self) -> bool:
        """Whether one more run may confirm the contradiction, so that it is kept."""
        return not self.dropped and 0 < self.num_failures < FAILURES_WANTED

    @property
    def is_new(self) -> bool:
        return not self.dropped and not self.num_failures


def _rank(trial: Trial) -> tuple[bool, int, bool, int]:
    """Returns the sort key of trials. Changed values come first. A place where the value is written comes before a name, an attribute or a
    file that contains it, which code could read. A trial of one test comes before one that many tests share.
    """
    one = trial.contradiction
    is_name = one.changes[0].was.replace(".", "").isidentifier()
    return trial.is_last, KINDS.index(one.kind), is_name or trial.is_in_a_file, len(trial.names)


@dataclass(slots=True)
class Trials:
    """All contradictions of one task."""

    trials: list[Trial]
    chance: random.Random
    _by_name: dict[str, list[Trial]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.chance.shuffle(self.trials)
        self.trials.sort(key=_rank)
        for trial in self.trials:
            for name in trial.names:
                self._by_name[name].append(trial)

    def choose(
        self, num_wanted: int, *, confirm: bool, shared_first: bool, among: Collection[str] | None = None
    ) -> list[Trial]:
        """Trials for one run, no two of which concern the same test: promising ones first if `confirm`, otherwise new ones. `among`: only
        for these tests; None: for all tests.

        Tests whose contradictions are all shared with other tests come first or last.
        """
        chosen: list[Trial] = []
        taken: set[str] = set()
        changed = ChangedText()
        names = [name for name in self._by_name if among is None or name in among]
        self.chance.shuffle(names)
        for name in sorted(names, key=self._num_sharing, reverse=shared_first):
            if name in taken:
                continue
            found = next(self._next(name, num_wanted, taken, changed, confirm=confirm), None)
            if found:
                chosen.append(found)
                changed.add(found.contradiction)
                taken |= found.touched
        return chosen

    def _num_sharing(self, name: str) -> int:
        """The number of tests that share the contradiction of this test that the fewest tests share."""
        return min((len(trial.names) for trial in self._by_name[name] if not trial.dropped), default=0)

    def _next(
        self,
        name: str,
        num_wanted: int,
        taken: set[str],
        changed: ChangedText,
        *,
        confirm: bool,
    ) -> Iterator[Trial]:
        trials = self._by_name[name]
        promising = [trial for trial in trials if trial.is_promising and name in trial.failing]
        held = [*promising, *(trial for trial in trials if trial.is_kept and name in trial.failing)]
        new = [trial for trial in trials if trial.is_new] if len(held) < num_wanted else []
        kinds = Counter(trial.contradiction.kind for trial in held)
        if held:
            new = [trial for trial in new if trial.contradiction.kind != "nothing" and not trial.is_last]
        new.sort(key=lambda trial: kinds[trial.contradiction.kind])
        for trial in (*promising, *new) if confirm else (*new, *promising):
            if taken.isdisjoint(trial.touched) and not changed.overlaps(trial.contradiction):
                yield trial

    def apart(self, most: int, first: Collection[str]) -> list[Trial]:
        """Returns one trial for each of at most `most` tests, for runs with this trial only. The tests in `first` come first."""
        found: dict[str, Trial] = {}
        for name in sorted(self._by_name, key=lambda name: name not in first):
            usable = [trial for trial in self._by_name[name] if not trial.dropped]
            if usable and len(found) < most:
                found.setdefault(name, usable[0])
        return list({id(trial): trial for trial in found.values()}.values())

    def kept(self) -> list[Contradiction]:
        """Returns the contradictions that are kept, each with the tests that fail under it and those that may fail.

        Those that come last are kept only for tests that have no other.
        """
        kept = [trial for trial in self.trials if trial.is_kept]
        others = {name for trial in kept if not trial.is_last for name in trial.failing}
        return [
            replace(
                trial.contradiction,
                fails=tuple(sorted(trial.failing)),
                may_fail=tuple(sorted((trial.names - trial.failing) | trial.others_failing)),
            )
            for trial in kept
            if not trial.is_last or not trial.failing <= others
        ]
