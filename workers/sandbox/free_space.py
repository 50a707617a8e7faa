"""Free space on a file system of this machine, and whether it is enough."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import SandboxError
from workers.images.sizes import show_bytes


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Size of the file system of `place`, and what is free on it for users other than root."""

    place: Path
    num_bytes: int
    free_bytes: int
    num_files: int  # 0: the file system has no such limit
    free_files: int

    @classmethod
    def at(cls, place: Path) -> "FreeSpace":
        """Raises SandboxError if the file system cannot be queried."""
        try:
            found = os.statvfs(place)
        except OSError as error:
            raise SandboxError(f"free space at {place} cannot be read: {error}") from error
        block = found.f_frsize
        return cls(place, found.f_blocks * block, found.f_bavail * block, found.f_files, found.f_favail)

    def short_of(self, min_free_bytes: int, min_free_files: int) -> str:
        """What is short, for people; "" if nothing is."""
        if self.free_bytes < min_free_bytes:
            return (
                f"{self.place} has {show_bytes(self.free_bytes)} free, less than {show_bytes(min_free_bytes)}"
            )
        if self.num_files and self.free_files < min_free_files:
            return f"{self.place} has room for {self.free_files:,} more files, less than {min_free_files:,}"
        return ""


async def check_temporary(min_free_bytes: int) -> None:
    """Raises SandboxError if the worker's temporary directory has less free than `min_free_bytes`, or than a twentieth of its file
    system if that is smaller.
    """
    space = FreeSpace.at(Path(tempfile.gettempdir()))
    refuse_if_short(space.short_of(min(min_free_bytes, space.num_bytes // 20), 0))


def refuse_if_short(short: str) -> None:
    """Raises SandboxError unless `short`, from `FreeSpace.short_of`, is empty."""
    if short:
        raise SandboxError(f"{short} (SWERVE_MIN_FREE_BYTES)")
