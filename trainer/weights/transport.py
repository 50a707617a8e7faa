"""The interface of transports, which deliver weights from the learner to one engine, and the first transport: a directory that the trainer
writes and every engine reads under the same path. The others send changes to a receiver on the engine's host (`delta.py`) or broadcast
(`distributed.py`). With `adapters.py` in front of one of them, a version is the run's adapters alone.

A directory is complete and forced to disk before its name exists. A version that is being written has a hidden name.

A further transport is a class with the methods of `WeightTransport` in a file of its own, chosen in `publish.py`.
"""

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline.weights import WeightVersion
from trainer.learner import directories
from trainer.weights.engines import Engines, PauseMode, Served


class WeightTransport(Protocol):
    """The transport of one run. It makes one version ready at a time; deliveries to several engines, even of different versions, may run at
    the same time.
    """

    async def prepare(self, version: int, step: int) -> WeightVersion:
        """Make the learner's present weights ready for delivery under a number, before they are announced."""
        ...

    async def is_available(self, version: WeightVersion) -> bool:
        """Whether an earlier version can still be delivered, even one that an earlier trainer made ready."""
        ...

    async def served(self, engines: Engines, engine_url: str, version: WeightVersion) -> Served:
        """The weights from which the engine samples: `version`, if it has that. Raises EngineFailure."""
        ...

    def is_current(self, served: Served, version: WeightVersion) -> bool:
        """Whether this transport delivered `version` to an engine that reports its name."""
        ...

    def needs_pause(self, engine_url: str) -> bool:
        """Whether the engine must not sample while it takes a version; as of the last call of `served`."""
        ...

    async def prefetch(self, engine_url: str, version: WeightVersion) -> None:
        """Bring the bytes of `version` to the engine's host while the engine still samples, so that the pause is short.

        Raises EngineFailure. `deliver` does this itself if it was not called.
        """
        ...

    async def deliver(
        self, engines: Engines, engine_url: str, version: WeightVersion, mode: PauseMode
    ) -> None:
        """Make the engine load `version`. It is paused if `needs_pause` says so. Raises EngineFailure."""
        ...

    async def tidy(self, engines: Engines, engine_url: str, oldest_named: int) -> None:
        """Frees the engine's memory of versions before `oldest_named`, the oldest that a request may still name."""
        ...

    async def discard_old(self, oldest_needed: int) -> None:
        """Frees the space of older versions. Engines may still have to load `oldest_needed` and later versions."""
        ...


Export = Callable[[Path], object]
"""Writes the learner's weights as a Hugging Face directory at the given path. It may block; a thread calls it."""


class Whole:
    """The part that is common to transports of whole weights, of which an engine has one version at a time."""

    async def served(self, engines: Engines, engine_url: str, version: WeightVersion) -> Served:
        return await engines.served(engine_url)

    def needs_pause(self, engine_url: str) -> bool:
        return True

    async def tidy(self, engines: Engines, engine_url: str, oldest_named: int) -> None:
        """Does nothing: a version takes the place of the one before."""


class DiskTransport(Whole):
    """A `WeightTransport`. Keeps the `keep` newest versions in `directory`."""

    def __init__(self, run_id: str, *, directory: Path, export: Export, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(
                f"weights.keep must be 1 or more, not {keep}: the engines read the newest version from disk"
            )
        self._run_id = run_id
        self._directory = directory.absolute()
        self._export = export
        self._keep = keep

    async def prepare(self, version: int, step: int) -> WeightVersion:
        """Exports the weights. Raises the errors of the export; the version then has no directory."""
        return await asyncio.to_thread(self._write, version, step)

    async def is_available(self, version: WeightVersion) -> bool:
        return await asyncio.to_thread(Path(version.directory).is_dir)

    def is_current(self, served: Served, version: WeightVersion) -> bool:
        """Whether the engine serves this version from this directory: an engine started from another directory may report the same name by
        chance.
        """
        return served.model_path == version.directory

    async def prefetch(self, engine_url: str, version: WeightVersion) -> None:
        """Does nothing: engines read the trainer's directory."""

    async def deliver(
        self, engines: Engines, engine_url: str, version: WeightVersion, mode: PauseMode
    ) -> None:
        await engines.update(engine_url, version, directory=version.directory, mode=mode)

    async def discard_old(self, oldest_needed: int) -> None:
        """Remove all but the newest versions and those that are needed."""
        await asyncio.to_thread(_prune, self._directory, self._keep, oldest_needed)

    def directory_of(self, version: int) -> Path:
        """The directory of a version, if it is kept."""
        return self._directory / _name(version)

    def kept_versions(self) -> set[int]:
        return {int(path.name[1:]) for path in self._directory.glob("v[0-9]*")}

    def _write(self, version: int, step: int) -> WeightVersion:
        target = self.directory_of(version)
        partial = self._directory / f".{target.name}.writing"
        # A trainer that died before it could announce the version left them
        for leftover in (partial, target):
            shutil.rmtree(leftover, ignore_errors=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._export(partial)
        num_bytes = _seal(partial)
        partial.rename(target)
        directories.sync(self._directory)
        return WeightVersion(
            run_id=self._run_id,
            version=version,
            step=step,
            directory=str(target),
            num_bytes=num_bytes,
            published_at=time.time(),
        )


def _seal(directory: Path) -> int:
    """Forces every file to disk. Returns the weight files' size."""
    num_bytes = 0
    for path in directory.iterdir():
        if path.is_file():
            if path.suffix == ".safetensors":
                num_bytes += path.stat().st_size
            directories.sync(path)
    directories.sync(directory)
    if not num_bytes:
        raise ValueError(f"{directory}: the export left no .safetensors file")
    return num_bytes


def _prune(directory: Path, keep: int, oldest_needed: int) -> None:
    for old in sorted(directory.glob("v[0-9]*"))[:-keep]:
        if old.name < _name(oldest_needed):
            shutil.rmtree(old)


def _name(version: int) -> str:
    return f"v{version:06d}"
