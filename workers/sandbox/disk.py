"""Disk space of a Docker host: keeps some free for the host itself, and limits what each container writes.

We cannot rely on a quota of the kernel, because overlay2 has one only on XFS mounted with `pquota`. So the container's own limit bounds a
single file at once, and we measure all files of a container together from time to time: a container over its limit loses its processes,
and one over twice its limit is removed. We measure as often as free space shrinks where this machine can see the Docker host's data, and
otherwise by the clock. Some use of space is not measured (files that are open and deleted, empty files by the million). It is bounded only
by the free space of the host: below a quarter of what must stay free, we remove all our containers there.
"""

import asyncio
import contextlib
import time

from pipeline.errors import SandboxError, SandboxRuined
from workers.images.sizes import show_bytes
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.free_space import FreeSpace, refuse_if_short

LOOK_S = 1.0  # between looks at free space, which cost nothing
# Longest time between measurements of containers, for which the Docker host walks their files.
MEASURE_S = 60.0
UNSEEN_MEASURE_S = 10.0  # the same where free space cannot be seen
SHARE = 8  # containers are measured each time free space shrinks by this part of what one may write
CRITICAL = 4  # all containers are removed below this part of what must stay free
MIN_FREE_FILES = 20_000


class DiskWatch:
    """Watches the disk of one Docker host."""

    def __init__(self, sandboxes: "DockerSandboxes") -> None:
        self._sandboxes = sandboxes
        self._measured_at = time.monotonic()
        self._most_free_bytes = 0  # since containers were measured last

    async def check(self) -> None:
        """Raises SandboxError if the Docker host's disk is visible and has too little free."""
        root = await self._sandboxes.api.data_root()
        if root is not None and self._sandboxes.disk.min_free_bytes:
            refuse_if_short(FreeSpace.at(root).short_of(self._sandboxes.disk.min_free_bytes, MIN_FREE_FILES))

    async def watch(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(SandboxError):  # the host's breaker notices an outage
                await self.look()

    async def look(self) -> None:
        """Kill or remove what has written too much. Raises SandboxError."""
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
            # Compare with the most that was free, so that space which others release hides nothing for longer than one look.
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
