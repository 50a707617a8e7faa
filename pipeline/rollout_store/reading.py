"""Reading a store: one rollout by its request id, or all of them one after the other, whatever its size.

A store may be read while it is written, and on a machine without Redis. A request that was dead-lettered, requeued and finished has two
records, of which only the newer one counts. The judgement of a rollout is a separate record, which readers add to its rollout.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from msgspec import structs

from pipeline.judge import Judgement
from pipeline.message import MalformedMessage
from pipeline.rollout_store import record, segment
from pipeline.rollout_store.record import StoredHead, StoredRollout, TrainedTokens
from pipeline.rollout_store.segment import RecordPlace, SegmentIndex

DIRECTORY = "rollouts"  # name of a run's store, within the run's directory
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
            offsets = (
                _scanned_trained(path, wanted.keys()) if index is None else _indexed_trained(index, wanted)
            )
            for digest, offset in offsets.items():
                if (tokens := _trained_at(path, offset)) is not None:
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
            scanned = dict(_judgement_offsets(path)) if index is None else {}
            offset = scanned.get(digest) if index is None else index.find_judgement(digest)
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
        pairs = _judgement_offsets(path) if index is None else index.all_judgements()
        yield from ((digest, (path, offset)) for digest, offset in pairs)


def _judgement_offsets(path: Path) -> Iterator[tuple[bytes, int]]:
    """The offsets of judgements in a segment without an index."""
    try:
        with path.open("rb") as file:
            for place in segment.judgements(file):
                yield segment.digest_of(place.head.rollout_id), place.offset
    except FileNotFoundError:
        return


def _judgement_at(path: Path, offset: int) -> Judgement | None:
    """The judgement; None if its record is damaged, or was removed in the meantime."""
    try:
        with path.open("rb") as file:
            place = segment.judgement_at(file, offset)
            body = None if place is None else segment.read_body(file, place)
        return None if body is None else record.unpack_judgement(body)
    except (FileNotFoundError, MalformedMessage):
        return None


def _indexed_trained(index: SegmentIndex, digests: Iterable[bytes]) -> dict[bytes, int]:
    found = ((digest, index.find_trained(digest)) for digest in digests)
    return {digest: offset for digest, offset in found if offset is not None}


def _scanned_trained(path: Path, digests: Container[bytes]) -> dict[bytes, int]:
    """The offset of the newest complete record of trained tokens of each rollout, in a segment without an index."""
    found: dict[bytes, int] = {}
    try:
        with path.open("rb") as file:
            for place in segment.trained(file):
                digest = segment.digest_of(place.head.rollout_id)
                if digest in digests and segment.read_body(file, place) is not None:
                    found[digest] = place.offset
    except FileNotFoundError:
        return {}
    return found


def _trained_at(path: Path, offset: int) -> TrainedTokens | None:
    """The trained tokens; None if their record is damaged, or was removed in the meantime."""
    try:
        with path.open("rb") as file:
            place = segment.trained_at(file, offset)
            body = None if place is None else segment.read_body(file, place)
        return None if body is None else record.unpack_trained(body)
    except (FileNotFoundError, MalformedMessage):
        return None


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
