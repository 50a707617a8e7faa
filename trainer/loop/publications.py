"""The present weights to the engines, until they serve them; and engines that restarted or joined brought up to date.

A version's number is never used twice, not even after a crash. While no engine takes a version, the run waits, and says so.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import retry
from pipeline.weights import ServedWeights, newest_version
from trainer.loop.state import RunState
from trainer.records.journal import PublicationRow
from trainer.weights.engines import EngineFailure
from trainer.weights.publish import NoEngineServes, Publisher

log = logging.getLogger("swerve.trainer")

ENGINES_S = 1.0  # between two looks at what the engines serve: two small questions
RETRY_S = 1.0


class SnapshottingLearner(Protocol):
    async def snapshot(self, version: int) -> None:
        """Keep the present weights as this version."""
        ...


class Publications:
    """Of one run."""

    def __init__(
        self,
        redis: ArqRedis,
        run_id: str,
        publisher: Publisher,
        learner: SnapshottingLearner,
        state: RunState,
        *,
        record: Callable[[PublicationRow], None],
        say: Callable[[str], None],
    ) -> None:
        self._redis = redis
        self._run_id = run_id
        self._publisher = publisher
        self._learner = learner
        self._state = state
        self._record = record
        self._say = say

    async def publish_first(self) -> None:
        """The first publication of this process. A resumed run delivers its newest version again, under its number, if that
        version holds the weights of the checkpoint.

        It does if it is of the checkpoint's step: a run publishes as soon as it has resumed, so a version of steps that were
        lost is not the newest for long enough to be mistaken for one of steps taken since.
        Raises NoEngineServes if told to stop while waiting for an engine.
        """
        newest = await retry.until_answered(lambda: newest_version(self._redis, self._run_id))
        if newest is None or newest.step != self._state.step or not await self._publisher.can_deliver(newest):
            await self.publish()
        else:
            await self._publish(newest.version)

    async def publish(self) -> None:
        """The present weights as a new version. Raises NoEngineServes if told to stop while waiting for an engine, or if
        another run has taken the engines over.
        """
        next_version = await retry.until_answered(self._publisher.next_version)
        await self._publish(max(next_version, self._state.version + 1))

    async def watch_engines(self) -> None:
        """While the engines are this run's: each that answers must serve the newest weights, also one that has just started."""
        trouble = ""
        while True:
            await asyncio.sleep(ENGINES_S)
            if self._state.superseded_by:
                return
            try:
                served = await self._publisher.redeliver_if_stale()
            except (EngineFailure, RedisError) as error:
                if isinstance(error, RedisError) and not retry.is_outage(error):
                    raise
                if str(error) != trouble:
                    log.warning("engines: %s", error)
                trouble = str(error)
                continue
            trouble = ""
            if served is not None:
                log.info("weights v%d brought to engines that were behind", served.version)

    async def _publish(self, version: int) -> None:
        state = self._state
        if state.superseded_by:
            raise NoEngineServes(f"the engines were taken over by {state.superseded_by}")
        state.phase = "publishing weights"
        row = await retry.until_answered(lambda: self._deliver(version))
        self._record(row)
        await self._learner.snapshot(version)
        state.timeline.add(version, state.step)
        state.version = version
        state.published_steps = state.step

    async def _deliver(self, version: int) -> PublicationRow:
        """Announce the version and bring it to the engines. May be called again if Redis went away in between."""
        began = time.monotonic()
        newest = await newest_version(self._redis, self._run_id)
        try:
            if newest is None or newest.version < version:
                return await self._publisher.publish(version, self._state.step)
            served = await self._publisher.catch_up()
        except NoEngineServes as error:
            served = await self._wait_for_engine(version, error)
        newest = await newest_version(self._redis, self._run_id)
        assert newest is not None, "a version has been announced"
        assert served is not None, "a version has been announced"
        return PublicationRow(
            version=version,
            step=self._state.step,
            num_bytes=newest.num_bytes,
            engines=served.engines,
            quarantined=served.quarantined,
            export_s=0.0,
            update_s=time.monotonic() - began,
        )

    async def _wait_for_engine(self, version: int, error: EngineFailure) -> ServedWeights:
        """Until one serves the announced version. Raises NoEngineServes if told to stop meanwhile."""
        self._say(f"{error}; waiting for one")
        self._state.phase = f"waiting for an engine to take weights v{version}"
        while True:
            await asyncio.sleep(RETRY_S)
            if self._state.is_stopping:
                raise error
            with contextlib.suppress(EngineFailure):
                served = await self._publisher.catch_up()
                assert served is not None, "a version has been announced"
                return served
