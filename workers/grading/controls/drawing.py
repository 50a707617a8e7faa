"""The choice of the expectations that a control run contradicts, and the joint result of two runs for a pass.

An expectation belongs to one test and is drawn by chance, so that no code can know which it is. Everything else is true in a control run.
So the other tests reveal nothing about which run this is, and must pass in it.

The tests of a run have the runner's own names if the witness reported, otherwise the names that the verdict's parser reads in the log.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pipeline.task import Calibration, Contradiction
from workers.grading.defence import witness
from workers.grading.defence.witness import BAD, WitnessedRun

PASSED = "PASSED"
NAMED_AT_MOST = 3
MOST_UNSTEADY = 3  # tests of one run that may have failed by chance


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of the tests of one run."""

    by_name: Mapping[str, str] = field(default_factory=dict[str, str])
    witnessed: bool = False
    stopped_early: bool = False  # the runner ended before all collected tests had run
    finished: bool = False  # the eval script came to its end
    # Parts of the runner that were replaced, and kinds of failure that made no test fail.
    replaced: frozenset[str] = frozenset()

    def passed(self, name: str) -> bool:
        """Whether the test ran and passed."""
        return self.by_name.get(name) == PASSED

    def failed(self, name: str) -> bool:
        """Whether the test ran and failed."""
        return self.by_name.get(name) in BAD


NOTHING_RAN = Outcomes()


def outcomes(runs: tuple[WitnessedRun, ...], parsed: Mapping[str, str]) -> Outcomes:
    """Returns the outcomes that the witness reported, or else `parsed`, those that the verdict's parser read from the log.

    In `parsed`, "" means that the log does not mention the test.
    """
    sessions = witness.sessions(runs)
    return Outcomes(
        by_name=witness.outcomes(runs) if sessions else {name: said for name, said in parsed.items() if said},
        witnessed=bool(sessions),
        stopped_early=any(end.finished < end.collected for end in sessions),
        finished=True,
        replaced=witness.replaced(runs),
    )


def shortfall(found: Outcomes, calibration: Calibration) -> str | None:
    """The things that the runs of a patch that passed lack compared with those of the known fix; None if they lack nothing."""
    if calibration.witnessed and not found.witnessed:
        return "no test run was witnessed, as those of the known fix were"
    changed = sorted(found.replaced.difference(calibration.replaced)) if calibration.witnessed else []
    if changed:
        return f"the test runner was changed otherwise than with the known fix: {few(changed)}"
    missing = [name for name in calibration.passing if not found.passed(name)]
    if not missing:
        return None
    return f"{few(missing)} did not pass, as with the known fix"


def unsteady(found: Outcomes, calibration: Calibration) -> list[str]:
    """The tests that did not pass and may pass with the same code in another run: a few that do not need the fix, if all that need it
    passed; otherwise none.
    """
    missing = [name for name in calibration.passing if not found.passed(name)]
    is_fixed = bool(calibration.needing_fix) and not {*calibration.needing_fix}.intersection(missing)
    return missing if is_fixed and len(missing) <= MOST_UNSTEADY else []


def survivors(drawn: Sequence[Contradiction], control: Outcomes, calibration: Calibration) -> list[str]:
    """The contradicted tests that did not fail in the control run, in order.

    A test that did not run is one of them, unless the eval script ends at the first failure: then another of them must have
    failed.
    """
    names = {name: one.renamed.get(name, name) for one in drawn for name in one.fails}
    stopped = calibration.stops_early and any(control.failed(name) for name in names.values())
    return [
        name
        for name, under_it in names.items()
        if not control.failed(under_it) and not (stopped and under_it not in control.by_name)
    ]


def strays(drawn: Sequence[Contradiction], control: Outcomes, calibration: Calibration) -> list[str]:
    """The tests that need the fix and did not pass in the control run, though nothing that they expect was contradicted.

    Where the run may end before all tests have run, those that did not run are none of them.
    """
    may_end = calibration.stops_early or any(one.may_end for one in drawn)
    touched = {name for one in drawn for name in (*one.fails, *one.may_fail)}
    renamed = {was: name for one in drawn for was, name in one.renamed.items()}
    return [
        name
        for name in calibration.needing_fix
        if name not in touched
        and not control.passed(renamed.get(name, name))
        and not (may_end and name not in control.by_name)
    ]


def few(names: Sequence[str]) -> str:
    """The first of these names, and the number of the others."""
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(names[:NAMED_AT_MOST])}{more}"


T = TypeVar("T")

# Share of gradings with one additional control, of a test that passes without the fix, too: a patch could mend the bug and hide what it
# breaks. It is additional because it proves nothing about the tests that need the fix.
OTHERS_SHARE = 0.1


class Chance(Protocol):
    """The source of random choices, such as `random.Random`."""

    def random(self) -> float: ...

    def randrange(self, stop: int, /) -> int: ...

    def choice(self, seq: Sequence[T]) -> T: ...


@dataclass(slots=True)
class ChangedText:
    """The spans that contradictions change, by file."""

    _places: dict[str, list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict[str, list[tuple[int, int]]](list)
    )

    def overlaps(self, contradiction: Contradiction) -> bool:
        """Whether it changes text that one of those added changes too."""
        places = self._places[contradiction.path]
        return any(_is_taken(place, places) for place in _places(contradiction))

    def add(self, contradiction: Contradiction) -> None:
        """Adds a contradiction that overlaps with none."""
        for place in _places(contradiction):
            bisect.insort(self._places[contradiction.path], place)


def draw(calibration: Calibration, chance: Chance, *, needing_fix: bool = True) -> tuple[Contradiction, ...]:
    """The contradictions of a control run. The first is of a test that needs the fix, or of one that does not, each such test with the same
    probability. Where no witness says which tests failed there is a second one, of any other test, if verification found such a pair: code
    that prints invented outcomes has to guess both.

    For a test that needs the fix, a contradiction is drawn under which only such tests fail, if there is one: code that fixes nothing also
    returns a value that tests expect without the fix, so such a value proves nothing. The calibration must have contradictions; if it has
    none of the wanted tests, one of the others is drawn.
    """
    of_test = _of_test(calibration.contradictions)
    needing = {*calibration.needing_fix}
    wanted = [name for name in of_test if (name in needing) == needing_fix]
    found = of_test[chance.choice(wanted or list(of_test))]
    telling = [one for one in found if needing.issuperset(one.fails)] if needing_fix else []
    first = chance.choice(telling or found)
    if calibration.witnessed or calibration.stops_early or not first.may_be_paired:
        return (first,)
    others = [one for one in calibration.contradictions if one.may_be_paired]
    of_other_test = _of_test(one for one in others if len(together([first, one])) > 1)
    if not of_other_test:
        return (first,)
    return first, chance.choice(of_other_test[chance.choice(list(of_other_test))])


def together(contradictions: Iterable[Contradiction]) -> list[Contradiction]:
    """Those of the contradictions that one run can make: of different tests, in different text. Earlier ones come first."""
    taken, changed, chosen = set[str](), ChangedText(), list[Contradiction]()
    for one in contradictions:
        touched = {*one.fails, *one.may_fail, *one.renamed, *one.renamed.values()}
        if taken.isdisjoint(touched) and not changed.overlaps(one):
            taken |= touched
            changed.add(one)
            chosen.append(one)
    return chosen


def _of_test(contradictions: Iterable[Contradiction]) -> dict[str, list[Contradiction]]:
    of_test: dict[str, list[Contradiction]] = defaultdict(list)
    for one in contradictions:
        for name in one.fails:
            of_test[name].append(one)
    return of_test


def has_others(calibration: Calibration) -> bool:
    """Whether there are contradictions of tests that need the fix and contradictions of tests that do not."""
    needing = {*calibration.needing_fix}
    kinds = {name in needing for one in calibration.contradictions for name in one.fails}
    return len(kinds) == 2


def _places(contradiction: Contradiction) -> list[tuple[int, int]]:
    return [(one.offset_bytes, one.end_bytes) for one in contradiction.changes]


def _is_taken(place: tuple[int, int], places: Sequence[tuple[int, int]]) -> bool:
    start, end = place
    next_one = bisect.bisect_left(places, place)
    before, after = places[max(0, next_one - 1) : next_one], places[next_one : next_one + 1]
    return any(other_start < end and start < other_end for other_start, other_end in (*before, *after))
