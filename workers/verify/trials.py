"""Contradictions being tried on the known fix, and which of them to try next."""

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pipeline.calibration import Contradiction
from workers.grading.controls.drawing import ChangedText
from workers.grading.controls.outcomes import Outcomes

FAILURES_WANTED = 2  # runs in which a contradiction's tests must have failed


@dataclass(slots=True)
class Trial:
    """One contradiction, the tests that may fail under it, and what was seen of them."""

    contradiction: Contradiction
    names: frozenset[str]
    failing: frozenset[str] = frozenset()  # tests that failed under it whenever it was tried
    num_failures: int = 0
    dropped: bool = False

    def enter(self, outcomes: Outcomes) -> bool:
        """Records what a run with this contradiction showed. False if its tests did not run."""
        if not any(name in outcomes.by_name for name in self.names):
            return False
        failed = frozenset(name for name in self.names if outcomes.failed(name))
        self.failing = failed & self.failing if self.num_failures else failed
        self.num_failures += 1
        self.dropped = not self.failing
        return True

    @property
    def is_kept(self) -> bool:
        return not self.dropped and self.num_failures >= FAILURES_WANTED

    @property
    def is_promising(self) -> bool:
        """Whether one more run may be enough to keep it."""
        return not self.dropped and 0 < self.num_failures < FAILURES_WANTED

    @property
    def is_new(self) -> bool:
        return not self.dropped and not self.num_failures


@dataclass(slots=True)
class Trials:
    """All contradictions of one task."""

    trials: list[Trial]
    chance: random.Random
    _by_name: dict[str, list[Trial]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.chance.shuffle(self.trials)
        # One test's own come before those that many tests share.
        self.trials.sort(key=lambda trial: len(trial.names))
        for trial in self.trials:
            for name in trial.names:
                self._by_name[name].append(trial)

    def choose(self, num_wanted: int, *, confirm: bool, shared_first: bool) -> list[Trial]:
        """Trials for one run, of which no two concern one test: promising ones first if `confirm`, else new ones.

        Tests that have only contradictions in common with others come first or last.
        """
        chosen: list[Trial] = []
        taken: set[str] = set()
        changed = ChangedText()
        names = list(self._by_name)
        self.chance.shuffle(names)
        for name in sorted(names, key=self._num_sharing, reverse=shared_first):
            if name in taken:
                continue
            found = next(self._next(self._by_name[name], num_wanted, taken, changed, confirm=confirm), None)
            if found:
                chosen.append(found)
                changed.add(found.contradiction)
                taken |= found.names
        return chosen

    def _num_sharing(self, name: str) -> int:
        """How many tests share the contradiction of this test that the fewest share."""
        return min((len(trial.names) for trial in self._by_name[name] if not trial.dropped), default=0)

    def _next(
        self,
        trials: Sequence[Trial],
        num_wanted: int,
        taken: set[str],
        changed: ChangedText,
        *,
        confirm: bool,
    ) -> Iterator[Trial]:
        held = [trial for trial in trials if trial.is_kept or trial.is_promising]
        promising = [trial for trial in trials if trial.is_promising]
        new = [trial for trial in trials if trial.is_new] if len(held) < num_wanted else []
        for trial in (*promising, *new) if confirm else (*new, *promising):
            if taken.isdisjoint(trial.names) and not changed.overlaps(trial.contradiction):
                yield trial

    def apart(self, most: int) -> list[Trial]:
        """One trial for each of at most so many tests, to be run alone."""
        found: dict[str, Trial] = {}
        for name, trials in self._by_name.items():
            usable = [trial for trial in trials if not trial.dropped]
            if usable and len(found) < most:
                found.setdefault(name, usable[0])
        return list({id(trial): trial for trial in found.values()}.values())

    def kept(self) -> list[Contradiction]:
        """What is worth keeping, with the tests that fail under it."""
        return [
            replace(trial.contradiction, fails=tuple(sorted(trial.failing)))
            for trial in self.trials
            if trial.is_kept
        ]
