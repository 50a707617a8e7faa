"""Contradictions of one change, and the draw of control runs, for tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeline.task import Contradiction, TextChange

T = TypeVar("T")


def changing(path: str, offset_bytes: int, was: str, becomes: str, *fails: str) -> Contradiction:
    """At `offset_bytes` of the file, `was` becomes `becomes`; these tests fail under it."""
    change = TextChange(offset_bytes=offset_bytes, was=was, becomes=becomes)
    return Contradiction(path=path, changes=(change,), fails=fails or ("t",))


@dataclass(frozen=True, slots=True)
class FirstOf:
    """Draws the first of everything; `num_before` control runs come before the true run."""

    num_before: int

    def random(self) -> float:
        return 0.9

    def randrange(self, stop: int, /) -> int:
        return min(self.num_before, stop - 1)

    def choice(self, seq: Sequence[T]) -> T:
        return seq[0]
