"""A file system of a few kilobytes, so that a disk is really full."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(place: Path, num_bytes: int) -> Iterator[Path]:
    """`place` is the mount point of a file system of so many bytes in the block. Needs root, as Docker's daemon does."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(place)],
        check=True,
    )
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, *, leaving: int = 0) -> None:
    """Take up all space but so many bytes."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            filler.truncate(max(filler.tell() - leaving, 0))
