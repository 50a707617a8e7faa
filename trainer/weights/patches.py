"""Patches between the directories of weight versions: what the trainer sends instead of whole versions.

`pipeline/weight_patch.py` describes the format. Files are read block by block on several threads; no more than a few blocks are in
memory at a time. numpy, no torch.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard

from pipeline.bounded_map import bounded_map
from pipeline.weight_patch import (
    BLOCK_BYTES,
    BLOCK_HEADER_BYTES,
    BlockHeader,
    DirectoryManifest,
    Encoding,
    FileContent,
    PatchHeader,
    pack_header,
)

NUM_THREADS = min(16, os.cpu_count() or 1)
_NUM_GAPS = struct.Struct("<I")


class _Place(NamedTuple):
    """A block of the target, and the file of the base that has its predecessor, if there is one."""

    file: int
    block: int
    path: Path
    base: Path | None


def manifest_of(directory: Path, run_id: str, version: int) -> DirectoryManifest:
    """Describe a directory. Raises ValueError if there is a directory in it."""
    paths = sorted(directory.iterdir())
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is no file; a weight version is a flat directory")
    with ThreadPoolExecutor(NUM_THREADS, "manifest") as pool:
        return DirectoryManifest(
            run_id=run_id, version=version, files=tuple(_content_of(path, pool) for path in paths)
        )


def _content_of(path: Path, pool: Executor) -> FileContent:
    num_bytes = path.stat().st_size
    blocks = range(-(-num_bytes // BLOCK_BYTES))
    digests = bounded_map(pool, lambda block: _digest(_read(path, block)), blocks, ahead=2 * NUM_THREADS)
    return FileContent(name=path.name, num_bytes=num_bytes, digests=b"".join(digests))


def write_patch(
    path: Path, target: tuple[DirectoryManifest, Path], base: tuple[DirectoryManifest, Path]
) -> int:
    """Write the patch that makes the target's directory from the base's. Returns its size; the file appears when it is whole."""
    partial = path.with_name(f".{path.name}.partial")
    header = PatchHeader(target=target[0], base=base[0].reference)
    with partial.open("wb") as file, ThreadPoolExecutor(NUM_THREADS, "patch") as pool:
        file.write(pack_header(header))
        for block in bounded_map(pool, _encoded, _places(target, base), ahead=2 * NUM_THREADS):
            file.write(block)
        num_bytes = file.tell()
    partial.rename(path)
    return num_bytes


def whole(target: DirectoryManifest, directory: Path) -> tuple[int, Iterator[bytes]]:
    """The size and the pieces of the patch that needs no base."""
    header = pack_header(PatchHeader(target=target))
    num_blocks = sum(file.num_blocks for file in target.files)
    num_bytes = len(header) + num_blocks * BLOCK_HEADER_BYTES + target.num_bytes
    return num_bytes, _whole_pieces(header, target, directory)


def _whole_pieces(header: bytes, target: DirectoryManifest, directory: Path) -> Iterator[bytes]:
    yield header
    for file, block, path, _ in _places((target, directory), None):
        yield _raw(file, block, _read(path, block))


def _places(
    target: tuple[DirectoryManifest, Path], base: tuple[DirectoryManifest, Path] | None
) -> Iterator[_Place]:
    """Every block of the target whose content the base has not in the same place."""
    manifest, directory = target
    known = {} if base is None else {file.name: file for file in base[0].files}
    for number, file in enumerate(manifest.files):
        before = known.get(file.name)
        if before is None or before.num_bytes != file.num_bytes:
            before = None
        for block in range(file.num_blocks):
            if before is None or base is None:
                yield _Place(number, block, directory / file.name, None)
            elif before.digest_of(block) != file.digest_of(block):
                yield _Place(number, block, directory / file.name, base[1] / file.name)


def _encoded(place: _Place) -> bytes:
    new = _read(place.path, place.block)
    if place.base is None or len(new) % 2:
        return _raw(place.file, place.block, new)
    sparse = encode_sparse(_read(place.base, place.block), new)
    if len(sparse) >= len(new):
        return _raw(place.file, place.block, new)
    return BlockHeader(place.file, place.block, Encoding.SPARSE, len(sparse)).pack() + sparse


def encode_sparse(old: bytes, new: bytes) -> bytes:
    """The words of `new` that differ from those of `old`, which has the same even length."""
    before, after = np.frombuffer(old, dtype="<u2"), np.frombuffer(new, dtype="<u2")
    positions = np.flatnonzero(before != after)
    difference = after[positions] - before[positions]
    zigzag = ((difference << 1) ^ (0 - (difference >> 15))).astype(np.uint16)
    unchanged = np.diff(positions, prepend=-1) - 1
    # One byte for each changed word, after as many bytes of 255 as its distance holds 255s.
    skips, rest = np.divmod(unchanged, 255)
    ends = np.cumsum(skips + 1)
    gaps = np.full(int(ends[-1]) if len(ends) else 0, 255, dtype=np.uint8)
    gaps[ends - 1] = rest
    low, high = (zigzag & 0xFF).astype(np.uint8), (zigzag >> 8).astype(np.uint8)
    plain = b"".join((_NUM_GAPS.pack(len(gaps)), gaps.tobytes(), low.tobytes(), high.tobytes()))
    return zstandard.ZstdCompressor(level=1).compress(plain)


def _raw(file: int, block: int, content: bytes) -> bytes:
    return BlockHeader(file, block, Encoding.RAW, len(content)).pack() + content


def _read(path: Path, block: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(block * BLOCK_BYTES)
        return _read_up_to(file.fileno(), BLOCK_BYTES)


def _read_up_to(descriptor: int, num_bytes: int) -> bytes:
    pieces: list[bytes] = []
    while num_bytes and (piece := os.read(descriptor, num_bytes)):
        pieces.append(piece)
        num_bytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def unused_patches(directory: Path, kept: Iterable[int]) -> list[Path]:
    """The patch files in a directory whose target or base is no longer kept."""
    versions = {f"{version:06d}" for version in kept}
    return [path for path in directory.glob("*.patch") if not set(path.stem.split("-")) <= versions]
