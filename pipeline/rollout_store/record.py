"""One record of a segment file: a header of fixed size, a head that listing reads, and a compressed body.

    b"RLT1"  length of the head  length of the body  CRC-32 of the body  CRC-32 of these three and the head  head  body

All numbers are unsigned little-endian 32-bit. The first checksum can be verified without reading the body. A reader that meets
damaged bytes looks for the next b"RLT1" behind which both checksums hold.
"""

import struct
import zlib
from dataclasses import dataclass

import msgspec
import zstandard

from pipeline.deadletters import AttemptFailure
from pipeline.message import Message, decode, decode_body, encode
from pipeline.trajectory import Trajectory, TrajectoryHead

MAGIC = b"RLT1"
HEADER_BYTES = 20
# A tenth smaller than level 1, for half as much time again; the writer has a thread of its own.
ZSTD_LEVEL = 3
MAX_HEAD_BYTES = 1024**2

_LENGTHS = struct.Struct("<III")
_CHECKSUM = struct.Struct("<I")


class StoredHead(Message, frozen=True, kw_only=True):
    """What a store tells of a rollout without its body."""

    head: TrajectoryHead
    is_dead: bool = False  # its request was dead-lettered
    replaces: bool = False  # an older record of the same request no longer counts


class StoredRollout(Message, frozen=True, kw_only=True):
    """The body of a record. `trajectory` is None if nobody could decode the request, or Redis no longer had it."""

    trajectory: Trajectory | None = None
    failures: tuple[AttemptFailure, ...] = ()  # of a dead-lettered request: the evidence of every attempt


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the parts of a record are, as its header says."""

    head_bytes: int
    body_bytes: int
    body_checksum: int
    checksum: int  # of the three numbers above and the head

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + self.head_bytes + self.body_bytes


def frame_of(header: bytes) -> Frame | None:
    """What a header says; None if these bytes are none."""
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        return None
    frame = Frame(*_LENGTHS.unpack_from(header, 4), *_CHECKSUM.unpack_from(header, 16))
    return frame if frame.head_bytes <= MAX_HEAD_BYTES else None


def pack(head: StoredHead, body: bytes) -> bytes:
    """The record of a body that `pack_body` made."""
    packed = encode(head)
    lengths = _LENGTHS.pack(len(packed), len(body), zlib.crc32(body))
    return b"".join((MAGIC, lengths, _CHECKSUM.pack(zlib.crc32(packed, zlib.crc32(lengths))), packed, body))


def pack_body(rollout: StoredRollout) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(encode(rollout))


def head_in(frame: Frame, packed: bytes) -> StoredHead | None:
    """The head of a record; None if it is damaged."""
    lengths = _LENGTHS.pack(frame.head_bytes, frame.body_bytes, frame.body_checksum)
    if len(packed) != frame.head_bytes or zlib.crc32(packed, zlib.crc32(lengths)) != frame.checksum:
        return None
    return decode(packed, StoredHead)


def is_whole(frame: Frame, body: bytes) -> bool:
    return len(body) == frame.body_bytes and zlib.crc32(body) == frame.body_checksum


def unpack_body(body: bytes) -> StoredRollout:
    """Inverse of `pack_body`. Raises MalformedMessage."""
    return decode_body(body, StoredRollout)


def encode_index(index: msgspec.Struct) -> bytes:
    """With its checksum in front."""
    packed = msgspec.msgpack.encode(index)
    return _CHECKSUM.pack(zlib.crc32(packed)) + packed


def checked(data: bytes) -> bytes | None:
    """What `encode_index` put behind the checksum; None if it is damaged."""
    if len(data) < _CHECKSUM.size or _CHECKSUM.unpack_from(data)[0] != zlib.crc32(data[_CHECKSUM.size :]):
        return None
    return data[_CHECKSUM.size :]
