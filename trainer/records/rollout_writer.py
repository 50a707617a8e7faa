"""Writes rollouts into a store (`pipeline.rollout_store`), each request once, within a budget of bytes.

One process writes a store at a time, into segments of its own: a segment that another process left is closed with an index and never
written again. A record is one write of the operating system, so a process that is killed loses at most the record that it was writing;
`sync` forces all of them to disk, which must happen before their stream entries are acknowledged.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pipeline.judge import Judgement, JudgementHead
from pipeline.rollout_store import record, segment
from pipeline.rollout_store.record import (
    StoredHead,
    StoredRollout,
    TrainedHead,
    TrainedTokens,
    judgement_without_hidden,
    without_hidden,
)
from pipeline.rollout_store.segment import SegmentIndex, TrainedPlace
from pipeline.trajectory import Trajectory, TrajectoryHead, head_of
from trainer.learner import directories

MAX_BYTES = 64 * 1024**3  # size of a store, unless its user chooses another
SEGMENT_BYTES = 64 * 1024**2
# Least number of segments that fit into the budget. Only whole segments are removed, so few large ones would remove too much at once.
SEGMENTS_IN_BUDGET = 16


@dataclass(slots=True)
class _OpenSegment:
    """The segment that this process is writing."""

    number: int
    path: Path
    file: BinaryIO
    num_bytes: int = 0
    rows: dict[bytes, tuple[int, bool]] = field(default_factory=dict[bytes, tuple[int, bool]])
    judgements: dict[bytes, int] = field(default_factory=dict[bytes, int])
    trained: dict[bytes, int] = field(default_factory=dict[bytes, int])


class RolloutWriter:
    """The writer of one store, for any number of threads. Raises OSError if the store cannot be written."""

    def __init__(self, directory: Path, *, max_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Closes the segments that an earlier process left."""
        self._directory = directory
        self._max_bytes = max_bytes
        self._segment_bytes = min(segment_bytes, max(max_bytes // SEGMENTS_IN_BUDGET, 1))
        self._open: _OpenSegment | None = None
        self._lock = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)
        self._closed = {int(path.stem): _close(path) for path in segment.segments_in(directory)}
        self._closed_bytes = sum(self._size_of(number) for number in self._closed)

    def add_trajectory(self, trajectory: Trajectory) -> bool:
        """Write a trajectory that never was on a stream. See `add`."""
        return self.add(head_of(trajectory, 0), StoredRollout(trajectory=trajectory))

    def add(self, head: TrajectoryHead, rollout: StoredRollout) -> bool:
        """Write the rollout without hidden parts. Returns False if the store has it already.

        A request that was dead-lettered and requeued finishes twice: the later result replaces the earlier one.
        """
        body = record.pack_body(without_hidden(rollout))
        with self._lock:
            return self._add(head, body, is_dead=bool(rollout.failures))

    def _add(self, head: TrajectoryHead, body: bytes, *, is_dead: bool) -> bool:
        digest = segment.digest_of(head.request_id)
        before = self._find(digest)
        if before is not None and before.head.finished_at >= head.finished_at:
            return False
        stored = StoredHead(head=head, is_dead=is_dead, replaces=before is not None)
        target, offset = self._append(record.pack(stored, body))
        target.rows[digest] = offset, stored.replaces
        return True

    def _append(self, packed: bytes) -> tuple[_OpenSegment, int]:
        """Writes a record; returns its segment and offset."""
        self._make_room(len(packed))
        target = self._target(len(packed))
        offset = target.num_bytes
        directories.write_whole(target.file, packed, at=offset)
        target.num_bytes += len(packed)
        return target, offset

    def add_judgement(self, head: JudgementHead, judgement: Judgement) -> bool:
        """Writes the judgement of a rollout; False if the store has it already. A later one replaces an earlier one."""
        body = record.pack_body(judgement_without_hidden(judgement))
        digest = segment.digest_of(head.rollout_id)
        with self._lock:
            before = self._find_judgement(digest)
            if before is not None and before.finished_at >= head.finished_at:
                return False
            target, offset = self._append(record.pack(head, body))
            target.judgements[digest] = offset
            return True

    def add_trained(self, head: TrainedHead, tokens: TrainedTokens) -> bool:
        """Writes what a step did with the tokens of a rollout; False if the newest record of the rollout contains exactly that."""
        body = record.pack_body(tokens)
        digest, packed = segment.digest_of(head.rollout_id), record.pack(head, body)
        with self._lock:
            before = self._find_trained(digest)
            if before is not None and (before.head, before.frame) == (head, record.frame_of(packed)):
                return False
            target, offset = self._append(packed)
            target.trained[digest] = offset
            return True

    def sync(self) -> None:
        """Returns when everything added is on disk."""
        with self._lock:
            if self._open is not None:
                os.fsync(self._open.file.fileno())

    def close(self) -> None:
        """Writes everything to disk, and closes the segment with its index."""
        with self._lock:
            self._close_segment()

    def _close_segment(self) -> None:
        if self._open is None:
            return
        done, self._open = self._open, None
        with done.file:
            os.fsync(done.file.fileno())
        index = segment.index_of(done.rows, done.judgements, done.trained, num_bytes=done.num_bytes)
        _write_index(done.path, index)
        self._closed[done.number] = index
        self._closed_bytes += self._size_of(done.number)

    def _find(self, digest: bytes) -> StoredHead | None:
        """The newest record of a request."""
        place = self._newest(
            lambda written: written.rows.get(digest, (None,))[0], lambda index: index.find(digest)
        )
        return None if place is None else _head_at(*place)

    def _find_judgement(self, digest: bytes) -> JudgementHead | None:
        """The newest judgement of a rollout."""
        place = self._newest(
            lambda written: written.judgements.get(digest), lambda index: index.find_judgement(digest)
        )
        return None if place is None else _judgement_head_at(*place)

    def _find_trained(self, digest: bytes) -> TrainedPlace | None:
        """The newest record of a rollout's trained tokens."""
        place = self._newest(
            lambda written: written.trained.get(digest), lambda index: index.find_trained(digest)
        )
        return None if place is None else _trained_at(*place)

    def _newest(
        self,
        in_open: Callable[[_OpenSegment], int | None],
        in_closed: Callable[[SegmentIndex], int | None],
    ) -> tuple[Path, int] | None:
        """The segment and the offset of the newest record that the two functions find in open and closed segments."""
        if self._open is not None and (offset := in_open(self._open)) is not None:
            return self._open.path, offset
        for number, index in sorted(self._closed.items(), reverse=True):
            if (offset := in_closed(index)) is not None:
                return segment.path_of(self._directory, number), offset
        return None

    def _target(self, num_bytes: int) -> _OpenSegment:
        """The segment for the next record."""
        if self._open is not None and self._open.num_bytes + num_bytes > self._segment_bytes:
            self._close_segment()
        if self._open is None:
            number = max(self._closed, default=0) + 1
            path = segment.path_of(self._directory, number)
            self._open = _OpenSegment(number, path, path.open("xb", buffering=0))
            directories.sync(self._directory)
        return self._open

    def _make_room(self, num_bytes: int) -> None:
        """Remove the oldest segments until `num_bytes` more are within the budget."""
        while self._num_bytes + num_bytes > self._max_bytes:
            if not self._closed:
                self._close_segment()
            if not self._closed:
                return
            oldest = min(self._closed)
            self._closed_bytes -= self._size_of(oldest)
            del self._closed[oldest]
            path = segment.path_of(self._directory, oldest)
            path.unlink()
            segment.index_path(path).unlink(missing_ok=True)

    @property
    def _num_bytes(self) -> int:
        return self._closed_bytes + (0 if self._open is None else self._open.num_bytes)

    def _size_of(self, number: int) -> int:
        path = segment.path_of(self._directory, number)
        return path.stat().st_size + segment.index_path(path).stat().st_size


def _close(path: Path) -> SegmentIndex:
    """The index of a segment of an earlier process, written now if that process had not written it."""
    index = segment.read_index(path)
    if index is None:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            index = segment.made_index(file)
        _write_index(path, index)
    return index


def _write_index(path: Path, index: SegmentIndex) -> None:
    final = segment.index_path(path)
    partial = final.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(record.encode_index(index))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(final)
    directories.sync(path.parent)


def _head_at(path: Path, offset: int) -> StoredHead | None:
    with path.open("rb") as file:
        found = segment.entry_at(file, offset)
    return None if found is None else found.stored


def _judgement_head_at(path: Path, offset: int) -> JudgementHead | None:
    with path.open("rb") as file:
        found = segment.judgement_at(file, offset)
    return None if found is None else found.head


def _trained_at(path: Path, offset: int) -> TrainedPlace | None:
    with path.open("rb") as file:
        return segment.trained_at(file, offset)
