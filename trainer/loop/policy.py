"""The lease on the engines, which a trainer or a standalone evaluation holds and renews for as long as it runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from arq.connections import ArqRedis

from pipeline import policy_lease, retry
from pipeline.policy_lease import PolicyHolder

RENEW_S = 1.0


class PolicyHold:
    """Of one process."""

    def __init__(self, redis: ArqRedis, holder: PolicyHolder) -> None:
        self._redis = redis
        self._holder = holder
        self._taken_by: PolicyHolder | None = None
        self._tell: Callable[[str], None] = lambda other: None

    def when_taken(self, tell: Callable[[str], None]) -> None:
        """Have `tell` called with who took the lease over, should another process do so, or have done so."""
        self._tell = tell
        if self._taken_by is not None:
            tell(str(self._taken_by))

    async def keep(self) -> None:
        """Renew the lease until another process has taken it over."""
        while self._taken_by is None:
            await asyncio.sleep(RENEW_S)
            with retry.tolerating_outage():
                self._taken_by = await policy_lease.renew(self._redis, self._holder)
        self._tell(str(self._taken_by))


@contextlib.asynccontextmanager
async def sole_policy(redis: ArqRedis, run_id: str) -> AsyncIterator[PolicyHold]:
    """Hold the lease on the engines. An earlier process of the same run loses it; raises ValueError if another run has it."""
    holder = PolicyHolder(run_id)
    other = await retry.until_answered(lambda: policy_lease.acquire(redis, holder))
    if other is not None:
        raise ValueError(
            f"the engines of this Redis serve {other}, and engines serve one policy at a time. Stop that process first (if it is "
            f"gone already, wait {policy_lease.LEASE_S:.0f} s), or use a Redis and engines of your own"
        )
    hold = PolicyHold(redis, holder)
    keeper = asyncio.create_task(hold.keep())
    try:
        yield hold
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
        with retry.tolerating_outage():
            await policy_lease.release(redis, holder)
