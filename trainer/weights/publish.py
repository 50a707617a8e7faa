"""A new version of the weights: made ready, announced, loaded by the engines, confirmed by them, recorded.

What a publication is stands here; how the weights get into one engine is the transport's (`transport.py`).

Promises. Weights are ready to be loaded before anybody is told of them. An engine that was paused is told to go on, whatever
happened in between. An engine that does not confirm a version takes no requests until it confirms a later one, unless no
engine at all confirms: then routing stays as it was, and the caller is told.
"""

import asyncio
import logging
import time
from collections.abc import Set as AbstractSet

from redis.asyncio import Redis

from pipeline import weights
from pipeline.telemetry import span
from pipeline.weights import ServedWeights, WeightVersion
from trainer.records.journal import PublicationRow
from trainer.weights.engines import EngineFailure, Engines, PauseMode, RoutedEngine, Served
from trainer.weights.transport import WeightTransport

log = logging.getLogger("swerve.weights")

TRIES = 2
"""Attempts to update one engine within one publication."""


class NoEngineServes(EngineFailure):
    """No engine confirmed the newest version. All still serve what they served before."""


class Publisher:
    """Publishes the versions of one run, one at a time.

    Without engines, a version is made ready and announced, and that is all.
    """

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        *,
        transport: WeightTransport,
        engines: Engines | None,
        mode: PauseMode = "retract",
    ) -> None:
        self._redis = redis
        self._run_id = run_id
        self._transport = transport
        self._engines = engines
        self._mode: PauseMode = mode
        self._turn = asyncio.Lock()

    async def next_version(self) -> int:
        """The number after the newest announced, also by a trainer before this one; 0 if there is none."""
        newest = await weights.newest_version(self._redis, self._run_id)
        return 0 if newest is None else newest.version + 1

    async def can_deliver(self, version: WeightVersion) -> bool:
        """Whether an announced version can be delivered again."""
        return await self._transport.is_available(version)

    async def publish(self, version: int, step: int) -> PublicationRow:
        """Announce the present weights, those after `step`, as `version`, and deliver them to every engine.

        Raises ValueError if the version is not above the newest announced, NoEngineServes if no engine confirmed it; the
        version is announced by then, and `catch_up` may try again.
        """
        if version < await self.next_version():
            raise ValueError(
                f"weight version {version} was announced before; take {await self.next_version()}"
            )
        async with self._turn:
            began = time.monotonic()
            with span("publish weights", version=version, step=step):
                prepared = await self._transport.prepare(version, step)
                await weights.announce(self._redis, prepared)
                exported = time.monotonic()
                served = await self._deliver(prepared)
            await self._transport.discard_old()
        return PublicationRow(
            version=version,
            step=step,
            num_bytes=prepared.num_bytes,
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

    async def redeliver_if_stale(self) -> ServedWeights | None:
        """As `catch_up`, but only if an engine is stale, unrouted or restarted; else None.

        An engine is stale if it answers and serves another version, unrouted if it answers and gets no requests. One that does
        not answer and gets requests is taken out of routing. Harmless while no engine answers. Raises EngineFailure if the
        router does not answer.
        """
        async with self._turn:
            newest = await weights.newest_version(self._redis, self._run_id)
            if newest is None or self._engines is None or not await self._is_stale(self._engines, newest):
                return None
            return await self._deliver(newest)

    async def _is_stale(self, engines: Engines, newest: WeightVersion) -> bool:
        routed = {engine.url for engine in await engines.routed()}
        urls = sorted(await self._known(routed))
        answers = await asyncio.gather(*(engines.served(url) for url in urls), return_exceptions=True)
        served = {url: one for url, one in zip(urls, answers, strict=True) if isinstance(one, Served)}
        name = weights.version_name(newest.run_id, newest.version)
        stale = any(one.weight_version != name for one in served.values())
        return bool(served) and (stale or routed != served.keys())

    async def _deliver(self, version: WeightVersion) -> ServedWeights:
        """Update all engines at once, route requests to those that confirmed, record them."""
        engines = self._engines
        if engines is None:
            return await self._record(version, [], [])
        try:
            routed = {engine.url: engine for engine in await engines.routed()}
        except EngineFailure as error:
            raise NoEngineServes(
                f"no engine can be told of weight version {version.version}: {error}"
            ) from error
        urls = sorted(await self._known(routed.keys()))
        outcomes = await asyncio.gather(*(self._updated(engines, url, version) for url in urls))
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
        await _route(engines, routed, confirmed=confirmed, failed=failed)
        return await self._record(version, confirmed, failed)

    async def _updated(self, engines: Engines, url: str, version: WeightVersion) -> bool:
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
        name = weights.version_name(version.run_id, version.version)
        served = await engines.served(url)
        try:
            if not (served.weight_version == name and self._transport.is_current(served, version)):
                await engines.pause(url, self._mode)
                await self._transport.deliver(engines, url, version, self._mode)
        finally:
            await engines.resume(url)
        served = await engines.served(url)
        if served.weight_version != name:
            raise EngineFailure(
                f"{url} says it serves {served.weight_version!r} after the update to {name!r}"
            )

    async def _known(self, routed: AbstractSet[str]) -> set[str]:
        """Every engine that must get the weights: those in routing, and those that we took out of it.

        A router that knows no engine has restarted and forgotten them. If it knows some, the others were removed on purpose.
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


async def _route(
    engines: Engines, routed: dict[str, RoutedEngine], *, confirmed: list[str], failed: list[str]
) -> None:
    """Take failed engines out of the router, and put confirmed ones in.

    What the router refuses is tried again at the next publication.
    """
    out = [engines.quarantine(routed[url]) for url in failed if url in routed]
    back = [engines.readmit(url) for url in confirmed if url not in routed]
    for refusal in await asyncio.gather(*out, *back, return_exceptions=True):
        if isinstance(refusal, EngineFailure):
            log.warning("the router keeps its list as it was: %s", refusal)
        elif refusal is not None:
            raise refusal
