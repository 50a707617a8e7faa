"""Which expectations a control run contradicts: one for each test, drawn by chance, so that no code can know which."""

from typing import Protocol

from pipeline.calibration import Calibration, Contradiction


class Shuffles(Protocol):
    """Puts a list into a random order."""

    def shuffle(self, x: list[Contradiction]) -> None: ...


def draw(calibration: Calibration, chance: Shuffles) -> list[Contradiction]:
    """Contradictions that together make every test fail that has one. A single one if the script ends at the first failure."""
    shuffled = list(calibration.contradictions)
    chance.shuffle(shuffled)
    if calibration.stops_early:
        return shuffled[:1]
    drawn: list[Contradiction] = []
    covered: set[str] = set()
    for contradiction in shuffled:
        if not covered.issuperset(contradiction.fails) and not overlaps(contradiction, drawn):
            drawn.append(contradiction)
            covered.update(contradiction.fails)
    return drawn


def overlaps(contradiction: Contradiction, others: list[Contradiction]) -> bool:
    """Whether it changes text that one of `others` changes too."""
    return any(
        contradiction.path == other.path
        and contradiction.offset_bytes < _end(other)
        and other.offset_bytes < _end(contradiction)
        for other in others
    )


def _end(contradiction: Contradiction) -> int:
    return contradiction.offset_bytes + len(contradiction.was.encode())
