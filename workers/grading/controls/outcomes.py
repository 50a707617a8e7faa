"""The outcome of each test in a run, and what two runs say of a pass together.

Names are the runner's own where the witness reported; else those that the verdict's parser reads in the log.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.calibration import Calibration
from workers.grading import witness
from workers.grading.witness import BAD, WitnessedRun

PASSED = "PASSED"
NAMED_AT_MOST = 3


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of the tests of one run."""

    by_name: Mapping[str, str] = field(default_factory=dict[str, str])
    witnessed: bool = False
    stopped_early: bool = False  # the runner ended before all collected tests had run
    finished: bool = False  # the eval script came to its end
    # Parts of the runner that became something else, and ways of failing in which a test did not fail.
    replaced: frozenset[str] = frozenset()

    def passed(self, name: str) -> bool:
        """Whether the test ran and passed."""
        return self.by_name.get(name) == PASSED

    def failed(self, name: str) -> bool:
        """Whether the test ran and failed."""
        return self.by_name.get(name) in BAD


NOTHING_RAN = Outcomes()


def outcomes(runs: tuple[WitnessedRun, ...], parsed: Mapping[str, str]) -> Outcomes:
    """`parsed`: outcomes as the verdict's parser reads them, "" for a test that the log does not mention."""
    sessions = witness.sessions(runs)
    return Outcomes(
        by_name=witness.outcomes(runs) if sessions else {name: said for name, said in parsed.items() if said},
        witnessed=bool(sessions),
        stopped_early=any(end.finished < end.collected for end in sessions),
        finished=True,
        replaced=witness.replaced(runs),
    )


def shortfall(found: Outcomes, calibration: Calibration) -> str | None:
    """What a pass lacks of what the known fix has; None if nothing."""
    if calibration.witnessed and not found.witnessed:
        return "no test run was witnessed, as those of the known fix were"
    changed = sorted(found.replaced.difference(calibration.replaced)) if calibration.witnessed else []
    if changed:
        return f"the test runner was changed otherwise than with the known fix: {_few(changed)}"
    missing = [name for name in calibration.passing if not found.passed(name)]
    if not missing:
        return None
    return f"{_few(missing)} did not pass, as with the known fix"


def survivors(controlled: Iterable[str], control: Outcomes, calibration: Calibration) -> list[str]:
    """The controlled tests that did not fail in the control run, in order.

    A test that did not run is one of them, unless the eval script ends at the first failure: then another one must have
    failed.
    """
    names = sorted(controlled)
    if not calibration.stops_early:
        return [name for name in names if not control.failed(name)]
    if any(control.failed(name) for name in names):
        return [name for name in names if name in control.by_name and not control.failed(name)]
    return names


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return f"{', '.join(names[:NAMED_AT_MOST])}{more}"
