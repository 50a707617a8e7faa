"""A weight patch: the bytes that make a weight version's directory from an older one, or from nothing.

The trainer writes patches (`trainer/weights/delta.py`); the receiver on an engine's host applies them (`infra/serving/receiver.py`). A
directory is described by a manifest, which has the SHA-256 of each block of each file, so a receiver's result is byte for byte what the
trainer exported, or it is refused.

    patch     MAGIC, the header's length (4 bytes, little-endian), PatchHeader (msgpack), then blocks in ascending order
    block     BlockHeader, then its content; a block that is the same in the base is left out
    content   RAW: the block's bytes unchanged. SPARSE: zstd over the number of gap bytes (4 bytes, little-endian), the gap bytes,
              and the low bytes and then the high bytes of the differences

SPARSE takes a block of even length for 16-bit words, which bfloat16 values are. Each gap byte below 255 leads to the next changed
word, that many unchanged words further on; 255 skips 255 words and leads to none. The difference is new minus old, modulo 2^16, in
zigzag coding (0, -1, 1, -2, ... as 0, 1, 2, 3, ...): most values change by one step of their last place, so nearly all differences
are 1 or 2.
"""

import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from enum import IntEnum
from typing import NamedTuple, Protocol, Self, TypeVar

from pipeline.message import MalformedMessage, Message, decode, encode

T = TypeVar("T")
R = TypeVar("R")

MAGIC = b"SWP1"
BLOCK_BYTES = 4 << 20
DIGEST_BYTES = 32
MAX_HEADER_BYTES = 256 << 20  # 4 MiB blocks of 1 TB of weights have 8 MB of digests
MAX_FILES = 100_000

_LENGTH = struct.Struct("<I")
_BLOCK = struct.Struct("<IIBI")


class FileContent(Message, frozen=True, kw_only=True):
    name: str
    num_bytes: int
    digests: bytes  # SHA-256 of each block, one after another

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // BLOCK_BYTES)

    def block_bytes(self, block: int) -> int:
        """The size of a block: BLOCK_BYTES, or less for the last."""
        return min(BLOCK_BYTES, self.num_bytes - block * BLOCK_BYTES)

    def digest_of(self, block: int) -> bytes:
        return self.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]


class DirectoryManifest(Message, frozen=True, kw_only=True):
    """The files of a version's directory."""

    run_id: str
    version: int
    files: tuple[FileContent, ...]  # sorted by name

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def reference(self) -> "VersionReference":
        digest = hashlib.sha256(encode(self)).digest()
        return VersionReference(run_id=self.run_id, version=self.version, digest=digest)


class VersionReference(Message, frozen=True, kw_only=True):
    """One version, and by its manifest's digest one content of it."""

    run_id: str
    version: int
    digest: bytes


class HeldVersions(Message, frozen=True, kw_only=True):
    """The versions that a receiver has completely."""

    versions: tuple[VersionReference, ...]


class PatchHeader(Message, frozen=True, kw_only=True):
    target: DirectoryManifest
    base: VersionReference | None = None  # None: the patch has every block


class Encoding(IntEnum):
    RAW = 0
    SPARSE = 1


class BlockHeader(NamedTuple):
    file: int  # its place in the manifest
    block: int
    encoding: int
    num_bytes: int  # the length of the content that follows

    def pack(self) -> bytes:
        return _BLOCK.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        return cls(*_BLOCK.unpack(packed))


BLOCK_HEADER_BYTES = _BLOCK.size


class Readable(Protocol):
    def read(self, num_bytes: int, /) -> bytes: ...


def pack_header(header: PatchHeader) -> bytes:
    body = encode(header)
    return MAGIC + _LENGTH.pack(len(body)) + body


def read_header(stream: Readable) -> PatchHeader:
    """The header. Raises MalformedMessage for anything that is not a patch, and for a manifest with a path outside of its directory."""
    opening = _read_exactly(stream, len(MAGIC) + _LENGTH.size)
    if not opening.startswith(MAGIC):
        raise MalformedMessage("this is not a weight patch")
    (length,) = _LENGTH.unpack(opening[len(MAGIC) :])
    if length > MAX_HEADER_BYTES:
        raise MalformedMessage(f"the patch claims a header of {length} bytes")
    header = decode(_read_exactly(stream, length), PatchHeader)
    _check(header.target)
    return header


def read_blocks(stream: Readable, target: DirectoryManifest) -> Iterator[tuple[BlockHeader, bytes]]:
    """The blocks after the header, to the end of the stream. Raises MalformedMessage for a truncated block, or one in the wrong order."""
    last = (-1, -1)
    while opening := stream.read(BLOCK_HEADER_BYTES):
        header = BlockHeader.unpack(opening + _read_exactly(stream, BLOCK_HEADER_BYTES - len(opening)))
        place = (header.file, header.block)
        if place <= last or header.file >= len(target.files):
            raise MalformedMessage(f"block {place} of the patch is out of place")
        if header.block >= target.files[header.file].num_blocks or header.num_bytes > 2 * BLOCK_BYTES:
            raise MalformedMessage(f"block {place} of the patch does not fit its file")
        yield header, _read_exactly(stream, header.num_bytes)
        last = place


def _check(manifest: DirectoryManifest) -> None:
    names = [manifest.run_id, *(file.name for file in manifest.files)]
    for name in names:
        if not name or name.startswith(".") or "/" in name or "\0" in name:
            raise MalformedMessage(f"{name!r} is not a plain file name")
    if len(set(names[1:])) != len(manifest.files) or len(manifest.files) > MAX_FILES or manifest.version < 0:
        raise MalformedMessage("the manifest names a file twice, has too many files, or a negative version")
    for file in manifest.files:
        if file.num_bytes < 0 or len(file.digests) != file.num_blocks * DIGEST_BYTES:
            raise MalformedMessage(f"the manifest's digests of {file.name} are not one for each block")


def _read_exactly(stream: Readable, num_bytes: int) -> bytes:
    content = stream.read(num_bytes)
    if len(content) < num_bytes:
        raise MalformedMessage(f"the patch breaks off {num_bytes - len(content)} bytes early")
    return content


def bounded_map(pool: Executor, function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Iterator[R]:
    """Calls `function` in the pool, and yields the results in the order of the items, with at most `ahead` calls outstanding.

    Raises what the function or the iterable raises, after all running calls have ended.
    """
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for call in waiting:
            call.cancel()
        for call in waiting:
            if not call.cancelled():
                call.exception()
