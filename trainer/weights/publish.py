"""A new version of the weights: written, announced, loaded by the engines, confirmed by them, recorded.

Promises. A directory is complete and on disk before its name exists, and before anybody is told of it. An
engine that was paused is told to go on, whatever happened in between. An engine that does not confirm a
version takes no requests until it confirms a later one, unless no engine at all confirms: then routing stays
as it was, and the caller is told.
"""

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from pathlib import Path

from redis.asyncio import Redis

from pipeline import weights
from pipeline.telemetry import span
from pipeline.weights import ServedWeights, WeightVersion
from trainer.learner import directories
from trainer.records.journal import PublicationRow
from trainer.weights.engines import EngineFailure, Engines, PauseMode, Served, Worker

log = logging.getLogger("swerve.weights")

Export = Callable[[Path], object]
"""Writes the learner's weights as a Hugging Face directory at the path given.

It may block; it is called in a thread.
"""

TRIES = 2  # of one engine within one publication


class NoEngineServes(EngineFailure):
    """Not one engine confirmed the newest version. What they served before, they serve still."""


class Publisher:
    """Publishes the versions of one run, one at a time.

    Without engines, a version is written and announced, and that is all.
    """

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        *,
        directory: Path,
        export: Export,
        engines: Engines | None,
        mode: PauseMode = "retract",
        keep: int = 2,
    ) -> None:
        if keep < 1:
            raise ValueError(
                f"weights.keep must be 1 or more, not {keep}: the engines read the newest version from disk"
            )
        self._redis = redis
        self._run_id = run_id
        self._directory = directory.absolute()
        self._export = export
        self._engines = engines
        self._mode: PauseMode = mode
        self._keep = keep
        self._turn = asyncio.Lock()

    async def next_version(self) -> int:
        """The number after the newest announced, also by a trainer before this one; 0 if there is none."""
        newest = await weights.newest_version(self._redis, self._run_id)
        return 0 if newest is None else newest.version + 1

    async def publish(self, version: int, step: int) -> PublicationRow:
        """Export the weights after `step` as `version` and bring them to every engine.

        Raises ValueError if the version is not above the newest announced, NoEngineServes if no engine took
        it; the version is announced by then, and `catch_up` may try again.
        """
        if version < await self.next_version():
            raise ValueError(
                f"weight version {version} was announced before; take {await self.next_version()}"
            )
        async with self._turn:
            began = time.monotonic()
            with span("publish weights", version=version, step=step):
                written = await asyncio.to_thread(self._write, version, step)
                await weights.announce(self._redis, written)
                exported = time.monotonic()
                served = await self._deliver(written)
            await asyncio.to_thread(_prune, self._directory, self._keep)
        return PublicationRow(
            version=version,
            step=step,
            num_bytes=written.num_bytes,
            engines=served.engines,
            quarantined=served.quarantined,
            export_s=exported - began,
            update_s=time.monotonic() - exported,
        )

    async def catch_up(self) -> ServedWeights | None:
        """Bring engines that restarted, joined or failed to the newest version; None if there is none yet.

        An engine left paused by a trainer that died goes on. Raises NoEngineServes.
        """
        async with self._turn:
            newest = await weights.newest_version(self._redis, self._run_id)
            return None if newest is None else await self._deliver(newest)

    async def mend(self) -> ServedWeights | None:
        """The same if something is amiss: an engine that answers does not serve the newest version (it has
        restarted) or gets no requests, or one that does not answer gets them. Else None.

        Harmless while nothing answers. Raises EngineFailure if the router does not.
        """
        async with self._turn:
            newest = await weights.newest_version(self._redis, self._run_id)
            if newest is None or self._engines is None or not await self._is_amiss(self._engines, newest):
                return None
            return await self._deliver(newest)

    async def _is_amiss(self, engines: Engines, newest: WeightVersion) -> bool:
        routed = {worker.url for worker in await engines.routed()}
        urls = sorted(await self._known(routed))
        answers = await asyncio.gather(*(engines.served(url) for url in urls), return_exceptions=True)
        served = {url: one for url, one in zip(urls, answers, strict=True) if isinstance(one, Served)}
        behind = any(one.weight_version != _name(newest) for one in served.values())
        return bool(served) and (behind or routed != served.keys())

    def _write(self, version: int, step: int) -> WeightVersion:
        target = self._directory / f"v{version:06d}"
        aside = self._directory / f".v{version:06d}.writing"
        for leftover in (aside, target):  # of a trainer that died before it could announce them
            shutil.rmtree(leftover, ignore_errors=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._export(aside)
        num_bytes, sha256 = _settle(aside)
        aside.rename(target)
        directories.sync(self._directory)
        return WeightVersion(
            run_id=self._run_id,
            version=version,
            step=step,
            directory=str(target),
            num_bytes=num_bytes,
            sha256=sha256,
            published_at=time.time(),
        )

    async def _deliver(self, version: WeightVersion) -> ServedWeights:
        """Update all engines at once, settle who takes requests, record it."""
        engines = self._engines
        if engines is None:
            return await self._record(version, [], [])
        try:
            routed = {worker.url: worker for worker in await engines.routed()}
        except EngineFailure as error:
            raise NoEngineServes(
                f"nobody can be told of weight version {version.version}: {error}"
            ) from error
        urls = sorted(await self._known(routed.keys()))
        outcomes = await asyncio.gather(*(self._bring(engines, url, version) for url in urls))
        confirmed = [url for url, good in zip(urls, outcomes, strict=True) if good]
        failed = [url for url in urls if url not in confirmed]
        if not confirmed:
            raise NoEngineServes(
                f"no engine serves weight version {version.version}: "
                + (
                    f"{', '.join(failed)} failed, see the log"
                    if failed
                    else f"{engines.router_url} knows no engine"
                )
            )
        await _settle_routing(engines, routed, confirmed=confirmed, failed=failed)
        return await self._record(version, confirmed, failed)

    async def _bring(self, engines: Engines, url: str, version: WeightVersion) -> bool:
        """Whether the engine now samples from `version`."""
        for attempt in range(1, TRIES + 1):
            try:
                await self._update(engines, url, version)
            except EngineFailure as error:
                log.warning("weights v%d, try %d of %d: %s", version.version, attempt, TRIES, error)
            else:
                return True
        return False

    async def _update(self, engines: Engines, url: str, version: WeightVersion) -> None:
        served = await engines.served(url)
        try:
            if (served.weight_version, served.model_path) != (_name(version), version.directory):
                await engines.pause(url, self._mode)
                await engines.update(
                    url, directory=version.directory, weight_version=_name(version), mode=self._mode
                )
        finally:
            await engines.resume(url)
        served = await engines.served(url)
        if served.weight_version != _name(version):
            raise EngineFailure(
                f"{url} says it serves {served.weight_version!r} after the update to {_name(version)!r}"
            )

    async def _known(self, routed: AbstractSet[str]) -> set[str]:
        """Every engine that is to be served: those in routing, and those that we took out of it. A router
        that knows none has restarted and forgotten them; of one that knows some, the rest was taken away.
        """
        recorded = await weights.served_weights(self._redis, self._run_id)
        if recorded is None:
            return {*routed}
        return {*routed, *recorded.quarantined, *(() if routed else recorded.engines)}

    async def _record(self, version: WeightVersion, confirmed: list[str], failed: list[str]) -> ServedWeights:
        served = ServedWeights(
            version=version.version,
            engines=tuple(confirmed),
            quarantined=tuple(failed),
            confirmed_at=time.time(),
        )
        await weights.record_served(self._redis, self._run_id, served)
        return served


async def _settle_routing(
    engines: Engines, routed: dict[str, Worker], *, confirmed: list[str], failed: list[str]
) -> None:
    """Failed engines out of the router, confirmed ones in.

    What the router refuses is tried again at the next publication.
    """
    out = [engines.quarantine(routed[url]) for url in failed if url in routed]
    back = [engines.readmit(url) for url in confirmed if url not in routed]
    for refusal in await asyncio.gather(*out, *back, return_exceptions=True):
        if isinstance(refusal, EngineFailure):
            log.warning("the router keeps its list as it was: %s", refusal)
        elif refusal is not None:
            raise refusal


def _name(version: WeightVersion) -> str:
    return weights.version_name(version.run_id, version.version)


def _settle(directory: Path) -> tuple[int, str]:
    """Force every file to disk. Returns the weight files' size and SHA-256, in name order."""
    digest, num_bytes = hashlib.sha256(), 0
    for path in sorted(directory.iterdir()):
        if path.is_file():
            if path.suffix == ".safetensors":
                num_bytes += path.stat().st_size
                _hash(path, digest.update)
            directories.sync(path)
    directories.sync(directory)
    if not num_bytes:
        raise ValueError(f"{directory}: the export left no .safetensors file")
    return num_bytes, digest.hexdigest()


def _hash(path: Path, update: Callable[[memoryview], None]) -> None:
    block = memoryview(bytearray(1 << 20))
    with path.open("rb") as file:
        while size := file.readinto(block):
            update(block[:size])


def _prune(directory: Path, keep: int) -> None:
    """Remove all but the newest versions."""
    for old in sorted(directory.glob("v[0-9]*"))[:-keep]:
        shutil.rmtree(old)
