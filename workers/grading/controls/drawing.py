"""Which expectations a control run contradicts: one for each test, drawn by chance, so that no code can know which."""

import bisect
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.calibration import Calibration, Contradiction


class Shuffles(Protocol):
    """Puts a list into a random order."""

    def shuffle(self, x: list[Contradiction]) -> None: ...


@dataclass(slots=True)
class ChangedText:
    """The places that contradictions change, by file."""

    _places: dict[str, list[tuple[int, int]]] = field(
        default_factory=lambda: defaultdict[str, list[tuple[int, int]]](list)
    )

    def overlaps(self, contradiction: Contradiction) -> bool:
        """Whether it changes text that one of those added changes too."""
        places, (start, end) = self._places[contradiction.path], _place(contradiction)
        next_one = bisect.bisect_left(places, (start, end))
        before, after = places[max(0, next_one - 1) : next_one], places[next_one : next_one + 1]
        return any(other_start < end and start < other_end for other_start, other_end in (*before, *after))

    def add(self, contradiction: Contradiction) -> None:
        """To be called for one that overlaps with none."""
        bisect.insort(self._places[contradiction.path], _place(contradiction))


def draw(calibration: Calibration, chance: Shuffles) -> list[Contradiction]:
    """Contradictions that together make every test fail that has one.

    A single one if the script ends at the first failure. Where so many failures take too long, as many tests as are allowed:
    those that need the fix first.
    """
    shuffled = list(calibration.contradictions)
    chance.shuffle(shuffled)
    if calibration.stops_early:
        return shuffled[:1]
    if calibration.most_controlled:
        needing = frozenset(calibration.needing_fix)
        shuffled.sort(key=lambda one: needing.isdisjoint(one.fails))
    drawn: list[Contradiction] = []
    covered: set[str] = set()
    changed = ChangedText()
    for contradiction in shuffled:
        if calibration.most_controlled and len(covered) >= calibration.most_controlled:
            break
        if not covered.issuperset(contradiction.fails) and not changed.overlaps(contradiction):
            drawn.append(contradiction)
            changed.add(contradiction)
            covered.update(contradiction.fails)
    return drawn


def _place(contradiction: Contradiction) -> tuple[int, int]:
    return contradiction.offset_bytes, contradiction.offset_bytes + len(contradiction.was.encode())
