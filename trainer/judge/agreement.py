"""Whether the votes on one turn agree with each other. A vote that abstains or failed says nothing."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Over the turns that have two valid votes or more."""

    num_turns: int = 0
    unanimous: float | None = None  # share of these turns
    pairs: float | None = None  # share of pairs of votes on one turn that are equal
    # Krippendorff's alpha for nominal values: 1 is perfect agreement, 0 what chance brings about. None: all votes are equal.
    alpha: float | None = None


def agreement(turns: Iterable[Sequence[float]]) -> Agreement:
    """`turns` are the valid votes on each turn."""
    counts = [Counter(votes) for votes in turns if len(votes) > 1]
    if not counts:
        return Agreement()
    num_pairs = sum(_pairs(found.total()) for found in counts)
    equal_pairs = sum(_pairs(times) for found in counts for times in found.values())
    return Agreement(
        num_turns=len(counts),
        unanimous=sum(len(found) == 1 for found in counts) / len(counts),
        pairs=equal_pairs / num_pairs,
        alpha=_alpha(counts),
    )


def _alpha(counts: Sequence[Counter[float]]) -> float | None:
    """1 - observed disagreement / disagreement by chance. Each turn counts with its number of votes (Krippendorff, 2011)."""
    totals = sum(counts, Counter[float]())
    num_votes = totals.total()
    by_chance = num_votes**2 - sum(times**2 for times in totals.values())
    if not by_chance:
        return None
    observed = sum(
        (found.total() ** 2 - sum(times**2 for times in found.values())) / (found.total() - 1)
        for found in counts
    )
    return 1 - (num_votes - 1) * observed / by_chance


def _pairs(number: int) -> int:
    return number * (number - 1) // 2
