"""One record of a segment file: a header of fixed size, a head that listing reads, and a compressed body.

A record is a rollout, or something about one that is known later: its judgement, b"RLJ1" in the first four bytes, or what a step did
with its tokens, b"RLS1".

    b"RLT1"  length of the head  length of the body  CRC-32 of the body  CRC-32 of these three and the head  head  body

All numbers are unsigned little-endian 32-bit. The first checksum can be verified without reading the body. A reader that meets
damaged bytes looks for the next record behind whose first four bytes both checksums hold.
"""

import struct
import zlib
from dataclasses import dataclass

import msgspec
import zstandard

from pipeline.deadletters import AttemptFailure
from pipeline.judge import Judgement, JudgementHead
from pipeline.message import Message, decode, decode_body, encode
from pipeline.rollout_store.trained import TrainedHead, TrainedTokens
from pipeline.trajectory import Trajectory, TrajectoryHead

ROLLOUT_MAGIC, JUDGEMENT_MAGIC, TRAINED_MAGIC = b"RLT1", b"RLJ1", b"RLS1"
MAGIC_START = b"RL"
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
    # With the text of each vote. It lies in a record of its own, so that no trajectory is written twice; readers put it here.
    judgement: Judgement | None = None


Head = StoredHead | JudgementHead | TrainedHead
_HEADS: dict[bytes, type[Head]] = {
    ROLLOUT_MAGIC: StoredHead,
    JUDGEMENT_MAGIC: JudgementHead,
    TRAINED_MAGIC: TrainedHead,
}


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the parts of a record are, as its header says."""

    head_bytes: int
    body_bytes: int
    body_checksum: int
    checksum: int  # of the three numbers above and the head
    magic: bytes = ROLLOUT_MAGIC

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + self.head_bytes + self.body_bytes


def frame_of(header: bytes) -> Frame | None:
    """What a header says; None if these bytes are none."""
    magic = header[:4]
    if len(header) < HEADER_BYTES or magic not in _HEADS:
        return None
    numbers = *_LENGTHS.unpack_from(header, 4), *_CHECKSUM.unpack_from(header, 16)
    frame = Frame(*numbers, magic=magic)
    return frame if frame.head_bytes <= MAX_HEAD_BYTES else None


def pack(head: Head, body: bytes) -> bytes:
    """The record of a body that `pack_body` made."""
    packed = encode(head)
    magic = next(magic for magic, kind in _HEADS.items() if isinstance(head, kind))
    lengths = _LENGTHS.pack(len(packed), len(body), zlib.crc32(body))
    return b"".join((magic, lengths, _CHECKSUM.pack(zlib.crc32(packed, zlib.crc32(lengths))), packed, body))


def pack_body(body: StoredRollout | Judgement | TrainedTokens) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(encode(body))


def head_in(frame: Frame, packed: bytes) -> Head | None:
    """The head of a record; None if it is damaged."""
    lengths = _LENGTHS.pack(frame.head_bytes, frame.body_bytes, frame.body_checksum)
    if len(packed) != frame.head_bytes or zlib.crc32(packed, zlib.crc32(lengths)) != frame.checksum:
        return None
    return decode(packed, _HEADS[frame.magic])


def is_whole(frame: Frame, body: bytes) -> bool:
    return len(body) == frame.body_bytes and zlib.crc32(body) == frame.body_checksum


def unpack_body(body: bytes) -> StoredRollout:
    """Inverse of `pack_body`. Raises MalformedMessage."""
    return decode_body(body, StoredRollout)


def unpack_judgement(body: bytes) -> Judgement:
    """Inverse of `pack_body` for a judgement. Raises MalformedMessage."""
    return decode_body(body, Judgement)


def unpack_trained(body: bytes) -> TrainedTokens:
    """Inverse of `pack_body` for trained tokens. Raises MalformedMessage."""
    return decode_body(body, TrainedTokens)


def encode_index(index: msgspec.Struct) -> bytes:
    """With its checksum in front."""
    packed = msgspec.msgpack.encode(index)
    return _CHECKSUM.pack(zlib.crc32(packed)) + packed


def checked(data: bytes) -> bytes | None:
    """What `encode_index` put behind the checksum; None if it is damaged."""
    if len(data) < _CHECKSUM.size or _CHECKSUM.unpack_from(data)[0] != zlib.crc32(data[_CHECKSUM.size :]):
        return None
    return data[_CHECKSUM.size :]
