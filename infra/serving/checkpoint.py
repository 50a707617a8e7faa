"""Checks that the weight files of a checkpoint are complete, before a server that takes minutes to start finds out.

Only headers are read, so 140 GB take milliseconds. It finds files that are missing, truncated, too long, or not weights at
all (a Git LFS pointer, a page of HTML), and headers that contradict themselves. It does not find wrong numbers.
"""

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
LFS_POINTER = b"version https://git-lfs"
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
BITS |= {"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
BITS |= {"I64": 64, "U64": 64, "F64": 64, "C64": 64}


def check(directory: Path) -> None:
    """Raises ValueError naming the file, what is wrong with it, and the fix."""
    if not directory.is_dir():
        raise ValueError(f"{directory}: there is no such directory; give the directory of a checkpoint")
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory}: no config.json in it; give the directory of a checkpoint")
    found = {path.name: _tensors(path) for path in sorted(directory.glob("*.safetensors"))}
    index = directory / INDEX
    if not index.is_file():
        return
    for tensor, name in _weight_map(index).items():
        if name not in found:
            raise ValueError(f"{index} names {name}, which is not there; copy or download it")
        if tensor not in found[name]:
            raise ValueError(
                f"{index} looks for {tensor} in {name}, which does not hold it; they are of different checkpoints"
            )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index}: it is no index of weights ({error!r}); copy or download it again"
        ) from error


def _tensors(path: Path) -> set[str]:
    """The names in one file. Raises ValueError if it is not whole."""
    try:
        header, size = _header(path)
        extents = sorted(_extents(header))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: its header is damaged ({error!r}); copy or download it again") from error
    end = 0
    for begin, stop, name in extents:
        if begin != end:
            raise ValueError(
                f"{path}: {name} begins at byte {begin} and not at {end}; copy or download it again"
            )
        end = stop
    if end != size:
        change = "cut short" if size < end else "longer than it says"
        raise ValueError(
            f"{path}: it is {change}: {size:,} of {end:,} bytes of tensors; copy or download it again"
        )
    return {name for _, _, name in extents}


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and how many bytes follow it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if length <= min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
            return json.loads(file.read(length)), size - LENGTH_BYTES - length
        start += file.read(len(LFS_POINTER))
    if start.startswith(LFS_POINTER):
        raise ValueError(
            f"{path}: it is a Git LFS pointer and not the weights; run `git lfs pull` where it came from"
        )
    raise ValueError(
        f"{path}: {size:,} bytes that are no safetensors file, or its very start; copy or download it again"
    )


def _extents(header: dict[str, Any]) -> Iterator[tuple[int, int, str]]:
    """First byte, byte past the last, and name of each tensor. Raises KeyError, TypeError for what is none."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, stop = entry["data_offsets"]
        bits = BITS.get(entry["dtype"])  # a type newer than this list is left to the server
        if bits is not None and stop - begin != (prod(entry["shape"]) * bits + 7) // 8:
            raise TypeError(f"{name} of {entry['dtype']} {entry['shape']} in {stop - begin} bytes")
        yield begin, stop, name
