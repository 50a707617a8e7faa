"""Weights through a receiver on each engine host: only the blocks that changed are sent, and no file system is shared.

The trainer exports each version to its own disk. A receiver (`infra/serving/receiver`) says which versions it has; it is sent the
patch from the newest of them that the trainer still has too, and makes the version's directory from it on local disk, checked by hash.
The engines of that host load it from there. What gets in the way (a receiver that is new, has lost its base or has another) is answered
with the whole version, and a line in the log.
"""

import asyncio
import logging
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from pipeline.weight_patch import DirectoryManifest, VersionReference
from pipeline.weights import WeightVersion, version_name
from trainer.weights import patches
from trainer.weights.disk import DiskTransport
from trainer.weights.engines import EngineFailure, Engines, PauseMode, Served
from trainer.weights.receivers import PatchRefused, Receivers

log = logging.getLogger("swerve.weights")


class _Exported(NamedTuple):
    """A version on the trainer's disk."""

    manifest: DirectoryManifest
    directory: Path


class DeltaTransport:
    """A `WeightTransport`."""

    def __init__(self, disk: DiskTransport, receivers: Receivers, *, directory: Path) -> None:
        """`disk` makes versions ready; patches between them are kept in `directory`."""
        self._disk = disk
        self._receivers = receivers
        self._directory = directory
        self._exported: dict[int, asyncio.Task[_Exported]] = {}
        self._patches: dict[tuple[int, int], asyncio.Task[Path]] = {}
        # One delivery to a host at a time; its other engines find the version there.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def prepare(self, version: int, step: int) -> WeightVersion:
        return await self._disk.prepare(version, step)

    async def is_available(self, version: WeightVersion) -> bool:
        return await self._disk.is_available(version)

    def is_current(self, served: Served, version: WeightVersion) -> bool:
        """A receiver names directories after run and version."""
        return Path(served.model_path).name == f"{version.run_id}@v{version.version:06d}"

    async def prefetch(self, engine_url: str, version: WeightVersion) -> None:
        """Make the version's directory on the engine's host. Raises EngineFailure."""
        url = self._receivers.url_beside(engine_url)
        try:
            async with self._turns[url]:
                target = await self._exported_version(
                    version.run_id, version.version, Path(version.directory)
                )
                held = await self._receivers.held(url)
                if target.manifest.reference in held:
                    return
                if not await self._send_changes(url, target, held):
                    await self._send_whole(url, target)
        except OSError as error:
            raise EngineFailure(f"weights v{version.version} cannot be sent to {url}: {error}") from error

    async def deliver(
        self, engines: Engines, engine_url: str, version: WeightVersion, mode: PauseMode
    ) -> None:
        await self.prefetch(engine_url, version)
        url = self._receivers.url_beside(engine_url)
        directory = await self._receivers.directory_of(url, version.run_id, version.version)
        if directory is None:
            raise EngineFailure(f"{url} has removed weights v{version.version} already")
        name = version_name(version.run_id, version.version)
        await engines.update(engine_url, directory=directory, weight_version=name, mode=mode)

    async def discard_old(self, oldest_needed: int) -> None:
        await self._disk.discard_old(oldest_needed)
        kept = await asyncio.to_thread(self._disk.kept_versions)
        self._exported = {version: task for version, task in self._exported.items() if version in kept}
        self._patches = {pair: task for pair, task in self._patches.items() if {*pair} <= kept}
        for path in patches.unused_patches(self._directory, kept):
            path.unlink(missing_ok=True)

    async def _send_changes(self, url: str, target: _Exported, held: tuple[VersionReference, ...]) -> bool:
        """Send a patch from a version that the receiver has. False if a whole version has to be sent instead."""
        version, run_id = target.manifest.version, target.manifest.run_id
        base = await self._newest_base(target, held)
        if base is None:
            log.info("weights v%d to %s: whole, it has no version that this run still has", version, url)
            return False
        patch = await self._patch(target, base)
        num_bytes = patch.stat().st_size
        try:
            await self._receivers.send_file(url, run_id, version, patch)
        except PatchRefused as error:
            log.warning(
                "weights v%d to %s: the changes since v%d were refused, so it is sent whole: %s",
                *(version, url, base.manifest.version, error),
            )
            return False
        log.info(
            "weights v%d to %s: %d bytes, the changes since v%d",
            version,
            url,
            num_bytes,
            base.manifest.version,
        )
        return True

    async def _send_whole(self, url: str, target: _Exported) -> None:
        manifest = target.manifest
        num_bytes, pieces = patches.whole(manifest, target.directory)
        await self._receivers.send_whole(url, manifest.run_id, manifest.version, num_bytes, pieces)
        log.info("weights v%d to %s: %d bytes, whole", manifest.version, url, num_bytes)

    async def _newest_base(self, target: _Exported, held: tuple[VersionReference, ...]) -> _Exported | None:
        """The newest version that both sides have, with equal content."""
        run_id = target.manifest.run_id
        for reference in sorted(held, key=lambda reference: reference.version, reverse=True):
            directory = self._disk.directory_of(reference.version)
            if reference.run_id != run_id or not directory.is_dir():
                continue
            base = await self._exported_version(run_id, reference.version, directory)
            if base.manifest.reference == reference:
                return base
            log.warning("v%d of a receiver has another content than the trainer's", reference.version)
        return None

    async def _exported_version(self, run_id: str, version: int, directory: Path) -> _Exported:
        """Hashed once, also if several deliveries need it at the same time."""
        task = self._exported.get(version)
        if task is None or _has_failed(task):
            task = asyncio.create_task(_describe(directory, run_id, version))
            self._exported[version] = task
        return await asyncio.shield(task)

    async def _patch(self, target: _Exported, base: _Exported) -> Path:
        """Written once. A file that somebody removed is written again."""
        pair = (base.manifest.version, target.manifest.version)
        task = self._patches.get(pair)
        if task is None or _has_failed(task) or (task.done() and not task.result().exists()):
            path = self._directory / f"{pair[0]:06d}-{pair[1]:06d}.patch"
            task = asyncio.create_task(asyncio.to_thread(_write, path, target, base))
            self._patches[pair] = task
        return await asyncio.shield(task)


async def _describe(directory: Path, run_id: str, version: int) -> _Exported:
    manifest = await asyncio.to_thread(patches.manifest_of, directory, run_id, version)
    return _Exported(manifest, directory)


def _write(path: Path, target: _Exported, base: _Exported) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    patches.write_patch(path, target, base)
    return path


def _has_failed(task: "asyncio.Task[_Exported] | asyncio.Task[Path]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
