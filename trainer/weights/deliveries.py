"""Delivers the newest weight version to every engine in parallel to training. Each engine has its own delivery, with a deadline.

Promises. When its turn comes, an engine gets the version that is newest then, never a queue of older ones. An engine that was paused is
always continued, and one that takes adapters beside the weights that it has is not paused. An engine that fails, or that takes much longer
than another one needed, is taken out of routing as soon as another one serves the version; it is tried again for as long as it is known,
and returns when it confirms the version. If no engine confirms, routing does not change, and `trouble` says so. No training step ever waits
for anything here.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from redis.asyncio import Redis

from pipeline import redis_calls, weights
from pipeline.journal.rows import EnginePause
from pipeline.weights import ServedWeights, WeightVersion
from trainer.weights.engines import EngineFailure, Engines, PauseMode, RoutedEngine, Served
from trainer.weights.transport import WeightTransport

log = logging.getLogger("swerve.weights")

LOOK_S = 1.0
"""Pause between two looks at the version that an engine serves; each look is one small request."""

LONGEST_PAUSE_S = 30.0
"""The longest pause between two visits of an engine that fails. It doubles up to this, and a new version ends it."""

TRIES = 2
"""Failures in a row after which an engine is taken out of routing."""

LATE_FACTOR, LATE_S = 3.0, 5.0
"""An engine is late when it takes LATE_S longer than LATE_FACTOR times the time of the fastest one, for this version or, while none serves
it, for the version before.
"""

STOP_S = 5.0
"""The longest time that running engine updates may take when deliveries end."""

Report = Callable[[ServedWeights, float], None]
"""Called with the version that all engines in routing serve from now on, and the seconds since that version was offered."""


@dataclass(slots=True, eq=False)
class _Engine:
    """One engine and its known state."""

    url: str
    served: int | None = None  # the version that it confirmed last
    tried: int | None = None  # the version that it had to load last
    num_failures: int = 0  # number in a row
    fault: str = ""  # the last failure, or the fact that the engine is late
    visit: asyncio.Task[None] | None = None  # the current visit, if any
    visit_at: float = 0.0  # time of its next visit, on the monotonic clock
    busy_since: float | None = None  # when the current update began; None while it waits for its turn
    has_turn: bool = False
    is_late: bool = False  # whether the current update is late

    @property
    def has_failed(self) -> bool:
        return self.is_late or self.num_failures >= TRIES

    def refuses(self, version: int) -> bool:
        """Whether it failed to take this version, or hangs."""
        return self.has_failed and (self.is_late or (self.visit is None and self.tried == version))


class Deliveries:
    """Delivers the versions of one run. `run` does the work; every other method returns at once, or waits for `run`."""

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        *,
        transport: WeightTransport,
        engines: Engines | None,
        mode: PauseMode,
        deadline_s: float,
        at_once: int,
    ) -> None:
        """`deadline_s`: the limit for one engine to take one version. `at_once`: the number of engines in routing that may change weights
        at the same time, 0 for all of them. Without engines, every version counts as served when it is offered.
        """
        self._redis = redis
        self._run_id = run_id
        self._transport = transport
        self._engines = engines
        self._mode: PauseMode = mode
        self._deadline_s = deadline_s
        self._turns = asyncio.Semaphore(at_once) if at_once else None
        self._report: Report = lambda served, seconds: None
        self._newest: WeightVersion | None = None
        self._pinned: WeightVersion | None = None
        # Time of the offer by version, for versions that some engine does not serve yet
        self._offered_at: dict[int, float] = {}
        self._known: dict[str, _Engine] = {}
        self._routed: dict[str, RoutedEngine] = {}
        self._out: set[str] | None = None  # urls that were taken out of routing; None before the first look
        self._fastest_of = -1  # the version that was delivered last
        self._fastest_s = 0.0  # the quickest delivery of that version
        self._recorded: ServedWeights | None = None
        self._version = -1  # the version that all engines in routing serve
        self._look_again = asyncio.Event()
        self._changed = asyncio.Condition()
        self._pauses: list[EnginePause] = []
        self.trouble = ""
        """The reason why no engine serves the newest version; empty while one does, or while the delivery is in progress."""

    @property
    def oldest_needed(self) -> int:
        """The oldest version that an engine may still have to load."""
        return min((one.version for one in (self._pinned, self._newest) if one is not None), default=0)

    def offer(self, version: WeightVersion) -> None:
        """Delivers this version, which is announced and the newest, to every engine from now on."""
        self._newest = version
        self.trouble = ""
        self._offered_at[version.version] = time.monotonic()
        self._look_again.set()

    def pin(self) -> None:
        """Delivers no version newer than the present one until `unpin`, because an evaluation needs it."""
        self._pinned = self._newest

    def unpin(self) -> None:
        self._pinned = None
        self._look_again.set()

    async def served(self, version: int) -> None:
        """Returns when all engines in routing serve `version` or a newer one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version >= version)

    def take_pauses(self) -> tuple[EnginePause, ...]:
        """The pauses of engines since the last call."""
        pauses, self._pauses = tuple(self._pauses), []
        return pauses

    async def settled(self, version: int) -> bool:
        """Waits like `served`, but returns when no engine accepts the version. Returns whether it is served."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._version >= version or self.trouble)
        return self._version >= version

    async def run(self, report: Report, *, while_ours: Callable[[], bool] = lambda: True) -> None:
        """Delivers until cancelled, or until `while_ours` reports that the engines belong to another run."""
        self._report = report
        try:
            while while_ours():
                self._look_again.clear()
                with redis_calls.tolerating_outage():
                    await self._look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._look_again.wait()
        finally:
            await self._stop()

    async def _stop(self) -> None:
        visits = [engine.visit for engine in self._known.values() if engine.visit is not None]
        for visit in visits:
            visit.cancel()
        if visits:
            await asyncio.wait(visits, timeout=STOP_S)

    @property
    def _target(self) -> WeightVersion | None:
        return self._pinned or self._newest

    async def _look(self) -> None:
        """Starts the visits that are due, and updates routing and the record from the results of earlier ones."""
        target = self._target
        if target is None:
            return
        if self._engines is None:
            await self._note_served(target.version, (), ())
            return
        try:
            self._routed = {engine.url: engine for engine in await self._engines.routed()}
        except EngineFailure as error:
            await self._say_trouble(f"no engine can be given weight version {target.version}: {error}")
            return
        await self._meet()
        for engine in self._known.values():
            if engine.visit is not None and engine.visit.done():
                engine.visit.result()  # raises an error that is not a failure of an engine
                engine.visit = None
            if engine.visit is None and self._is_due(engine, target):
                engine.visit = asyncio.create_task(self._visit(engine), name=f"visit {engine.url}")
        self._find_late(target)
        await self._settle(target)

    async def _meet(self) -> None:
        """Finds every engine that must get the weights: those in routing, and those that we took out of it.

        A router that knows no engine has restarted and forgotten them. If it knows some, the others were removed on purpose.
        """
        recorded = self._recorded
        if self._out is None:
            recorded = await weights.served_weights(self._redis, self._run_id)
            self._out = set(recorded.quarantined if recorded else ())
        forgotten = () if self._routed or recorded is None else recorded.engines
        urls = {*self._routed, *self._out, *forgotten}
        for gone in self._known.keys() - urls:
            if (visit := self._known[gone].visit) is not None:
                visit.cancel()
            del self._known[gone]
        for url in sorted(urls - self._known.keys()):
            self._known[url] = _Engine(url)

    def _is_due(self, engine: _Engine, target: WeightVersion) -> bool:
        is_new = target.version not in (engine.served, engine.tried)
        return is_new or time.monotonic() >= engine.visit_at

    async def _visit(self, engine: _Engine) -> None:
        """Asks the engine which version it serves, and loads the newest one if that is another."""
        try:
            version = await self._bring(engine)
        except EngineFailure as error:
            if str(error) != engine.fault:
                log.warning("weights: %s", error)
            engine.num_failures += 1
            engine.fault = str(error)
        else:
            if engine.fault:
                log.info("weights: %s serves v%d after all", engine.url, version)
            engine.served, engine.num_failures, engine.fault = version, 0, ""
        finally:
            engine.busy_since, engine.is_late = None, False
            engine.visit_at = time.monotonic() + min(LOOK_S * 2**engine.num_failures, LONGEST_PAUSE_S)
            self._end_turn(engine)
            self._look_again.set()

    async def _bring(self, engine: _Engine) -> int:
        """Returns the version that the engine serves now, the newest when its turn came. Raises EngineFailure."""
        assert self._engines is not None
        target = self._target
        assert target is not None, "visits begin when there is a version"
        engine.tried = target.version
        began = engine.busy_since = time.monotonic()
        served = await self._transport.served(self._engines, engine.url, target)
        if self._is_current(served, target):
            if engine.served is None:  # a trainer that died may have left it paused
                await self._engines.resume(engine.url)
            await self._transport.tidy(self._engines, engine.url, self._version)
            return target.version
        if engine.served is not None and served.weight_version != self._name(engine.served):
            engine.served = None  # it restarted, or another program gave it weights
        async with self._deadline(engine.url, target):
            await self._transport.prefetch(engine.url, target)
        if self._turns is not None and engine.url in self._routed:
            waited_from, engine.busy_since = time.monotonic(), None
            await self._turns.acquire()
            engine.has_turn = True
            began = engine.busy_since = began + time.monotonic() - waited_from
            target = self._target or target
            engine.tried = target.version
        await self._update(engine.url, target)
        took_s = time.monotonic() - began
        known_s = self._fastest_s if self._fastest_of == target.version else took_s
        self._fastest_of, self._fastest_s = target.version, min(took_s, known_s)
        return target.version

    async def _update(self, url: str, version: WeightVersion) -> None:
        assert self._engines is not None
        began_at, pauses = time.time(), self._transport.needs_pause(url)
        try:
            async with self._deadline(url, version):
                if pauses:
                    await self._engines.pause(url, self._mode)
                await self._transport.deliver(self._engines, url, version, self._mode)
        finally:
            await self._engines.resume(url)
            if pauses:
                self._pauses.append(EnginePause(engine=url, began_at=began_at, ended_at=time.time()))
        served = await self._transport.served(self._engines, url, version)
        if not self._is_current(served, version):
            raise EngineFailure(
                f"{url} says it serves {served.weight_version!r} after the update to {self._name(version.version)!r}"
            )

    @contextlib.asynccontextmanager
    async def _deadline(self, url: str, version: WeightVersion) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._deadline_s):
                yield
        except TimeoutError as error:
            raise EngineFailure(
                f"{url} did not take v{version.version} within weights.engine_deadline_s = {self._deadline_s:g}"
            ) from error

    def _is_current(self, served: Served, version: WeightVersion) -> bool:
        return served.weight_version == self._name(version.version) and self._transport.is_current(
            served, version
        )

    def _name(self, version: int) -> str:
        return weights.version_name(self._run_id, version)

    def _end_turn(self, engine: _Engine) -> None:
        if engine.has_turn and self._turns is not None:
            engine.has_turn = False
            self._turns.release()

    def _find_late(self, target: WeightVersion) -> None:
        """Gives up on engines that take much longer than the fastest one did, for this version or the one before.

        They continue, but nothing waits for them.
        """
        if self._fastest_of < 0:
            return
        longest_s = LATE_FACTOR * self._fastest_s + LATE_S
        for engine in self._known.values():
            if engine.busy_since is None or engine.served == target.version or engine.has_failed:
                continue
            if time.monotonic() - engine.busy_since > longest_s:
                engine.is_late = True
                engine.fault = f"{engine.url} is late: an engine took {self._fastest_s:.1f} s to load v{self._fastest_of}"
                log.warning("weights: %s", engine.fault)
                self._end_turn(engine)

    async def _settle(self, target: WeightVersion) -> None:
        """Routes requests to the engines that confirmed the version, and records what they serve."""
        assert self._out is not None
        confirmed = {url for url, engine in self._known.items() if engine.served == target.version}
        failed = {url for url, engine in self._known.items() if engine.has_failed}
        if not confirmed - failed:
            if all(engine.refuses(target.version) for engine in self._known.values()):
                urls = ", ".join(sorted(failed))
                found = f"{urls} failed, see the log" if failed else f"{self._router_url} knows no engine"
                await self._say_trouble(f"no engine serves weight version {target.version}: {found}")
            return
        confirmed -= failed
        self._out = failed | (self._out - confirmed)
        await self._route(confirmed, failed)
        in_routing = confirmed | (self._routed.keys() - failed)
        versions = [self._known[url].served for url in in_routing]
        if None not in versions:
            common = min(version for version in versions if version is not None)
            await self._note_served(common, tuple(sorted(in_routing)), tuple(sorted(self._out)))

    @property
    def _router_url(self) -> str:
        return self._engines.router_url if self._engines is not None else ""

    async def _route(self, confirmed: set[str], failed: set[str]) -> None:
        """Changes the router's list. What the router refuses is tried again at the next look."""
        assert self._engines is not None
        out = [self._engines.quarantine(self._routed[url]) for url in failed if url in self._routed]
        back = [self._engines.readmit(url) for url in confirmed if url not in self._routed]
        for refusal in await asyncio.gather(*out, *back, return_exceptions=True):
            if isinstance(refusal, EngineFailure):
                log.warning("the router keeps its list as it was: %s", refusal)
            elif refusal is not None:
                raise refusal

    async def _note_served(self, version: int, engines: tuple[str, ...], out: tuple[str, ...]) -> None:
        """Records the served version, if it changed, and reports a version that all engines in routing serve now."""
        served = ServedWeights(version=version, engines=engines, quarantined=out)
        if self._recorded is None or served != _timeless(self._recorded):
            self._recorded = None
            now = ServedWeights(version=version, engines=engines, quarantined=out, confirmed_at=time.time())
            await weights.record_served(self._redis, self._run_id, now)
            self._recorded = now
        async with self._changed:
            self.trouble = ""
            if version > self._version:
                self._version = version
                offered_at = self._offered_at.get(version, time.monotonic())
                self._offered_at = {one: at for one, at in self._offered_at.items() if one > version}
                self._report(self._recorded, time.monotonic() - offered_at)
            self._changed.notify_all()

    async def _say_trouble(self, trouble: str) -> None:
        async with self._changed:
            if trouble != self.trouble:
                log.warning("weights: %s", trouble)
            self.trouble = trouble
            self._changed.notify_all()


def _timeless(served: ServedWeights) -> ServedWeights:
    return ServedWeights(version=served.version, engines=served.engines, quarantined=served.quarantined)
