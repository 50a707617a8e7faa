"""Makes a new version of the weights ready and announces it, with the recipe's transport. `deliveries.py` delivers it to engines.

The weights are ready to be loaded before they are announced, and a version's number is never used twice. A publishing process, a trainer or
a standalone evaluation, holds the lease on the engines (`sole_policy`), and renews it for as long as it runs.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from arq.connections import ArqRedis
from redis.asyncio import Redis

from pipeline import redis_calls, telemetry, weights
from pipeline.telemetry import span
from pipeline.weights import PolicyHolder, WeightVersion, base_run
from trainer.recipe.schema import WeightsRecipe
from trainer.weights.adapters import AdapterTransport
from trainer.weights.delta import DeltaTransport, Receivers
from trainer.weights.distributed import DistributedTransport
from trainer.weights.transport import DiskTransport, WeightTransport

RENEW_S = 1.0


class PolicyHold:
    """The lease of one process."""

    def __init__(self, redis: ArqRedis, holder: PolicyHolder) -> None:
        self._redis = redis
        self._holder = holder
        self._taken_by: PolicyHolder | None = None
        self._report: Callable[[str], None] = lambda other: None

    def when_taken(self, report: Callable[[str], None]) -> None:
        """Calls `report` with the process that takes the lease over, or has done so already."""
        self._report = report
        if self._taken_by is not None:
            report(str(self._taken_by))

    async def keep(self) -> None:
        """Renew the lease until another process has taken it over."""
        while self._taken_by is None:
            await asyncio.sleep(RENEW_S)
            with redis_calls.tolerating_outage():
                self._taken_by = await weights.renew(self._redis, self._holder)
        self._report(str(self._taken_by))


@contextlib.asynccontextmanager
async def sole_policy(redis: ArqRedis, run_id: str) -> AsyncIterator[PolicyHold]:
    """Holds the lease on the engines. An earlier process of the same run loses it. Raises ValueError if another run has it."""
    holder = PolicyHolder(run_id)
    other = await redis_calls.until_answered(lambda: weights.acquire(redis, holder))
    if other is not None:
        raise ValueError(
            f"the engines of this Redis serve {other}, and engines serve one policy at a time. Stop that process first (if it is "
            f"gone already, wait {weights.LEASE_S:.0f} s), or use a Redis and engines of your own"
        )
    hold = PolicyHold(redis, holder)
    keeper = asyncio.create_task(hold.keep(), name="lease keeper")
    try:
        yield hold
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        with redis_calls.tolerating_outage():
            await weights.release(redis, holder)


class Publisher:
    """Publishes the versions of one run, one at a time."""

    def __init__(self, redis: Redis, run_id: str, *, transport: WeightTransport) -> None:
        self._redis = redis
        self._run_id = run_id
        self._transport = transport

    async def next_version(self) -> int:
        """The number after the newest announced version, including those of an earlier trainer; 0 if there is none."""
        newest = await self.newest()
        return 0 if newest is None else newest.version + 1

    async def newest(self) -> WeightVersion | None:
        """The newest announced version, including those of an earlier trainer."""
        return await redis_calls.until_answered(lambda: weights.newest_version(self._redis, self._run_id))

    async def can_deliver(self, version: WeightVersion) -> bool:
        """Whether an announced version can be delivered again."""
        return await self._transport.is_available(version)

    async def prepare(self, version: int, step: int) -> WeightVersion:
        """Makes the present weights, those after `step`, ready as `version`.

        Raises ValueError if it is not above the newest announced version.
        """
        if version < (free := await self.next_version()):
            raise ValueError(f"weight version {version} was announced before; take {free}")
        above = telemetry.publication(self._run_id, version)
        with span("export weights", traceparent=above, version=version, step=step):
            return await self._transport.prepare(version, step)

    async def announce(self, version: WeightVersion) -> None:
        """Announces a ready version as the newest."""
        with span("announce", traceparent=telemetry.publication(self._run_id, version.version)):
            await redis_calls.until_answered(lambda: self._announce(version))

    async def discard_old(self, oldest_needed: int) -> None:
        """Frees the space of versions before `oldest_needed`, except for the newest few."""
        await self._transport.discard_old(oldest_needed)

    async def _announce(self, version: WeightVersion) -> None:
        """Announces the version. The call may be repeated if Redis became unavailable in between."""
        if await weights.newest_version(self._redis, self._run_id) != version:
            await weights.announce(self._redis, version)


Exports = Callable[[str, Path], object]
"""Writes what the learner's method of this name writes, to a path: `export`, `export_base` or `export_adapters`. It may block."""


async def open_transport(
    recipe: WeightsRecipe,
    run_id: str,
    *,
    directory: Path,
    export: Exports,
    keep: int,
    stack: AsyncExitStack,
) -> WeightTransport:
    """The transport. It exports versions to `directory`, which the trainer's rank 0 can read; `stack` closes its connections."""
    if recipe.adapters == "merged":
        disk = DiskTransport(run_id, directory=directory, export=partial(export, "export"), keep=keep)
        return await _carried(recipe, disk, directory, stack)
    place = directory / "base"
    base = DiskTransport(base_run(run_id), directory=place, export=partial(export, "export_base"), keep=1)
    disk = DiskTransport(run_id, directory=directory, export=partial(export, "export_adapters"), keep=keep)
    return AdapterTransport(
        await _carried(recipe, disk, directory, stack),
        base=await _carried(recipe, base, place, stack),
        base_version=WeightVersion(
            run_id=base_run(run_id),
            version=0,
            step=0,
            directory=str(base.directory_of(0)),
            num_bytes=0,
            published_at=0,
        ),
    )


async def _carried(
    recipe: WeightsRecipe, disk: DiskTransport, directory: Path, stack: AsyncExitStack
) -> WeightTransport:
    """The transport of the recipe for what `disk` exports to `directory`."""
    match recipe.transport:
        case "disk":
            return disk
        case "delta":
            receivers = await stack.enter_async_context(Receivers(recipe.receiver_port))
            return DeltaTransport(disk, receivers, directory=directory / "patches")
        case "distributed":
            distributed = DistributedTransport(disk)
            stack.push_async_callback(distributed.aclose)
            return distributed
