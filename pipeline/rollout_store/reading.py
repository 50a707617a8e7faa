"""Reading a store: one rollout by its request id, or all of them one after the other, whatever its size.

A store may be read while it is written, and on a machine without Redis. Of a request that was dead-lettered, requeued and
finished there are two records, of which only the newer one counts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.message import MalformedMessage
from pipeline.rollout_store import record, segment
from pipeline.rollout_store.record import StoredHead, StoredRollout
from pipeline.rollout_store.segment import RecordPlace, SegmentIndex

DIRECTORY = "rollouts"  # of a run, in its directory
EVALUATIONS = "evaluations"  # each with a store of its own, beside that of the run


@dataclass(frozen=True, slots=True)
class Stored:
    """A rollout of a store. `fault` says why its body cannot be read; "": it can."""

    head: StoredHead
    rollout: StoredRollout
    fault: str = ""


class RolloutStore:
    """The rollouts of one run, or of one evaluation. A directory that is not there is an empty store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def find(self, request_id: str) -> Stored | None:
        digest = segment.digest_of(request_id)
        for path in reversed(segment.segments_in(self._directory)):
            try:
                found = _find_in(path, digest)
            except FileNotFoundError:
                continue
            if found is not None:
                return found
        return None

    def heads(self, *, newest_first: bool = False) -> Iterator[StoredHead]:
        """Of every rollout, without reading bodies."""
        for _, entry in self._entries(newest_first=newest_first):
            yield entry.stored

    def rollouts(self, wanted: Callable[[StoredHead], bool]) -> Iterator[Stored]:
        """Those whose heads are wanted, oldest first, one in memory at a time."""
        for file, entry in self._entries(newest_first=False):
            if wanted(entry.stored):
                yield _stored(file, entry)

    def _entries(self, *, newest_first: bool) -> Iterator[tuple[BinaryIO, RecordPlace]]:
        paths = segment.segments_in(self._directory)
        replaced_by = dict(_replacements(paths))
        for path in reversed(paths) if newest_first else paths:
            try:
                file = path.open("rb")
            except FileNotFoundError:  # removed meanwhile, because it was the oldest
                continue
            with file:
                found = _whole(file, segment.read_index(path))
                for entry in reversed(list(found)) if newest_first else found:
                    digest = segment.digest_of(entry.stored.head.request_id) if replaced_by else b""
                    if replaced_by.get(digest, (path, entry.offset)) == (path, entry.offset):
                        yield file, entry


def stores_of(run_dir: Path) -> list[RolloutStore]:
    """The store of the run, and those of the evaluations in its directory."""
    places = [run_dir / DIRECTORY, *sorted(run_dir.glob(f"{EVALUATIONS}/*/{DIRECTORY}"))]
    return [RolloutStore(place) for place in places if place.is_dir()]


def _replacements(paths: list[Path]) -> Iterator[tuple[bytes, tuple[Path, int]]]:
    """Of each request with several records, the newest. Later ones come later."""
    for path in paths:
        index = segment.read_index(path)
        if index is not None:
            for digest, offset in index.replacements():
                yield digest, (path, offset)
            continue
        try:
            with path.open("rb") as file:
                for entry in segment.entries(file):
                    if entry.stored.replaces:
                        yield segment.digest_of(entry.stored.head.request_id), (path, entry.offset)
        except FileNotFoundError:
            continue


def _whole(file: BinaryIO, index: SegmentIndex | None) -> Iterator[RecordPlace]:
    """The records of a segment that count; without an index, every record whose head is whole."""
    if index is None:
        return segment.entries(file)
    offsets = set(index.offsets())
    return (entry for entry in segment.entries(file) if entry.offset in offsets)


def _find_in(path: Path, digest: bytes) -> Stored | None:
    index = segment.read_index(path)
    with path.open("rb") as file:
        if index is not None:
            offset = index.find(digest)
            entry = None if offset is None else segment.entry_at(file, offset)
            return None if entry is None else _stored(file, entry)
        same = [
            one for one in segment.entries(file) if segment.digest_of(one.stored.head.request_id) == digest
        ]
        copies = [_stored(file, entry) for entry in reversed(same)]
        return next((copy for copy in copies if not copy.fault), copies[0] if copies else None)


def _stored(file: BinaryIO, entry: RecordPlace) -> Stored:
    body = segment.read_body(file, entry)
    if body is None:
        return Stored(entry.stored, StoredRollout(), fault="its record is damaged")
    try:
        return Stored(entry.stored, record.unpack_body(body))
    except MalformedMessage as error:
        return Stored(entry.stored, StoredRollout(), fault=str(error))
