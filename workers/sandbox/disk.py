"""Room on an engine's disk: kept free for the host, and bounded for each container.

No quota of the kernel's can be counted on, for overlay2 has one only on XFS mounted with `pquota`. So one file is bounded by the
container's own limit, at once, and all files together by looking: a container that has written more than it may loses what
runs in it, and one that has written twice as much is ended. The looks are as frequent as free space goes, where the engine's data
can be seen from here, and otherwise by the clock. What no look sees, files that are open and deleted, or empty ones by the million, is
bounded by the host's own room alone: below a quarter of what is to be free, every container of ours is ended.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import SandboxError
from workers.images.sizes import show_bytes

if TYPE_CHECKING:
    from workers.sandbox.docker import DockerSandboxes

LOOK_S = 1.0  # at free space, which costs nothing
MEASURE_S = 60.0  # at what containers have written, at the latest: the engine walks their files
UNSEEN_MEASURE_S = 10.0  # the same where free space cannot be seen
SHARE = 8  # containers are measured each time as much is gone as this part of what one may write
DIRE = 4
MIN_FREE_FILES = 20_000


@dataclass(frozen=True, slots=True)
class Room:
    """What the file system of `place` has, and what is free on it for those who are not root."""

    place: Path
    num_bytes: int
    free_bytes: int
    num_files: int  # 0: as many as there is room for
    free_files: int

    @classmethod
    def at(cls, place: Path) -> "Room":
        """Raises SandboxError if it cannot be told."""
        try:
            found = os.statvfs(place)
        except OSError as error:
            raise SandboxError(f"free space at {place} cannot be told: {error}") from error
        block = found.f_frsize
        return cls(place, found.f_blocks * block, found.f_bavail * block, found.f_files, found.f_favail)

    def short_of(self, min_free_bytes: int, min_free_files: int) -> str:
        """What there is too little of, for people; "" if there is enough."""
        if self.free_bytes < min_free_bytes:
            return (
                f"{self.place} has {show_bytes(self.free_bytes)} free, less than {show_bytes(min_free_bytes)}"
            )
        if self.num_files and self.free_files < min_free_files:
            return f"{self.place} has room for {self.free_files:,} more files, less than {min_free_files:,}"
        return ""


async def check_temporary(min_free_bytes: int) -> None:
    """Raises SandboxError if the worker's temporary directory has less free than that, and than a twentieth of it: a small
    one may be as small as it likes.
    """
    room = Room.at(Path(tempfile.gettempdir()))
    _insist(room.short_of(min(min_free_bytes, room.num_bytes // 20), 0))


def _insist(short: str) -> None:
    if short:
        raise SandboxError(f"{short} (SWERVE_MIN_FREE_BYTES)")


class DiskWatch:
    """Of one engine."""

    def __init__(self, sandboxes: "DockerSandboxes") -> None:
        self._sandboxes = sandboxes
        self._measured_at = time.monotonic()
        self._most_free = 0  # bytes, since containers were measured last

    async def check(self) -> None:
        """Raises SandboxError if the engine's disk is seen to have too little room."""
        root = await self._sandboxes.engine.data_root()
        if root is not None and self._sandboxes.disk.min_free_bytes:
            _insist(Room.at(root).short_of(self._sandboxes.disk.min_free_bytes, MIN_FREE_FILES))

    async def watch(self) -> None:
        """Endless."""
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(SandboxError):  # an engine that is out has a breaker to notice it
                await self.look()

    async def look(self) -> None:
        """Ends what has written too much. Raises SandboxError."""
        names = self._sandboxes.open_names()
        if not names:
            self._most_free = 0
            return
        root = await self._sandboxes.engine.data_root()
        room = Room.at(root) if root is not None else None
        if room is not None and self._sandboxes.disk.min_free_bytes:
            short = room.short_of(self._sandboxes.disk.min_free_bytes // DIRE, MIN_FREE_FILES // DIRE)
            if short:
                for name in names:
                    await self._sandboxes.end(name, f"{short}: every episode here was ended")
                return
        if self._sandboxes.disk.max_written_bytes and self._is_due(room):
            await self._measure(names)

    def _is_due(self, room: Room | None) -> bool:
        """Whether a container may have written much since the last time."""
        now = time.monotonic()
        since_s = now - self._measured_at
        if room is None:
            due = since_s >= UNSEEN_MEASURE_S
        else:
            # What others give back meanwhile hides nothing for longer than a look.
            self._most_free = max(self._most_free, room.free_bytes)
            gone = self._most_free - room.free_bytes
            due = since_s >= MEASURE_S or gone >= self._sandboxes.disk.max_written_bytes // SHARE
        if due:
            self._measured_at, self._most_free = now, room.free_bytes if room else 0
        return due

    async def _measure(self, names: list[str]) -> None:
        most = self._sandboxes.disk.max_written_bytes
        for name, written in (await self._sandboxes.engine.written_bytes(names)).items():
            if written > 2 * most:
                why = f"it wrote {show_bytes(written)}, more than twice {show_bytes(most)} (SWERVE_MAX_WRITTEN_BYTES)"
                await self._sandboxes.end(name, why)
            elif written > most:
                await self._sandboxes.interrupt(name)
