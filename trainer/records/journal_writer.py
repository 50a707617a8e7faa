"""The writer of a run's journal, and the rows of episodes: for trajectories that arrived, and for requests that were withdrawn before.

Rows are only appended. A row is on disk once `checkpoint` has returned its offset. A resumed run returns to its checkpoint: it cuts the
files at the offsets in it, and moves later rows to another file instead of deleting them.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

import msgspec

from pipeline.journal.reading import discarded
from pipeline.journal.rows import FILES, NO_STAMPS, EpisodeRow, EpisodeStamps, Fate, Row
from pipeline.request import Purpose, RolloutRequest
from pipeline.trajectory import TrajectoryHead
from trainer.learner import directories

_OF_HEADS = tuple(
    name for name in EpisodeRow.__struct_fields__ if name in set(TrajectoryHead.__struct_fields__)
)
"""Fields that a row copies from the head."""


def episode_row(
    head: TrajectoryHead,
    fate: Fate,
    *,
    cursor: int = -1,
    evaluation: str = "",
    stamps: EpisodeStamps = NO_STAMPS,
) -> EpisodeRow:
    """The row of a trajectory that arrived."""
    told = {name: getattr(head, name) for name in _OF_HEADS}
    return EpisodeRow(fate=fate, cursor=cursor, evaluation=evaluation, stamps=stamps, **told)


@dataclass(frozen=True, slots=True)
class OutstandingRequest:
    """The trainer's data about a request until its trajectory arrives: enough for its row, without task and prompts."""

    request_id: str
    group_id: str
    task_id: str
    purpose: Purpose
    member: int
    group_size: int
    cursor: int
    version: int
    enqueued_at: float  # Unix seconds

    @classmethod
    def of(cls, request: RolloutRequest) -> Self:
        return cls(
            request_id=request.id,
            group_id=request.group_id,
            task_id=request.task.id,
            purpose=request.purpose,
            member=request.member,
            group_size=request.group_size,
            cursor=request.cursor if request.purpose == "train" else -1,
            version=request.version_at_enqueue,
            enqueued_at=request.enqueued_at,
        )


def failed_head(run_id: str, request: OutstandingRequest) -> TrajectoryHead:
    """The head that is published for a request that no worker can carry out, because it cannot be read."""
    now = time.time()
    return TrajectoryHead(
        request_id=request.request_id,
        run_id=run_id,
        purpose=request.purpose,
        group_id=request.group_id,
        member=request.member,
        group_size=request.group_size,
        task_id=request.task_id,
        outcome="failed:request",
        reward=None,
        num_turns=0,
        sampled_tokens=0,
        body_bytes=0,
        version_at_enqueue=request.version,
        version_first=None,
        version_last=None,
        attempt=0,
        worker="",
        enqueued_at=request.enqueued_at,
        claimed_at=now,
        finished_at=now,
    )


def withdrawn_row(request: OutstandingRequest, *, evaluation: str = "") -> EpisodeRow:
    """The row of a request that was withdrawn."""
    return EpisodeRow(
        request_id=request.request_id,
        group_id=request.group_id,
        task_id=request.task_id,
        purpose=request.purpose,
        member=request.member,
        group_size=request.group_size,
        fate="withdrawn",
        cursor=request.cursor,
        evaluation=evaluation,
        version_at_enqueue=request.version,
        enqueued_at=request.enqueued_at,
    )


R = TypeVar("R", bound=Row)


class Journal:
    """The run's files, open for appending by one process. Every row is passed to the operating system at once, completely or not at all."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._files = {kind: _open(directory / name) for kind, name in FILES.items()}

    def append(self, row: R) -> R:
        """Write one row and return it as written: a missing `at` becomes now."""
        if not getattr(row, "at", 1.0):
            row = msgspec.structs.replace(row, at=time.time())
        file = self._files[type(row)]
        with directories.writing(self.directory / FILES[type(row)]):
            directories.write_whole(file, msgspec.json.encode(row) + b"\n", at=file.tell())
        return row

    def checkpoint(self) -> dict[str, int]:
        """Force all rows to disk; returns each file's length in bytes, to be kept in the checkpoint."""
        with directories.writing(self.directory):
            for file in self._files.values():
                os.fsync(file.fileno())
        return {FILES[kind]: file.tell() for kind, file in self._files.items()}

    def truncate_to(self, offsets: dict[str, int]) -> int:
        """Return to a checkpoint: move the rows after its offsets to `<file>.discarded`. Returns the number of bytes moved.

        Raises ValueError if a file is shorter than its offset: then the checkpoint belongs to another journal.
        """
        moved = 0
        for kind, file in self._files.items():
            path = self.directory / FILES[kind]
            kept, length = offsets.get(path.name, 0), path.stat().st_size
            if length < kept:
                raise ValueError(
                    f"{path} has {length} bytes, fewer than the {kept} in its checkpoint: restore the run's directory"
                )
            with path.open("rb") as source, discarded(path).open("ab") as aside:
                source.seek(kept)
                moved += aside.write(source.read())
                os.fsync(aside.fileno())
            file.truncate(kept)
            file.seek(kept)
        return moved

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(path: Path) -> BinaryIO:
    """Opens the file for appending after the last complete line: a line that a crash cut short was in no checkpoint."""
    path.touch()
    file = path.open("r+b", buffering=0)
    whole = file.read().rfind(b"\n") + 1
    file.truncate(whole)
    file.seek(whole)
    return file
