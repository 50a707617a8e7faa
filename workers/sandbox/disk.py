"""Disk space of a Docker host: keeps some free for the host itself, and limits what each container writes.

A kernel quota is not available in general, because overlay2 has one only on XFS mounted with `pquota`. So the container's own limit bounds
a single file, at once, and all files of a container together are measured from time to time: a container over its limit loses its
processes, and one over twice its limit is removed. Measurements follow the decrease of free space if this machine can see the Docker host's
data, and otherwise the clock. Some use of space is not measured (files that are open and deleted, empty files by the million). It is
bounded only by the free space of the host: below a quarter of what must stay free, all our containers there are removed.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import SandboxError, SandboxRuined
from workers.images.names import show_bytes


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """The size of the file system of `place`, and its free space for users other than root."""

    place: Path
    num_bytes: int
    free_bytes: int
    num_files: int  # 0: the file system has no such limit
    free_files: int

    @classmethod
    def at(cls, place: Path) -> "FreeSpace":
        """The free space at a path. Raises SandboxError if the file system cannot be queried."""
        try:
            found = os.statvfs(place)
        except OSError as error:
            raise SandboxError(f"free space at {place} cannot be read: {error}") from error
        block = found.f_frsize
        return cls(place, found.f_blocks * block, found.f_bavail * block, found.f_files, found.f_favail)

    def short_of(self, min_free_bytes: int, min_free_files: int) -> str:
        """The resource that is short, as text; "" if none is."""
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


if TYPE_CHECKING:
    from workers.sandbox.docker import DockerSandboxes


LOOK_S = 1.0  # pause between looks at free space, which cost nothing
# Longest time between measurements of containers, for which the Docker host walks their files.
MEASURE_S = 60.0
UNSEEN_MEASURE_S = 10.0  # the same where free space cannot be seen
# Containers are measured whenever free space has shrunk by the limit of one container divided by this.
SHARE = 8
CRITICAL = 4  # all containers are removed if less than the required free space divided by this is free
MIN_FREE_FILES = 20_000


class DiskWatch:
    """Watches the disk of one Docker host."""

    def __init__(self, sandboxes: "DockerSandboxes") -> None:
        self._sandboxes = sandboxes
        self._measured_at = time.monotonic()
        self._most_free_bytes = 0  # largest value since containers were last measured

    async def check(self) -> None:
        """Raises SandboxError if the Docker host's disk is visible and has too little free."""
        root = await self._sandboxes.api.data_root()
        if root is not None and self._sandboxes.disk.min_free_bytes:
            refuse_if_short(FreeSpace.at(root).short_of(self._sandboxes.disk.min_free_bytes, MIN_FREE_FILES))

    async def watch(self) -> None:
        """Calls `look` again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(SandboxError):  # the host's breaker notices an outage
                await self.look()

    async def look(self) -> None:
        """Kills or removes the containers that have written too much. Raises SandboxError."""
        names = self._sandboxes.open_names()
        if not names:
            self._most_free_bytes = 0
            return
        root = await self._sandboxes.api.data_root()
        space = FreeSpace.at(root) if root is not None else None
        if space is not None and self._sandboxes.disk.min_free_bytes:
            short = space.short_of(
                self._sandboxes.disk.min_free_bytes // CRITICAL, MIN_FREE_FILES // CRITICAL
            )
            if short:
                for name in names:
                    await self._sandboxes.end(
                        name, SandboxError(f"{short}: every container here was removed")
                    )
                return
        if self._sandboxes.disk.max_written_bytes and self._is_due(space):
            await self._measure(names)

    def _is_due(self, space: FreeSpace | None) -> bool:
        """Whether a container may have written much since the last measurement."""
        now = time.monotonic()
        since_s = now - self._measured_at
        if space is None:
            due = since_s >= UNSEEN_MEASURE_S
        else:
            # Compare with the largest free space seen, so that space freed by other programs hides what containers write for one look only.
            self._most_free_bytes = max(self._most_free_bytes, space.free_bytes)
            gone = self._most_free_bytes - space.free_bytes
            due = since_s >= MEASURE_S or gone >= self._sandboxes.disk.max_written_bytes // SHARE
        if due:
            self._measured_at, self._most_free_bytes = now, space.free_bytes if space else 0
        return due

    async def _measure(self, names: list[str]) -> None:
        most = self._sandboxes.disk.max_written_bytes
        for name, written in (await self._sandboxes.api.written_bytes(names)).items():
            if written > 2 * most:
                too_much = f"more than twice {show_bytes(most)} (SWERVE_MAX_WRITTEN_BYTES)"
                why = f"the container was removed: it wrote {show_bytes(written)}, {too_much}"
                await self._sandboxes.end(name, SandboxRuined(why))
            elif written > most:
                await self._sandboxes.interrupt(name)
