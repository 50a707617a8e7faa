"""The journal of a run as the pages read it, and rollouts as the pages know them without their bodies."""

import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

from pipeline.journal.reading import RowFile, discarded, size_of
from pipeline.journal.rows import (
    FILES,
    AlarmRow,
    DeliveryRow,
    EndRow,
    EpisodeFacts,
    EpisodeRow,
    EvaluationRow,
    Fate,
    FleetRow,
    PublicationRow,
    QuarantineRow,
    Row,
    SkippedBatchRow,
    StalenessRow,
    StartRow,
    StepRow,
)
from pipeline.trajectory import TrajectoryHead

JsonRow = dict[str, Any]


class RolloutRow(EpisodeFacts, frozen=False, kw_only=True, gc=False):  # pyright: ignore[reportGeneralTypeIssues]
    """The facts about a rollout from journal and store. Unlike other rows, it is completed as more becomes known.

    A row of the episodes is decoded into one, and the table shows the same object: there may be hundreds of thousands.
    """

    fate: Fate | Literal[""] = ""  # "": the journal does not have it yet, and `at` is 0
    lag: int | None = None  # lag in weight versions; None: it was not trained
    step: int | None = None  # the step that trained it
    is_dead: bool = False
    is_stored: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "finished_at", self.finished_at or self.at)
        for name in _REPEATED:
            setattr(self, name, sys.intern(getattr(self, name)))


_REPEATED = ("task_id", "group_id", "worker", "purpose", "outcome", "fate", "evaluation", "control", "patch")
"""Texts that many rows share."""

COLUMNS = RolloutRow.__struct_fields__
_OF_HEADS = tuple(name for name in COLUMNS if name in set(TrajectoryHead.__struct_fields__))


def row_of_head(head: TrajectoryHead) -> RolloutRow:
    """The row of a rollout that the journal does not have."""
    told: dict[str, Any] = {name: getattr(head, name) for name in _OF_HEADS}
    return RolloutRow(**told)


class RunJournal:
    """The journal of one run, as far as the pages show it. One thread at a time may use it."""

    def __init__(self, directory: Path) -> None:
        def path(kind: type[Row]) -> Path:
            return directory / FILES[kind]

        self.steps = RowFile(path(StepRow), StepRow)
        self.evaluations = RowFile(path(EvaluationRow), EvaluationRow)
        self.publications = RowFile(path(PublicationRow), PublicationRow)
        self.deliveries = RowFile(path(DeliveryRow), DeliveryRow)
        self.staleness = RowFile(path(StalenessRow), StalenessRow)
        self.quarantines = RowFile(path(QuarantineRow), QuarantineRow)
        self.skipped_batches = RowFile(path(SkippedBatchRow), SkippedBatchRow)
        self.endings = RowFile(path(EndRow), EndRow)
        self.alarms = RowFile(path(AlarmRow), AlarmRow)
        self.starts = RowFile(path(StartRow), StartRow)
        self.fleet = RowFile(path(FleetRow), FleetRow)
        self.episodes = RowFile(path(EpisodeRow), RolloutRow)
        # The episodes are by far the longest, so they come last.
        self._files: list[RowFile[Any]] = [one for one in vars(self).values() if one is not self.episodes]
        self._files.append(self.episodes)

    def read(self, max_bytes: int) -> int:
        """Reads the new part of all files, the episodes last, and stops after `max_bytes`. Returns the number of bytes read."""
        num_bytes = 0
        for file in self._files:
            num_bytes += file.read(max_bytes - num_bytes)
        return num_bytes

    @property
    def progress(self) -> tuple[int, int]:
        """The number of bytes read, and the total."""
        found = [file.progress for file in self._files]
        return sum(read for read, _ in found), sum(size for _, size in found)


def sizes(directory: Path) -> dict[str, tuple[int, int]]:
    """The size of each file of a journal and of its discarded part, by the file's stem: every appended or discarded row changes one of
    them.
    """
    paths = [directory / name for name in FILES.values()]
    return {path.stem: (size_of(path), size_of(discarded(path))) for path in paths}
