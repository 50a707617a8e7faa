"""Measures a task's tests with the known fix: which pass in every run, and under which contradictions each of them fails.

A contradiction is kept only if its tests failed under it twice, among different others, and again if it is drawn as a grader
draws. What it costs is measured too: one under which the tests take much longer is dropped.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from msgspec.structs import replace

from pipeline.calibration import Calibration, Contradiction
from pipeline.request import Claim
from workers.grading import witness
from workers.grading.container import GradingContainer
from workers.grading.controls.drawing import draw
from workers.grading.controls.locating import locate
from workers.grading.controls.outcomes import Outcomes, survivors
from workers.grading.controls.placing import read_tests
from workers.grading.controls.writing import Candidate, candidates
from workers.grading.survey import Surveys
from workers.grading.swebench_rules import Marks
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded
from workers.sandbox.protocol import Sandbox
from workers.verify.control_runs import ControlRuns, RunsTests, claim_with
from workers.verify.trials import Trial, Trials

WRITING_CPU_S = 120  # to find the contradictions of one file
MOST_ALONE = 8  # tests whose contradictions are tried where a script ends at the first failure
FINAL_DRAWS = 2  # such draws, after which a contradiction that did not fail is dropped
FIRST_FAILURES = 32  # tests that fail in one more draw, which shows how long failures take

USELESS = b"""diff --git a/swerve-note.txt b/swerve-note.txt
new file mode 100644
--- /dev/null
+++ b/swerve-note.txt
@@ -0,0 +1 @@
+This file changes nothing.
"""


class OpensSandboxes(Protocol):
    """Opens a container of the claim's task as the grader does."""

    def open(self, claim: Claim, *, role: Literal["grade"]) -> AbstractAsyncContextManager[Sandbox]: ...


@dataclass(frozen=True, slots=True)
class Calibrator:
    """Calibrates tasks: `num_controls` contradictions are wanted for each test."""

    grader: RunsTests
    sandboxes: OpensSandboxes
    num_controls: int
    no_fix: bytes = USELESS  # a patch that changes nothing
    chance: random.Random = field(default_factory=random.Random)

    async def calibrate(self, claim: Claim, fix: bytes) -> Calibration:
        """The calibration by the known fix. Empty if that does not pass. Raises RolloutError."""
        fix_paths = tuple(witness.touched_paths(fix))
        claim = claim_with(claim, Calibration(fix_paths=fix_paths))
        first = await self.grader.run_tests(claim, fix)
        if not first.reward.resolved:
            return Calibration()
        second = await self.grader.run_tests(claim, fix)
        passing, flaky = _passing([first.outcomes, second.outcomes])
        calibration = Calibration(
            passing=tuple(passing),
            flaky=tuple(flaky),
            witnessed=first.outcomes.witnessed and second.outcomes.witnessed,
            replaced=tuple(sorted(first.outcomes.replaced | second.outcomes.replaced)),
            fix_paths=fix_paths,
        )
        if not passing or not self.num_controls:
            return calibration
        trials, test_files = await self._trials(claim, fix, passing)
        calibration = replace(calibration, test_files=test_files)
        runs = ControlRuns(self.grader, claim_with(claim, calibration), fix, first)
        await runs.shorten_trials(passing)
        measured = _Measured(trials, runs)
        await measured.try_all(self.num_controls)
        contradictions = tuple(trials.kept())
        calibration = replace(calibration, stops_early=measured.stops_early, contradictions=contradictions)
        if contradictions:
            calibration = await self._with_most(calibration, runs)
        return await self._checked(calibration, runs)

    async def _with_most(self, calibration: Calibration, runs: ControlRuns) -> Calibration:
        """The calibration, with a limit on how many tests fail in one control if all of them would take too long."""
        drawn = draw(replace(calibration, most_controlled=FIRST_FAILURES), self.chance)
        run = await runs.as_graded(drawn)
        while run is None and len(drawn) > 1:
            drawn = drawn[: len(drawn) // 2]
            run = await runs.as_graded(drawn)
        if run is None:
            return replace(calibration, contradictions=())
        most = runs.most_failing(run, len(failing(drawn)))
        if most >= len(failing(calibration.contradictions)):
            return calibration
        base = await self.grader.run_tests(runs.claim, self.no_fix)
        needing = tuple(name for name in calibration.passing if not base.outcomes.passed(name))
        return replace(calibration, most_controlled=int(most), needing_fix=needing)

    async def _checked(self, calibration: Calibration, runs: ControlRuns) -> Calibration:
        """The calibration with the contradictions that hold as a grader draws them, and what they cost."""
        for _ in range(FINAL_DRAWS):
            wrong = await self._wrong(draw(calibration, self.chance), calibration, runs)
            kept = tuple(_without(calibration.contradictions, wrong))
            calibration = replace(calibration, contradictions=kept)
        return replace(calibration, control_cpu_s=runs.cpu_s, control_wall_s=runs.wall_s)

    async def _wrong(
        self, drawn: Sequence[Contradiction], calibration: Calibration, runs: ControlRuns
    ) -> set[str]:
        """Tests that did not fail under these contradictions, or not in time. What takes too long together is run in halves."""
        if not drawn:
            return set()
        run = await runs.as_graded(drawn)
        if run is not None:
            return {*survivors(failing(drawn), run.outcomes, calibration)}
        if len(drawn) == 1 or runs.num_left <= 0:
            return failing(drawn)
        middle = len(drawn) // 2
        first = await self._wrong(drawn[:middle], calibration, runs)
        return first | await self._wrong(drawn[middle:], calibration, runs)

    async def _trials(self, claim: Claim, fix: bytes, names: Sequence[str]) -> tuple[Trials, tuple[str, ...]]:
        """What may be contradicted for these tests, and the files of the repository that hold them."""
        task = claim.request.task
        async with self.sandboxes.open(claim, role="grade") as sandbox:
            fixed = Calibration(fix_paths=tuple(witness.touched_paths(fix)))
            container = GradingContainer(claim, sandbox, fix, Marks(), claim.request.limits, fixed, Surveys())
            await container.apply()
            located = await locate(sandbox, task, names)
            paths = {place.path for place in located.values()} - {*witness.touched_paths(fix)}
            texts = await read_tests(sandbox, task.verdict.eval_script, paths)
        names_of: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, place in located.items():
            names_of[place.path, place.function].append(name)
        trials = [
            trial
            for path, text in sorted(texts.items())
            for trial in _as_trials(path, await self._candidates(text), names_of)
        ]
        return Trials(trials, self.chance), tuple(sorted(texts))

    async def _candidates(self, text: bytes) -> list[Candidate]:
        """None for a file that takes too long to be read."""
        try:
            return await isolation.call(candidates_of, text, self.chance.getrandbits(32), cpu_s=WRITING_CPU_S)
        except LimitExceeded:
            return []


def candidates_of(text: bytes, seed: int) -> list[Candidate]:
    """The candidates of a test file, by chance from `seed`: to be called in a process of its own."""
    return candidates(text, random.Random(seed))


def _as_trials(
    path: str, found: Iterable[Candidate], names_of: Mapping[tuple[str, str], Sequence[str]]
) -> Iterator[Trial]:
    for one in found:
        names = sorted({name for test in one.tests for name in names_of.get((path, test), ())})
        if names:
            contradiction = Contradiction(
                path=path,
                offset_bytes=one.offset_bytes,
                was=one.was,
                becomes=one.becomes,
                fails=tuple(names),
            )
            yield Trial(contradiction, frozenset(names))


def failing(contradictions: Iterable[Contradiction]) -> set[str]:
    """Names of the tests that are to fail under these contradictions."""
    return {name for one in contradictions for name in one.fails}


def _passing(runs: Sequence[Outcomes]) -> tuple[list[str], list[str]]:
    """Names of the tests that passed in all runs, and of those that did in some."""
    names = sorted({name for run in runs for name in run.by_name})
    always = [name for name in names if all(run.passed(name) for run in runs)]
    some = [name for name in names if any(run.passed(name) for run in runs)]
    return always, sorted({*some} - {*always})


@dataclass(slots=True)
class _Measured:
    """The contradictions of one task, tried on the known fix."""

    trials: Trials
    runs: ControlRuns
    stops_early: bool = False
    most_at_once: float = math.inf  # tests that may fail in one run, as far as is known

    async def try_all(self, num_controls: int) -> None:
        """Tries contradictions until each test has `num_controls` that it failed under twice, none are left, or the runs are
        spent.
        """
        for number in range(2 * num_controls):
            confirm, shared_first = bool(number % 2), bool(number // 2 % 2)
            await self._in_parts(self.trials.choose(num_controls, confirm=confirm, shared_first=shared_first))
        if self.stops_early:
            for one in self.trials.apart(MOST_ALONE):
                await self._try([one])
                if one.num_failures:
                    await self._try([one])

    async def _in_parts(self, trials: Sequence[Trial]) -> None:
        """Tries these, as many at once as may fail in one run, unless the runs are spent."""
        while trials and not self.stops_early and self.runs.may_try:
            num_tests = itertools.accumulate(len(trial.names) for trial in trials)
            num_now = max(1, sum(num <= self.most_at_once for num in num_tests))
            await self._try(trials[:num_now])
            trials = trials[num_now:]

    async def _try(self, trials: Sequence[Trial]) -> None:
        """Runs the tests with these contradictions. If that says nothing of some, tries them in halves."""
        num_tests = sum(len(trial.names) for trial in trials)
        run = await self.runs.try_out([trial.contradiction for trial in trials])
        if run is None:
            self.most_at_once = max(1, num_tests // 2)
            await self._halve(trials)
            return
        self.most_at_once = max(num_tests, self.runs.most_failing(run, num_tests))
        silent = [trial for trial in trials if not trial.enter(run.outcomes)]
        if silent and len(silent) < len(trials) and run.outcomes.stopped_early:
            self.stops_early = True
        elif silent:
            await self._halve(silent)

    async def _halve(self, trials: Sequence[Trial]) -> None:
        if len(trials) == 1:
            trials[0].dropped = True
            return
        middle = len(trials) // 2
        for half in (trials[:middle], trials[middle:]):
            await self._in_parts(half)


def _without(contradictions: Iterable[Contradiction], names: set[str]) -> Iterable[Contradiction]:
    for one in contradictions:
        fails = tuple(name for name in one.fails if name not in names)
        if fails:
            yield replace(one, fails=fails)
