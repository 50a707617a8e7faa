"""The results of each source of tasks: what it has finished, what of that was trained, and how often the policy succeeds."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from pipeline.intervals import Estimate, mean
from pipeline.journal.rows import EpisodeRow


class SourceResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one source. A rollout is finished when it has a fate other than withdrawn, and a group with its first one."""

    share: float | None  # share of the groups that the recipe asks for; None: not known
    num_groups: int
    num_trained_groups: int  # groups of which a rollout was trained
    num_rollouts: int
    num_trained_rollouts: int
    success: Estimate | None  # mean reward, with groups as draws; None: no rollout has a reward


@dataclass(slots=True)
class _Counts:
    rewards: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by group
    trained: set[str] = field(default_factory=set[str])  # groups
    num_rollouts: int = 0
    num_trained: int = 0


class SourceTally:
    """The counts of the sources, from the rows of training episodes."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def add(self, row: EpisodeRow) -> None:
        """Counts an episode, if it belongs to a source and was finished."""
        if not row.source or row.fate == "withdrawn":
            return
        counts = self._counts.setdefault(row.source, _Counts())
        counts.rewards[row.group_id] += [] if row.reward is None else [row.reward]
        counts.num_rollouts += 1
        if row.fate == "trained":
            counts.num_trained += 1
            counts.trained.add(row.group_id)

    def results(self, shares: Mapping[str, float]) -> dict[str, SourceResult]:
        """The result of each source, by its name. `shares` are those of the recipe; empty: not known."""
        return {
            name: SourceResult(
                share=shares[name] / sum(shares.values()) if name in shares else None,
                num_groups=len(counts.rewards),
                num_trained_groups=len(counts.trained),
                num_rollouts=counts.num_rollouts,
                num_trained_rollouts=counts.num_trained,
                success=mean(counts.rewards.values()),
            )
            for name, counts in sorted(self._counts.items())
        }

    @property
    def sentence(self) -> str:
        """All sources on one line; empty if there are none."""
        found = (
            f"{name} {one.num_groups:,} groups, {one.num_trained_rollouts:,} of {one.num_rollouts:,} rollouts trained, solved "
            f"{one.success.percent() if one.success else '-'}"
            for name, one in self.results({}).items()
        )
        return "; ".join(found)


def tally_of(rows: Iterable[EpisodeRow]) -> SourceTally:
    tally = SourceTally()
    for row in rows:
        tally.add(row)
    return tally


COUNTS = ("num_groups", "num_trained_groups", "num_rollouts", "num_trained_rollouts")


def source_lines(results: Mapping[str, SourceResult]) -> Iterator[str]:
    """A table of the sources: what the recipe asks for, what was finished and trained, each with its share of all sources, and success in
    percent. Nothing if there are none.
    """
    if not results:
        return
    columns = ("groups finished", "groups trained", "rollouts finished", "rollouts trained")
    yield f"{'source':<22}{'asked':>8}{''.join(f'{one:>19}' for one in columns)}{'success, %':>22}"
    totals = {name: sum(getattr(one, name) for one in results.values()) for name in COUNTS}
    for source, one in results.items():
        asked = "-" if one.share is None else f"{one.share:.1%}"
        cells = (f"{(n := getattr(one, name)):,} ({n / (totals[name] or 1):.1%})" for name in COUNTS)
        success = one.success.cell() if one.success else "-"
        yield f"  {source:<20}{asked:>8}{''.join(f'{cell:>19}' for cell in cells)}{success:>22}"
