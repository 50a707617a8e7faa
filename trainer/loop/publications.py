"""The present weights to the engines, until they take them; and engines that have started anew brought up to date.

A version's number is never used twice, not even after a crash. While no engine takes it, the run waits, and says so.
"""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

from redis.exceptions import RedisError

from pipeline import retry
from pipeline.weights import ServedWeights, WeightVersion, newest_version
from trainer.loop.parts import Parts
from trainer.loop.state import Standing
from trainer.records.journal import PublicationRow
from trainer.weights.engines import EngineFailure
from trainer.weights.publish import NoEngineServes

log = logging.getLogger("swerve.trainer")

ENGINES_S = 1.0  # between two looks at what they serve: two small questions
RETRY_S = 1.0


class Publications:
    """Of one run."""

    def __init__(self, run_id: str, parts: Parts, standing: Standing) -> None:
        self._run_id = run_id
        self._parts = parts
        self._standing = standing

    async def take_up(self) -> None:
        """The first of this process. After a resume, the newest version may hold these very weights: then it is
        brought to the engines again under its number.

        It does if it is of the checkpoint's step: a run publishes as soon as it has resumed, so a version of
        steps that were lost is never the newest for long enough to be mistaken for one of steps taken since.
        Raises NoEngineServes if told to stop while waiting for an engine.
        """
        newest = await retry.until_answered(lambda: newest_version(self._parts.redis, self._run_id))
        if (
            newest is None
            or newest.step != self._standing.step
            or not await asyncio.to_thread(_is_there, newest)
        ):
            await self.publish()
        else:
            await self._publish(newest.version)

    async def publish(self) -> None:
        """The present weights as a new version. Raises NoEngineServes if told to stop while waiting for an engine."""
        next_version = await retry.until_answered(self._parts.publisher.next_version)
        await self._publish(max(next_version, self._standing.version + 1))

    async def watch_engines(self) -> None:
        """For ever: every engine that answers must serve the newest weights, also one that has just started."""
        trouble = ""
        while True:
            await asyncio.sleep(ENGINES_S)
            try:
                served = await self._parts.publisher.mend()
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
        standing = self._standing
        standing.phase = "publishing weights"
        row = await retry.until_answered(lambda: self._deliver(version))
        self._parts.records.append(row)
        await self._parts.learner(self._parts.feed.snapshot, version)
        standing.timeline.add(version, standing.step)
        standing.version = version
        standing.published_steps = standing.step

    async def _deliver(self, version: int) -> PublicationRow:
        """May be called again if Redis went away under it."""
        parts, began = self._parts, time.monotonic()
        newest = await newest_version(parts.redis, self._run_id)
        try:
            if newest is None or newest.version < version:
                return await parts.publisher.publish(version, self._standing.step)
            served = await parts.publisher.catch_up()
        except NoEngineServes as error:
            served = await self._wait_for_engine(version, error)
        newest = await newest_version(parts.redis, self._run_id)
        assert newest is not None, "a version has been announced"
        assert served is not None, "a version has been announced"
        return PublicationRow(
            version=version,
            step=self._standing.step,
            num_bytes=newest.num_bytes,
            engines=served.engines,
            quarantined=served.quarantined,
            export_s=0.0,
            update_s=time.monotonic() - began,
        )

    async def _wait_for_engine(self, version: int, error: EngineFailure) -> ServedWeights:
        """Until one takes the announced version. Raises NoEngineServes if told to stop meanwhile."""
        self._parts.progress.say(f"{error}; waiting for one")
        self._standing.phase = f"waiting for an engine to take weights v{version}"
        while not self._standing.is_stopping:
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(EngineFailure):
                served = await self._parts.publisher.catch_up()
                assert served is not None, "a version has been announced"
                return served
        raise error


def _is_there(version: WeightVersion) -> bool:
    return Path(version.directory).is_dir()
