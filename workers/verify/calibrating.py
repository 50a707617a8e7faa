"""Measures a task's tests with the known fix: which tests pass in every run, which of them need the fix, and under which contradictions
each fails.

Each run tries many contradictions, each of different tests. A contradiction is kept only if its tests failed under it in two runs, together
with different other contradictions. Then as many as the runs allow are tried alone, as in a grader's control, beginning with those of tests
that need the fix. The cost is measured too: a contradiction under which the tests take much longer is dropped.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipeline.request import Claim
from pipeline.task import Calibration, Contradiction
from workers.grading.controls.drawing import NOTHING_RAN, Outcomes, strays, survivors, together
from workers.grading.controls.spans import Span
from workers.grading.defence import witness
from workers.verify.fixed import OpensSandboxes, find_tests, fixed, record
from workers.verify.observing import met
from workers.verify.proposing import Proposer, met_by_log
from workers.verify.reads import with_reads
from workers.verify.trials import ControlRuns, RunsTests, Trial, Trials, claim_with, for_trials

MOST_TOGETHER = 3  # runs that find of which contradictions a control may make two
MOST_ALONE = 8  # number of tests whose contradictions are tried if the script stops at the first failure

USELESS = b"""diff --git a/swerve-note.txt b/swerve-note.txt
new file mode 100644
--- /dev/null
+++ b/swerve-note.txt
@@ -0,0 +1 @@
+This file changes nothing.
"""


@dataclass(frozen=True, slots=True)
class Calibrator:
    """Calibrates tasks. `num_controls` is the wanted number of contradictions for each test."""

    grader: RunsTests
    sandboxes: OpensSandboxes
    num_controls: int
    no_fix: bytes = USELESS  # a patch that changes nothing
    chance: random.Random = field(default_factory=random.Random)

    async def calibrate(self, claim: Claim, fix: bytes) -> Calibration:
        """The calibration with the known fix. It is empty if the fix does not pass. Raises RolloutError."""
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
            user=first.user,
        )
        if not passing:
            return calibration
        task, recorded = claim.request.task, await record(self.sandboxes, claim, fix, calibration)
        async with fixed(self.sandboxes, claim, fix) as sandbox:
            found = await find_tests(sandbox, task, passing, fix_paths)
            calibration, found = await with_reads(sandbox, task, calibration, recorded, found)
        if not self.num_controls:
            return calibration
        runs = ControlRuns(self.grader, claim_with(claim, calibration), fix, first)
        base = await self.grader.run_tests(runs.claim, self.no_fix, (), runs.limits)
        needing = tuple(name for name in passing if not base.outcomes.passed(name))
        calibration = replace(calibration, needing_fix=needing)

        async def find_met(texts: Mapping[str, bytes], workdir: str) -> Mapping[str, Sequence[Span]]:
            runs.claim = claim_with(claim, replace(calibration, test_files=tuple(sorted(texts))))
            return await met(self.grader, for_trials(runs.claim), self.no_fix, texts, workdir, runs.limits)

        proposer = Proposer(self.sandboxes, self.grader, self.chance)
        proposed = await proposer.propose(claim, fix, found, find_met)
        calibration = replace(calibration, test_files=tuple(sorted(proposed.texts)))
        met_by_base = {**proposed.met, **await met_by_log(proposed, base.log)}
        # A run of the base that ends at the first failure does not show which of the other tests need the fix.
        met_tests = proposed.met_tests(met_by_base)
        needing = tuple(name for name in needing if name in base.outcomes.by_name or name not in met_tests)
        calibration = replace(calibration, needing_fix=needing)
        trials = Trials(proposed.telling(met_by_base, needing), self.chance)
        await runs.shorten_trials(passing)
        measured = _Measured(trials, runs)
        await measured.try_all(self.num_controls, needing)
        calibration = replace(
            calibration, stops_early=measured.stops_early, contradictions=tuple(trials.kept())
        )
        return _with_uncontrolled(await self._checked(calibration, runs))

    async def _checked(self, calibration: Calibration, runs: ControlRuns) -> Calibration:
        """Tries contradictions alone, then some of them together, as many as the runs allow.

        Returns the calibration with the results, and with the cost of a run with one alone. One that was not tried alone may have failed
        its tests only because of others.
        """
        alone: dict[int, Outcomes | None] = {}
        num_reserved = 0 if calibration.witnessed else MOST_TOGETHER
        for one in _in_turn(calibration, self.chance):
            if runs.num_left <= num_reserved:
                break
            run = await runs.as_graded([one])
            alone[id(one)] = run.outcomes if run else None
        calibration, tried = _with_alone(calibration, alone)
        calibration = await with_pairs(calibration, tried, runs)
        return replace(calibration, control_cpu_s=runs.cpu_s, control_wall_s=runs.wall_s)


def _with_alone(
    calibration: Calibration, alone: Mapping[int, Outcomes | None]
) -> tuple[Calibration, list[Contradiction]]:
    """The calibration with the results of runs with one contradiction, by its id, and the contradictions that may be tried together: those
    that were tried alone and kept no test from running.

    If at least half of the tests that failed kept others from running, the script ends at the first failure. Otherwise these failures end
    a process, and such a contradiction is dropped if its tests have others that end none: a wrong patch, too, can end the process. Those
    that were not tried alone may end it, too.
    """
    failed, kept_others = set[str](), set[str]()
    ending: list[int] = []
    for one in calibration.contradictions:
        found = alone.get(id(one)) or NOTHING_RAN
        failing = {name for name in one.fails if found.failed(one.renamed.get(name, name))}
        failed |= failing
        if failing and _stopped_early(found, one, calibration):
            kept_others |= failing
            ending.append(id(one))
    stops_early = calibration.stops_early or (bool(ending) and 2 * len(kept_others) >= len(failed))
    calibration = replace(calibration, stops_early=stops_early)
    checked: dict[int, Contradiction] = {}
    for one in calibration.contradictions:
        may_end = bool(ending) and not stops_early and (id(one) not in alone or id(one) in ending)
        marked: Contradiction | None = replace(one, may_end=may_end)
        if id(one) in alone:
            marked = _checked_by(alone[id(one)], marked, calibration)
        if marked:
            checked[id(one)] = marked
    tried = [one for number, one in checked.items() if number in alone and number not in ending]
    with_others = {name for one in tried for name in one.fails}
    for number in () if stops_early else ending:
        if number in checked and with_others.issuperset(checked[number].fails):
            del checked[number]
        elif number in checked:
            with_others.update(checked[number].fails)
    return replace(calibration, contradictions=tuple(checked.values())), tried


async def with_pairs(
    calibration: Calibration, candidates: Sequence[Contradiction], runs: ControlRuns
) -> Calibration:
    """The calibration in which those of these contradictions are marked of which a control may make two, where no witness says which tests
    failed.

    Each is tried in a run with one of every other test. Every test must run: so none of them keeps another test from running.
    """
    if calibration.witnessed or calibration.stops_early:
        return calibration
    found: set[int] = set()
    untried = list(candidates)
    for number in range(MOST_TOGETHER):
        chosen = together(untried)
        untried = [one for one in untried if one not in chosen]
        if len(chosen) < 2 or runs.num_left <= 0 or (number and runs.cpu_left_s <= 0):
            break
        run = await runs.try_out(chosen)
        outcomes = run.outcomes if run else NOTHING_RAN
        if not _missing(outcomes, chosen, calibration) and not strays(chosen, outcomes, calibration):
            found |= {id(one) for one in chosen if not survivors([one], outcomes, calibration)}
    marked = (replace(one, may_be_paired=id(one) in found) for one in calibration.contradictions)
    return replace(calibration, contradictions=tuple(marked))


def _missing(found: Outcomes, made: Sequence[Contradiction], calibration: Calibration) -> list[str]:
    """The tests that should have passed or failed in a run with these contradictions, and did not run."""
    renamed = {was: name for one in made for was, name in one.renamed.items()}
    return [name for name in calibration.passing if renamed.get(name, name) not in found.by_name]


def _stopped_early(found: Outcomes, one: Contradiction, calibration: Calibration) -> bool:
    """Whether the run of a contradiction ended before all tests had run: without the witness, if the log does not name all."""
    return found.stopped_early or (not found.witnessed and bool(_missing(found, [one], calibration)))


def _in_turn(calibration: Calibration, chance: random.Random) -> list[Contradiction]:
    """Returns all contradictions in the order of use: one of each test that needs the fix, a second one, ...; then those of other tests."""
    shuffled = list(calibration.contradictions)
    chance.shuffle(shuffled)
    needing, seen = {*calibration.needing_fix}, Counter[str]()
    ranks: dict[int, tuple[bool, int]] = {}
    for one in shuffled:
        concerned = needing.intersection(one.fails)
        ranks[id(one)] = (not concerned, min((seen[name] for name in concerned or one.fails), default=0))
        seen.update(one.fails)
    return sorted(shuffled, key=lambda one: ranks[id(one)])


def _checked_by(found: Outcomes | None, one: Contradiction, calibration: Calibration) -> Contradiction | None:
    """Returns the contradiction with the tests that failed in a run with it alone; None if no test failed, or the run took too long."""
    if found is None:
        return None
    passed = survivors([one], found, calibration)
    fails = tuple(name for name in one.fails if name not in passed)
    if not fails:
        return None
    strayed = strays([one], found, calibration)
    return replace(one, fails=fails, may_fail=tuple(dict.fromkeys((*one.may_fail, *passed, *strayed))))


def _with_uncontrolled(calibration: Calibration) -> Calibration:
    controlled = {name for one in calibration.contradictions for name in one.fails}
    controlled -= {*calibration.in_fix, *calibration.from_package}
    uncontrolled = tuple(name for name in calibration.needing_fix if name not in controlled)
    return replace(calibration, uncontrolled=uncontrolled)


def _passing(runs: Sequence[Outcomes]) -> tuple[list[str], list[str]]:
    """Names of the tests that passed in all runs, and of those that passed in some."""
    names = sorted({name for run in runs for name in run.by_name})
    always = [name for name in names if all(run.passed(name) for run in runs)]
    some = [name for name in names if any(run.passed(name) for run in runs)]
    return always, sorted({*some} - {*always})


@dataclass(slots=True)
class _Measured:
    """Tries the contradictions of one task (edits that make its tests fail) in runs of the known fix."""

    trials: Trials
    runs: ControlRuns
    stops_early: bool = False
    most_at_once: float = math.inf  # number of tests that may fail in one run, as far as is known

    async def try_all(self, num_controls: int, needing: Collection[str]) -> None:
        """Tries contradictions until each test has `num_controls` under which it failed twice, none are left, or the runs are used up.
        Tests that need the fix come first, because a contradiction that keeps a file from being loaded costs many runs.
        """
        for confirm in (False, True):
            await self._in_parts(
                self.trials.choose(num_controls, confirm=confirm, shared_first=False, among=needing)
            )
        for number in range(3 * num_controls + 3):
            confirm, shared_first = bool(number % 2), bool(number // 2 % 2)
            await self._in_parts(self.trials.choose(num_controls, confirm=confirm, shared_first=shared_first))
        if self.stops_early:
            for one in self.trials.apart(MOST_ALONE, needing):
                await self._try([one])
                if one.num_failures:
                    await self._try([one])

    async def _in_parts(self, trials: Sequence[Trial]) -> None:
        """Tries these until the runs are used up; each run tries as many as may fail in one run."""
        while trials and not self.stops_early and self.runs.may_try:
            num_tests = itertools.accumulate(len(trial.names) for trial in trials)
            num_now = max(1, sum(num <= self.most_at_once for num in num_tests))
            await self._try(trials[:num_now])
            trials = trials[num_now:]

    async def _try(self, trials: Sequence[Trial]) -> None:
        """Runs the tests with these contradictions. If the run decides nothing for some of them, tries those again in halves."""
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
