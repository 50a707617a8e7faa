"""Measures a task's tests with the known fix: which pass in every run, and under which contradictions each of them fails.

A contradiction is kept only if its tests failed under it twice, among different others. What it costs is measured too: one
under which the tests take much longer is dropped.
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

from pipeline.calibration import Calibration, Contradiction, pack
from pipeline.request import Claim, Limits
from workers.grading import witness
from workers.grading.container import GradingContainer, Starved
from workers.grading.controls.drawing import draw
from workers.grading.controls.locating import locate
from workers.grading.controls.outcomes import Outcomes, survivors
from workers.grading.controls.placing import NotAsCalibrated, read_tests
from workers.grading.controls.writing import Candidate, candidates
from workers.grading.grade import PatchRun, control_limits
from workers.grading.swebench_rules import Marks
from workers.isolation import calls as isolation
from workers.isolation.calls import LimitExceeded
from workers.sandbox.protocol import Sandbox
from workers.verify.trials import Trial, Trials

WRITING_CPU_S = 120  # to find the contradictions of one file
MOST_RUNS = 40  # of the tests, to try the contradictions of one task
MOST_ALONE = 8  # tests whose contradictions are tried where a script ends at the first failure
FINAL_DRAWS = 2  # draws as a grader makes them, after which a contradiction that did not fail is dropped

USELESS = b"""diff --git a/swerve-note.txt b/swerve-note.txt
new file mode 100644
--- /dev/null
+++ b/swerve-note.txt
@@ -0,0 +1 @@
+This file changes nothing.
"""


class RunsTests(Protocol):
    """Runs the hidden tests on a patch. Raises RolloutError."""

    async def run_tests(
        self,
        claim: Claim,
        patch: bytes,
        contradictions: Sequence[Contradiction] = (),
        limits: Limits | None = None,
    ) -> PatchRun: ...


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
        measured = _Measured(self.grader, claim_with(claim, calibration), fix, self.no_fix, first, trials)
        await measured.try_all(self.num_controls)
        return await measured.checked(calibration, self.chance)

    async def _trials(self, claim: Claim, fix: bytes, names: Sequence[str]) -> tuple[Trials, tuple[str, ...]]:
        """What may be contradicted for these tests, and the files of the repository that hold them."""
        task = claim.request.task
        async with self.sandboxes.open(claim, role="grade") as sandbox:
            fixed = Calibration(fix_paths=tuple(witness.touched_paths(fix)))
            container = GradingContainer(claim, sandbox, fix, Marks(), claim.request.limits, fixed)
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


def claim_with(claim: Claim, calibration: Calibration) -> Claim:
    """The claim of the same task, calibrated."""
    task = replace(claim.request.task, calibration=pack(calibration))
    return replace(claim, request=replace(claim.request, task=task))


def _passing(runs: Sequence[Outcomes]) -> tuple[list[str], list[str]]:
    """Names of the tests that passed in all runs, and of those that did in some."""
    names = sorted({name for run in runs for name in run.by_name})
    always = [name for name in names if all(run.passed(name) for run in runs)]
    some = [name for name in names if any(run.passed(name) for run in runs)]
    return always, sorted({*some} - {*always})


@dataclass(slots=True)
class _Measured:
    """The trials of one task's contradictions, and what they cost."""

    grader: RunsTests
    claim: Claim
    fix: bytes
    no_fix: bytes  # a patch that changes nothing
    plain: PatchRun  # a run without contradictions
    trials: Trials
    runs_left: int = MOST_RUNS
    stops_early: bool = False
    most_controlled: float = math.inf  # tests that may fail in one run, as far as is known
    cpu_s: float = 0.0
    wall_s: float = 0.0

    async def try_all(self, num_controls: int) -> None:
        """Tries contradictions until each test has `num_controls` that it failed under twice, or none are left."""
        for number in range(2 * num_controls):
            chosen = self.trials.choose(
                num_controls, confirm=bool(number % 2), shared_first=bool(number // 2 % 2)
            )
            while chosen and self.runs_left > 0 and not self.stops_early:
                part = self._allowed(chosen)
                chosen = chosen[len(part) :]
                await self._try(part)
        if self.stops_early:
            for one in self.trials.apart(MOST_ALONE):
                await self._try([one])
                if one.num_failures:
                    await self._try([one])

    async def checked(self, calibration: Calibration, chance: random.Random) -> Calibration:
        """The calibration with the contradictions that held, tried once more as a grader draws them."""
        calibration = replace(
            calibration, stops_early=self.stops_early, contradictions=tuple(self.trials.kept())
        )
        if math.isfinite(self.most_controlled):
            calibration = await self._with_most(calibration, int(self.most_controlled))
        for _ in range(FINAL_DRAWS):
            if not calibration.contradictions:
                break
            drawn = draw(calibration, chance)
            run = await self._run(drawn)
            controlled = {name for one in drawn for name in one.fails}
            wrong = {*survivors(controlled, run.outcomes, calibration)} if run else controlled
            calibration = replace(
                calibration, contradictions=tuple(_without(calibration.contradictions, wrong))
            )
        return replace(calibration, control_cpu_s=self.cpu_s, control_wall_s=self.wall_s)

    async def _with_most(self, calibration: Calibration, most_controlled: int) -> Calibration:
        """The calibration, with a limit on how many tests fail in one run and those that are to be among them."""
        base = await self.grader.run_tests(self.claim, self.no_fix)
        needing = tuple(name for name in calibration.passing if not base.outcomes.passed(name))
        return replace(calibration, most_controlled=most_controlled, needing_fix=needing)

    def _allowed(self, trials: Sequence[Trial]) -> Sequence[Trial]:
        """The first of them, as many as may fail in one run."""
        num_tests = itertools.accumulate(len(trial.names) for trial in trials)
        return trials[: max(1, sum(num <= self.most_controlled for num in num_tests))]

    async def _try(self, trials: Sequence[Trial]) -> None:
        """Runs the tests with these contradictions. If that says nothing of some, tries them in halves."""
        run = await self._run([trial.contradiction for trial in trials])
        if run is None:
            num_tests = sum(len(trial.names) for trial in trials)
            self.most_controlled = min(self.most_controlled, max(1, num_tests // 2))
            await self._halve(trials)
            return
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
            if self.runs_left <= 0:
                for trial in half:
                    trial.dropped = True
            else:
                await self._try(half)

    async def _run(self, contradictions: Sequence[Contradiction]) -> PatchRun | None:
        """None if they cannot be placed, or if the run came to no end within the time that a control may take."""
        self.runs_left -= 1
        limits = control_limits(self.claim.request.limits, Calibration(), self.plain)
        try:
            run = await self.grader.run_tests(self.claim, self.fix, contradictions, limits)
        except (Starved, NotAsCalibrated):
            return None
        if not run.outcomes.finished:
            return None
        self.cpu_s = max(self.cpu_s, run.reward.grade_cpu_s)
        self.wall_s = max(self.wall_s, run.wall_s)
        return run


def _without(contradictions: Iterable[Contradiction], names: set[str]) -> Iterable[Contradiction]:
    for one in contradictions:
        fails = tuple(name for name in one.fails if name not in names)
        if fails:
            yield replace(one, fails=fails)
