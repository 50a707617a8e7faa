"""A segment file and its index.

A segment is written by one process, and never again once that process has closed it or died. Its index is a second file,
written when the segment is complete; without one, or with one that does not fit, the segment itself is read. So a process that
is killed at any moment leaves nothing to repair: of a record that it was writing, readers find no whole copy and pass over it.
"""

import bisect
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from pipeline.message import MalformedMessage, Message
from pipeline.rollout_store import record
from pipeline.rollout_store.record import Frame, StoredHead

SUFFIX, INDEX_SUFFIX = ".segment", ".index"
_DIGEST_BYTES = 16
_ENTRY_BYTES = _DIGEST_BYTES + 8
_SEARCH_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """A record, found at `offset`."""

    offset: int
    frame: Frame
    stored: StoredHead


class SegmentIndex(Message, frozen=True, kw_only=True):
    """Where each request of a complete segment is. Both tables have rows of 24 bytes, the digest of a request id and an offset, in
    the order of the digests.
    """

    num_bytes: int  # of the segment
    rows: bytes  # of every request, its newest record
    replacing: bytes  # those rows that replace records of older segments, or of this one

    def find(self, digest: bytes) -> int | None:
        """The offset of the request's newest record."""
        rows = self.rows
        place = bisect.bisect_left(
            range(len(rows) // _ENTRY_BYTES),
            digest,
            key=lambda row: rows[row * _ENTRY_BYTES : row * _ENTRY_BYTES + _DIGEST_BYTES],
        )
        start = place * _ENTRY_BYTES
        if rows[start : start + _DIGEST_BYTES] != digest:
            return None
        return _offset(rows, start)

    def offsets(self) -> Iterator[int]:
        for start in range(0, len(self.rows), _ENTRY_BYTES):
            yield _offset(self.rows, start)

    def replacements(self) -> Iterator[tuple[bytes, int]]:
        """(digest, offset) of each record that replaces an older one."""
        for start in range(0, len(self.replacing), _ENTRY_BYTES):
            yield self.replacing[start : start + _DIGEST_BYTES], _offset(self.replacing, start)


def digest_of(request_id: str) -> bytes:
    return hashlib.blake2b(request_id.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def path_of(directory: Path, number: int) -> Path:
    return directory / f"{number:08d}{SUFFIX}"


def index_path(segment: Path) -> Path:
    return segment.with_suffix(INDEX_SUFFIX)


def segments_in(directory: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in directory.glob(f"*{SUFFIX}") if path.stem.isdecimal())


def entries(file: BinaryIO) -> Iterator[RecordPlace]:
    """Every record whose head is whole and whose end is within the file, in order. What is damaged is passed over."""
    size = os.fstat(file.fileno()).st_size
    offset = 0
    while offset + record.HEADER_BYTES <= size:
        found = _entry_at(file, offset, size)
        if found is not None:
            yield found
            offset += found.frame.num_bytes
        else:
            offset = _next_magic(file, offset + 1, size)


def read_body(file: BinaryIO, entry: RecordPlace) -> bytes | None:
    """The compressed body; None if it is damaged."""
    file.seek(entry.offset + record.HEADER_BYTES + entry.frame.head_bytes)
    body = file.read(entry.frame.body_bytes)
    return body if record.is_whole(entry.frame, body) else None


def entry_at(file: BinaryIO, offset: int) -> RecordPlace | None:
    """The record that begins there; None if it is damaged."""
    return _entry_at(file, offset, os.fstat(file.fileno()).st_size)


def read_index(segment: Path) -> SegmentIndex | None:
    """None if there is none that fits the segment as it is."""
    try:
        packed = record.checked(index_path(segment).read_bytes())
        index = None if packed is None else msgspec.msgpack.decode(packed, type=SegmentIndex)
        return index if index is not None and index.num_bytes == segment.stat().st_size else None
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def made_index(file: BinaryIO) -> SegmentIndex:
    """The index of a segment as it is, bodies verified."""
    rows: dict[bytes, tuple[int, bool]] = {}
    for entry in entries(file):
        if read_body(file, entry) is not None:
            digest = digest_of(entry.stored.head.request_id)
            rows[digest] = entry.offset, entry.stored.replaces
    return index_of(rows, num_bytes=os.fstat(file.fileno()).st_size)


def index_of(rows: dict[bytes, tuple[int, bool]], *, num_bytes: int) -> SegmentIndex:
    """Of (offset, whether it replaces an older one) by digest."""
    packed = [
        (digest + offset.to_bytes(8, "little"), replaces) for digest, (offset, replaces) in rows.items()
    ]
    packed.sort()
    return SegmentIndex(
        num_bytes=num_bytes,
        rows=b"".join(row for row, _ in packed),
        replacing=b"".join(row for row, replaces in packed if replaces),
    )


def _entry_at(file: BinaryIO, offset: int, size: int) -> RecordPlace | None:
    file.seek(offset)
    frame = record.frame_of(file.read(record.HEADER_BYTES))
    if frame is None or offset + frame.num_bytes > size:
        return None
    try:
        stored = record.head_in(frame, file.read(frame.head_bytes))
    except MalformedMessage:  # whole, but of another release
        return None
    return None if stored is None else RecordPlace(offset, frame, stored)


def _next_magic(file: BinaryIO, start: int, size: int) -> int:
    """Where the next record may begin; the end of the file if nowhere."""
    while start < size:
        file.seek(start)
        chunk = file.read(_SEARCH_BYTES)
        found = chunk.find(record.MAGIC)
        if found >= 0:
            return start + found
        if len(chunk) < _SEARCH_BYTES:
            return size
        start += len(chunk) - len(record.MAGIC) + 1
    return size


def _offset(rows: bytes, start: int) -> int:
    return int.from_bytes(rows[start + _DIGEST_BYTES : start + _ENTRY_BYTES], "little")
