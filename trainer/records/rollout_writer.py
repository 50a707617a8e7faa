"""Writes rollouts into a store (`pipeline.rollout_store`), each request once, within a budget of bytes.

One process writes a store at a time, into segments of its own: what another process left is closed with an index and never
written again. A record is one write of the operating system, so a process that is killed loses at most the record that it was
writing; `sync` puts all of them on the disk, which has to happen before their stream entries are acknowledged.
"""

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pipeline.rollout_store import record, segment
from pipeline.rollout_store.record import StoredHead, StoredRollout
from pipeline.rollout_store.segment import SegmentIndex
from pipeline.rollout_store.withheld import without_hidden
from pipeline.trajectory import Trajectory, TrajectoryHead, head_of
from trainer.learner import directories

MAX_BYTES = 64 * 1024**3  # of a store, unless its user says otherwise
SEGMENT_BYTES = 64 * 1024**2
SEGMENTS_IN_BUDGET = 16  # a store with a smaller budget has smaller segments: only whole ones are removed


@dataclass(slots=True)
class _OpenSegment:
    """The segment that this process writes."""

    number: int
    path: Path
    file: BinaryIO
    num_bytes: int = 0
    rows: dict[bytes, tuple[int, bool]] = field(default_factory=dict)


class RolloutWriter:
    """Of one store, for any number of threads. Raises OSError where the store cannot be written."""

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
        """Write the rollout without what is hidden; False if the store has it already.

        A request that was dead-lettered and requeued finishes once more: what finished later replaces what finished earlier.
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
        packed = record.pack(stored, body)
        self._make_room(len(packed))
        target = self._target(len(packed))
        _write_whole(target.file, packed, at=target.num_bytes)
        target.rows[digest] = target.num_bytes, stored.replaces
        target.num_bytes += len(packed)
        return True

    def sync(self) -> None:
        """Return when everything added is on the disk."""
        with self._lock:
            if self._open is not None:
                os.fsync(self._open.file.fileno())

    def close(self) -> None:
        """Put everything on the disk, and close the segment with its index."""
        with self._lock:
            self._close_segment()

    def _close_segment(self) -> None:
        if self._open is None:
            return
        done, self._open = self._open, None
        with done.file:
            os.fsync(done.file.fileno())
        index = segment.index_of(done.rows, num_bytes=done.num_bytes)
        _write_index(done.path, index)
        self._closed[done.number] = index
        self._closed_bytes += self._size_of(done.number)

    def _find(self, digest: bytes) -> StoredHead | None:
        """The newest record of a request."""
        if self._open is not None and digest in self._open.rows:
            return _head_at(self._open.path, self._open.rows[digest][0])
        for number, index in sorted(self._closed.items(), reverse=True):
            offset = index.find(digest)
            if offset is not None:
                return _head_at(segment.path_of(self._directory, number), offset)
        return None

    def _target(self, num_bytes: int) -> _OpenSegment:
        """The segment that the next record of so many bytes goes to."""
        if self._open is not None and self._open.num_bytes + num_bytes > self._segment_bytes:
            self._close_segment()
        if self._open is None:
            number = max(self._closed, default=0) + 1
            path = segment.path_of(self._directory, number)
            self._open = _OpenSegment(number, path, path.open("xb", buffering=0))
            directories.sync(self._directory)
        return self._open

    def _make_room(self, num_bytes: int) -> None:
        """Remove the oldest segments until so many bytes more are within the budget."""
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
    """The index of a segment of an earlier process, written now if that process could not."""
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


def _write_whole(file: BinaryIO, packed: bytes, *, at: int) -> None:
    """Write `packed` to the end of the file, which is `at`; after an error the file ends there again."""
    rest = memoryview(packed)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), at)
            file.seek(at)
        raise


def _head_at(path: Path, offset: int) -> StoredHead | None:
    with path.open("rb") as file:
        found = segment.entry_at(file, offset)
    return None if found is None else found.stored
