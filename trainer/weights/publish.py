"""A new version of the weights: made ready, then announced. How engines get it is `deliveries.py`.

The weights are ready to be loaded before anybody is told of them, and a version's number is never used twice.
"""

from redis.asyncio import Redis

from pipeline import retry, trace_ids, weights
from pipeline.telemetry import span
from pipeline.weights import WeightVersion
from trainer.weights.transport import WeightTransport


class Publisher:
    """Publishes the versions of one run, one at a time."""

    def __init__(self, redis: Redis, run_id: str, *, transport: WeightTransport) -> None:
        self._redis = redis
        self._run_id = run_id
        self._transport = transport

    async def next_version(self) -> int:
        """The number after the newest announced, also by a trainer before this one; 0 if there is none."""
        newest = await self.newest()
        return 0 if newest is None else newest.version + 1

    async def newest(self) -> WeightVersion | None:
        """The newest announced version, also of a trainer before this one."""
        return await retry.until_answered(lambda: weights.newest_version(self._redis, self._run_id))

    async def can_deliver(self, version: WeightVersion) -> bool:
        """Whether an announced version can be delivered again."""
        return await self._transport.is_available(version)

    async def prepare(self, version: int, step: int) -> WeightVersion:
        """Make the present weights, those after `step`, ready as `version`. Raises ValueError if it is not above the newest announced."""
        if version < (free := await self.next_version()):
            raise ValueError(f"weight version {version} was announced before; take {free}")
        above = trace_ids.publication(self._run_id, version)
        with span("export weights", traceparent=above, version=version, step=step):
            return await self._transport.prepare(version, step)

    async def announce(self, version: WeightVersion) -> None:
        """Make a version that is ready known as the newest."""
        with span("announce", traceparent=trace_ids.publication(self._run_id, version.version)):
            await retry.until_answered(lambda: self._announce(version))

    async def discard_old(self, oldest_needed: int) -> None:
        """Free what versions before `oldest_needed` take up, but for the newest few."""
        await self._transport.discard_old(oldest_needed)

    async def _announce(self, version: WeightVersion) -> None:
        """May be called again if Redis went away in between."""
        if await weights.newest_version(self._redis, self._run_id) != version:
            await weights.announce(self._redis, version)
