"""A segment file and its index.

A segment is written by one process, and never again once that process has closed it or died. Its index is a second file, written when the
segment is complete; without one, or with one that does not match, readers read the segment itself. So a process that is killed at any
moment leaves nothing to repair: readers skip a record that was not written completely.
"""

import bisect
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from pipeline.judge import JudgementHead
from pipeline.message import MalformedMessage, Message, prepared
from pipeline.rollout_store import record
from pipeline.rollout_store.record import Frame, StoredHead, TrainedHead

SUFFIX, INDEX_SUFFIX = ".segment", ".index"
_DIGEST_BYTES = 16
_ENTRY_BYTES = _DIGEST_BYTES + 8
_SEARCH_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """The record of a rollout, found at `offset`."""

    offset: int
    frame: Frame
    stored: StoredHead


@dataclass(frozen=True, slots=True)
class JudgementPlace:
    """The record of a judgement, found at `offset`."""

    offset: int
    frame: Frame
    head: JudgementHead


@dataclass(frozen=True, slots=True)
class TrainedPlace:
    """The record of a rollout's trained tokens, found at `offset`."""

    offset: int
    frame: Frame
    head: TrainedHead


Place = RecordPlace | JudgementPlace | TrainedPlace


class SegmentIndex(Message, frozen=True, kw_only=True):
    """The offset of each request's record in a complete segment. The tables have rows of 24 bytes, the digest of a request id and an
    offset, in the order of the digests.
    """

    num_bytes: int  # the segment's size
    rows: bytes  # the newest record of every request
    replacing: bytes  # those rows that replace records of older segments, or of this one
    judgements: bytes = b""  # the newest record of every judgement, by the id of its rollout
    trained: bytes = b""  # the newest record of trained tokens, likewise

    def find(self, digest: bytes) -> int | None:
        """The offset of the request's newest record."""
        return _find(self.rows, digest)

    def find_judgement(self, digest: bytes) -> int | None:
        """The offset of the newest judgement of the rollout."""
        return _find(self.judgements, digest)

    def find_trained(self, digest: bytes) -> int | None:
        """The offset of the newest record of the rollout's trained tokens."""
        return _find(self.trained, digest)

    def all_judgements(self) -> Iterator[tuple[bytes, int]]:
        """(digest, offset) of each judgement."""
        return _pairs(self.judgements)

    def offsets(self) -> Iterator[int]:
        return (offset for _, offset in _pairs(self.rows))

    def replacements(self) -> Iterator[tuple[bytes, int]]:
        """(digest, offset) of each record that replaces an older one."""
        return _pairs(self.replacing)


def digest_of(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def path_of(directory: Path, number: int) -> Path:
    return directory / f"{number:08d}{SUFFIX}"


def index_path(segment: Path) -> Path:
    return segment.with_suffix(INDEX_SUFFIX)


def segments_in(directory: Path) -> list[Path]:
    """The segments in the directory, oldest first."""
    return sorted(path for path in directory.glob(f"*{SUFFIX}") if path.stem.isdecimal())


def entries(file: BinaryIO, *, start: int = 0) -> Iterator[RecordPlace]:
    """Every rollout from the offset `start` on whose head is complete and whose end is within the file, in order.

    Damaged records are skipped.
    """
    return (place for place in places(file, start=start) if isinstance(place, RecordPlace))


def places(file: BinaryIO, *, start: int = 0) -> Iterator[Place]:
    """Every record of any kind, read as `entries` reads rollouts."""
    size = os.fstat(file.fileno()).st_size
    offset = start
    while offset + record.HEADER_BYTES <= size:
        found = _place_at(file, offset, size)
        if found is not None:
            yield found
            offset += found.frame.num_bytes
        else:
            offset = _next_magic(file, offset + 1, size)


def read_body(file: BinaryIO, entry: Place) -> bytes | None:
    """The compressed body; None if it is damaged."""
    file.seek(entry.offset + record.HEADER_BYTES + entry.frame.head_bytes)
    body = file.read(entry.frame.body_bytes)
    return body if record.is_whole(entry.frame, body) else None


def entry_at(file: BinaryIO, offset: int) -> RecordPlace | None:
    """The rollout whose record begins at `offset`; None if it is damaged."""
    found = _place_at(file, offset, os.fstat(file.fileno()).st_size)
    return found if isinstance(found, RecordPlace) else None


def judgement_at(file: BinaryIO, offset: int) -> JudgementPlace | None:
    """The judgement whose record begins at `offset`; None if it is damaged."""
    found = _place_at(file, offset, os.fstat(file.fileno()).st_size)
    return found if isinstance(found, JudgementPlace) else None


def trained_at(file: BinaryIO, offset: int) -> TrainedPlace | None:
    """The trained tokens whose record begins at `offset`; None if it is damaged."""
    found = _place_at(file, offset, os.fstat(file.fileno()).st_size)
    return found if isinstance(found, TrainedPlace) else None


def read_index(segment: Path) -> SegmentIndex | None:
    """The index of the segment; None if no index matches the segment in its present state."""
    try:
        packed = record.checked(index_path(segment).read_bytes())
        index = None if packed is None else msgspec.msgpack.decode(packed, type=prepared(SegmentIndex))
        return index if index is not None and index.num_bytes == segment.stat().st_size else None
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def made_index(file: BinaryIO) -> SegmentIndex:
    """A new index of the segment in its present state, with verified bodies."""
    rows: dict[bytes, tuple[int, bool]] = {}
    judged: dict[bytes, int] = {}
    with_tokens: dict[bytes, int] = {}
    for place in places(file):
        if read_body(file, place) is None:
            continue
        match place:
            case RecordPlace(offset, _, stored):
                rows[digest_of(stored.head.request_id)] = offset, stored.replaces
            case JudgementPlace(offset, _, head):
                judged[digest_of(head.rollout_id)] = offset
            case TrainedPlace(offset, _, head):
                with_tokens[digest_of(head.rollout_id)] = offset
    return index_of(rows, judged, with_tokens, num_bytes=os.fstat(file.fileno()).st_size)


def index_of(
    rows: dict[bytes, tuple[int, bool]],
    judged: dict[bytes, int],
    with_tokens: dict[bytes, int],
    *,
    num_bytes: int,
) -> SegmentIndex:
    """The index of (offset, whether it replaces an older one) by digest of each rollout, and of the offsets of its judgement and its
    trained tokens.
    """
    packed = [
        (digest + offset.to_bytes(8, "little"), replaces) for digest, (offset, replaces) in rows.items()
    ]
    packed.sort()
    return SegmentIndex(
        num_bytes=num_bytes,
        rows=b"".join(row for row, _ in packed),
        replacing=b"".join(row for row, replaces in packed if replaces),
        judgements=_table(judged),
        trained=_table(with_tokens),
    )


def _table(offsets: dict[bytes, int]) -> bytes:
    return b"".join(sorted(digest + offset.to_bytes(8, "little") for digest, offset in offsets.items()))


def _find(rows: bytes, digest: bytes) -> int | None:
    place = bisect.bisect_left(
        range(len(rows) // _ENTRY_BYTES),
        digest,
        key=lambda row: rows[row * _ENTRY_BYTES : row * _ENTRY_BYTES + _DIGEST_BYTES],
    )
    start = place * _ENTRY_BYTES
    return _offset(rows, start) if rows[start : start + _DIGEST_BYTES] == digest else None


def _pairs(rows: bytes) -> Iterator[tuple[bytes, int]]:
    for start in range(0, len(rows), _ENTRY_BYTES):
        yield rows[start : start + _DIGEST_BYTES], _offset(rows, start)


def _place_at(file: BinaryIO, offset: int, size: int) -> Place | None:
    file.seek(offset)
    frame = record.frame_of(file.read(record.HEADER_BYTES))
    if frame is None or offset + frame.num_bytes > size:
        return None
    try:
        head = record.head_in(frame, file.read(frame.head_bytes))
    except MalformedMessage:  # the record is whole, but from another release
        return None
    match head:
        case StoredHead():
            return RecordPlace(offset, frame, head)
        case JudgementHead():
            return JudgementPlace(offset, frame, head)
        case TrainedHead():
            return TrainedPlace(offset, frame, head)
        case None:
            return None


def _next_magic(file: BinaryIO, start: int, size: int) -> int:
    """The offset at which the next record may begin; the end of the file if there is none."""
    while start < size:
        file.seek(start)
        chunk = file.read(_SEARCH_BYTES)
        found = chunk.find(record.MAGIC_START)
        if found >= 0:
            return start + found
        if len(chunk) < _SEARCH_BYTES:
            return size
        start += len(chunk) - len(record.MAGIC_START) + 1
    return size


def _offset(rows: bytes, start: int) -> int:
    return int.from_bytes(rows[start + _DIGEST_BYTES : start + _ENTRY_BYTES], "little")
