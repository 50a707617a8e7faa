"""Reading a run's stream so that each entry is accepted once: the same for a run and a standalone evaluation.

A connection that breaks during a read leaves entries that Redis counts as delivered and that nobody has seen. After any error,
and after a restart, the reader therefore starts with what was delivered and is not acknowledged.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic

from arq.connections import ArqRedis

from pipeline import stream
from pipeline.kinds import ROLLOUT, H, JobKind
from pipeline.stream import Delivery

READ_AT_ONCE = 64


class StreamReader(Generic[H]):
    """The trainer's side of the stream of one run and one kind of job; one reader at a time."""

    def __init__(
        self,
        redis: ArqRedis,
        run_id: str,
        accept: Callable[[Delivery[H]], Awaitable[None]],
        *,
        record: Callable[[Delivery[H]], Awaitable[None]],
        kind: JobKind[Any, Any, H] = ROLLOUT,
    ) -> None:
        """Each entry is given to `record`, which has it stored, and then to `accept`. If one of them raises, both are given the
        same entry again later.
        """
        self._kind = kind
        self._redis = redis
        self._run_id = run_id
        self._accept = accept
        self._record = record
        self._turn = asyncio.Lock()
        self._accepted: set[str] = set()  # entries that are not acknowledged
        self._may_have_lost = False  # whether a read failed since the last recovery

    async def recover(self) -> int:
        """Accept what was delivered before and neither accepted nor acknowledged; returns how many entries."""
        async with self._turn:
            return await self._recover()

    async def read(self, *, block_ms: int | None) -> int:
        """Accept what is new, waiting up to `block_ms` for it (None: not at all); after an error, what was lost in it. Returns how many
        entries.
        """
        async with self._turn:
            if self._may_have_lost:
                return await self._recover()
            self._may_have_lost = True
            num_accepted = await self._accept_all(
                await stream.read_new(
                    self._redis, self._run_id, count=READ_AT_ONCE, block_ms=block_ms, kind=self._kind
                )
            )
            self._may_have_lost = False
            return num_accepted

    def forget(self, acknowledged: Iterable[tuple[str, str]]) -> None:
        """These (stream entry, request id) pairs will not be delivered again."""
        self._accepted.difference_update(entry for entry, _ in acknowledged)

    async def _recover(self) -> int:
        self._may_have_lost = True
        await stream.open_reader(self._redis, self._run_id, self._kind)
        deliveries = await stream.read_unacknowledged(self._redis, self._run_id, self._kind)
        num_accepted = await self._accept_all(
            [delivery for delivery in deliveries if delivery.entry_id not in self._accepted]
        )
        self._may_have_lost = False
        return num_accepted

    async def _accept_all(self, deliveries: list[Delivery[H]]) -> int:
        for delivery in deliveries:
            await self._record(delivery)
            await self._accept(delivery)
            self._accepted.add(delivery.entry_id)
        return len(deliveries)
