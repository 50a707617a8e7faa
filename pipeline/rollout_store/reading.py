"""Reading a store: one rollout by its request id, or all of them one after the other, whatever its size.

A store may be read while it is written, and on a machine without Redis. A request that was dead-lettered, requeued and finished has two
records, of which only the newer one counts. The judgement of a rollout is a separate record, which readers add to its rollout.
"""

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from msgspec import structs

from pipeline.judge import Judgement
from pipeline.message import MalformedMessage
from pipeline.rollout_store import record, segment
from pipeline.rollout_store.record import StoredHead, StoredRollout, TrainedTokens
from pipeline.rollout_store.segment import JudgementPlace, Place, RecordPlace, SegmentIndex, TrainedPlace
from pipeline.trajectory import TrajectoryHead

DIRECTORY = "rollouts"  # name of a run's store, within the run's directory
MAX_GROWING = 32  # segments that are being written of which the offsets stay in memory
EVALUATIONS = "evaluations"  # directory of evaluations, each with a store of its own, beside the run's store


@dataclass(frozen=True, slots=True)
class Stored:
    """A rollout of a store. `fault` says why its body cannot be read; "" if it can."""

    head: StoredHead
    rollout: StoredRollout
    fault: str = ""


class RolloutStore:
    """The rollouts of one run, or of one evaluation. A missing directory is an empty store."""

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
                return _judged(found, self._judgement_of(digest))
        return None

    def trained(self, request_ids: Iterable[str]) -> dict[str, TrainedTokens]:
        """The data about the tokens of rollouts from the newest step that trained them, by request id; without rollouts of which the store
        has none.
        """
        wanted = {segment.digest_of(request_id): request_id for request_id in request_ids}
        found: dict[str, TrainedTokens] = {}
        for path in reversed(segment.segments_in(self._directory)):
            if not wanted:
                break
            index = segment.read_index(path)
            for digest in list(wanted):
                tokens = next(_trained_in(path, _trained_offsets(path, index, digest)), None)
                if tokens is not None:
                    found[wanted.pop(digest)] = tokens
        return found

    def heads(self, *, newest_first: bool = False) -> Iterator[StoredHead]:
        """The head of every rollout, without reading bodies."""
        for _, entry in self._entries(newest_first=newest_first):
            yield entry.stored

    def rollouts(self, wanted: Callable[[StoredHead], bool]) -> Iterator[Stored]:
        """The rollouts whose heads are wanted, oldest first, one in memory at a time."""
        judgements = dict(_judgements(segment.segments_in(self._directory)))
        for file, entry in self._entries(newest_first=False):
            if wanted(entry.stored):
                place = judgements.get(segment.digest_of(entry.stored.head.request_id))
                yield _judged(_stored(file, entry), None if place is None else _judgement_at(*place))

    def _judgement_of(self, digest: bytes) -> Judgement | None:
        """The newest judgement of the rollout with this digest."""
        for path in reversed(segment.segments_in(self._directory)):
            index = segment.read_index(path)
            offset = _newest_judgement(path, digest) if index is None else index.find_judgement(digest)
            if offset is not None:
                return _judgement_at(path, offset)
        return None

    def _entries(self, *, newest_first: bool) -> Iterator[tuple[BinaryIO, RecordPlace]]:
        paths = segment.segments_in(self._directory)
        replaced_by = dict(_replacements(paths))
        for path in reversed(paths) if newest_first else paths:
            try:
                file = path.open("rb")
            except FileNotFoundError:  # it was removed in the meantime, because it was the oldest
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
    """The newest record of each request that has several. If one occurs twice, the later occurrence counts."""
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


def _judgements(paths: list[Path]) -> Iterator[tuple[bytes, tuple[Path, int]]]:
    """The segment and offset of each judgement, by the digest of its rollout. If one occurs twice, the later occurrence counts."""
    for path in paths:
        index = segment.read_index(path)
        pairs = _GROWING.newest(path, JudgementPlace) if index is None else index.all_judgements()
        yield from ((digest, (path, offset)) for digest, offset in pairs)


def _newest_judgement(path: Path, digest: bytes) -> int | None:
    return next(_GROWING.offsets(path, JudgementPlace, digest), None)


def _judgement_at(path: Path, offset: int) -> Judgement | None:
    """The judgement; None if its record is damaged, or was removed in the meantime."""
    try:
        with path.open("rb") as file:
            place = segment.judgement_at(file, offset)
            body = None if place is None else segment.read_body(file, place)
        return None if body is None else record.unpack_judgement(body)
    except (FileNotFoundError, MalformedMessage):
        return None


def _trained_offsets(path: Path, index: SegmentIndex | None, digest: bytes) -> Iterable[int]:
    if index is None:
        return _GROWING.offsets(path, TrainedPlace, digest)
    offset = index.find_trained(digest)
    return () if offset is None else (offset,)


def _trained_in(path: Path, offsets: Iterable[int]) -> Iterator[TrainedTokens]:
    """The trained tokens at the offsets, without damaged records and those that were removed in the meantime."""
    for offset in offsets:
        with contextlib.suppress(FileNotFoundError, MalformedMessage), path.open("rb") as file:
            place = segment.trained_at(file, offset)
            body = None if place is None else segment.read_body(file, place)
            if body is not None:
                yield record.unpack_trained(body)


def _judged(stored: Stored, judgement: Judgement | None) -> Stored:
    """The rollout with its judgement."""
    if judgement is None:
        return stored
    return replace(stored, rollout=structs.replace(stored.rollout, judgement=judgement))


def _whole(file: BinaryIO, index: SegmentIndex | None) -> Iterator[RecordPlace]:
    """The records of a segment that count; without an index, every record whose head is complete."""
    if index is None:
        return segment.entries(file)
    offsets = set(index.offsets())
    return (entry for entry in segment.entries(file) if entry.offset in offsets)


def _find_in(path: Path, digest: bytes) -> Stored | None:
    index = segment.read_index(path)
    with path.open("rb") as file:
        if index is None:
            offsets = _GROWING.offsets(path, RecordPlace, digest)
        else:
            offset = index.find(digest)
            offsets = iter(() if offset is None else (offset,))
        entries = (segment.entry_at(file, offset) for offset in offsets)
        copies = [_stored(file, entry) for entry in entries if entry is not None]
        return next((copy for copy in copies if not copy.fault), copies[0] if copies else None)


def _stored(file: BinaryIO, entry: RecordPlace) -> Stored:
    body = segment.read_body(file, entry)
    if body is None:
        return Stored(entry.stored, StoredRollout(), fault="its record is damaged")
    try:
        return Stored(entry.stored, record.unpack_body(body))
    except MalformedMessage as error:
        return Stored(entry.stored, StoredRollout(), fault=str(error))


class _GrowingSegments:
    """The offsets of the records of segments without an index, which are those that are being written. Of a segment that was read before
    only what is new is read, so a page of a rollout does not read the whole segment again. Threads may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: OrderedDict[Path, _Growing] = OrderedDict()

    def offsets(self, path: Path, kind: type[Place], digest: bytes) -> Iterator[int]:
        """The offsets of the records of one kind about a rollout, the newest first."""
        with self._lock:
            return reversed(list(self._read(path).offsets[kind].get(digest, ())))

    def newest(self, path: Path, kind: type[Place]) -> list[tuple[bytes, int]]:
        """The digest and the offset of the newest record about each rollout."""
        with self._lock:
            return [(digest, offsets[-1]) for digest, offsets in self._read(path).offsets[kind].items()]

    def _read(self, path: Path) -> "_Growing":
        try:
            with path.open("rb") as file:
                return self._read_on(path, file)
        except FileNotFoundError:  # it was the oldest, and was removed in the meantime
            self._segments.pop(path, None)
            return _Growing(b"")

    def _read_on(self, path: Path, file: BinaryIO) -> "_Growing":
        # A run that begins anew in the same directory has another first record.
        first, size = file.read(record.HEADER_BYTES), os.fstat(file.fileno()).st_size
        grown = self._segments.pop(path, None)
        if grown is None or grown.first != first or grown.end > size:
            grown = _Growing(first)
        for place in segment.places(file, start=grown.end):
            head = place.stored.head if isinstance(place, RecordPlace) else place.head
            name = head.request_id if isinstance(head, TrajectoryHead) else head.rollout_id
            grown.offsets[type(place)].setdefault(segment.digest_of(name), []).append(place.offset)
            grown.end = place.offset + place.frame.num_bytes
        self._segments[path] = grown
        if len(self._segments) > MAX_GROWING:
            self._segments.popitem(last=False)
        return grown


@dataclass(slots=True)
class _Growing:
    first: bytes  # the header of its first record, which has a checksum of it
    end: int = 0  # of what was read
    offsets: dict[type[Place], dict[bytes, list[int]]] = field(
        default_factory=lambda: {RecordPlace: {}, JudgementPlace: {}, TrainedPlace: {}}
    )


_GROWING = _GrowingSegments()
