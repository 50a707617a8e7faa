"""How many more groups may be enqueued at the moment. Four bounds, of which the tightest counts: staleness, bytes in Redis,
bytes in memory, and a pause after groups that failed. None is enqueued while something that the recipe requires is away.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from arq.connections import ArqRedis

from pipeline import connection, stream
from pipeline.kinds import KINDS
from trainer.loop.state import RunState
from trainer.recipe import AdmissionRecipe
from trainer.records.time_rows import ClosedBy
from trainer.rollouts.admission import Admission, Backlog
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.ledger import Ledger

# Of a Redis with a memory limit, for trajectories; the rest is for requests, and other runs.
REDIS_SHARE = 0.5


class Lookahead(Protocol):
    """How far admission may run ahead of the steps."""

    @property
    def ahead_versions(self) -> int:
        """Never more than the run's `max_lag_versions`."""
        ...

    @property
    def sentence(self) -> str:
        """Why it is so; empty if it never changes."""
        ...


class AdmissionBudget:
    """Of one run. What Redis holds is as of the last measurement."""

    def __init__(
        self,
        redis: ArqRedis,
        run_id: str,
        admission: Admission,
        staleness: Lookahead,
        book: GroupBook,
        ledger: Ledger,
        state: RunState,
        *,
        bounds: AdmissionRecipe,
        group_size: int,
        closed_because: Callable[[], str] = lambda: "",
    ) -> None:
        """`closed_because` says why no group may be enqueued whatever the bounds say; empty if there is no such reason."""
        self._redis = redis
        self._run_id = run_id
        self._admission = admission
        self._staleness = staleness
        self._book = book
        self._ledger = ledger
        self._state = state
        self._bounds = bounds
        self._group_size = group_size
        self._closed_because = closed_because
        self.queue_bytes = 0  # of this run's trajectories and judgements, in Redis
        self.redis_bytes = 0  # that Redis may hold of everything; 0 without a limit
        self.is_refused = False  # whether Redis refused the last write because it had no memory left

    async def measure_limit(self) -> None:
        self.redis_bytes = await stream.max_bytes(self._redis)

    async def measure_backlog(self) -> None:
        each = [await stream.unacknowledged_bytes(self._redis, self._run_id, kind) for kind in KINDS]
        self.queue_bytes = sum(each)

    async def has_room_again(self) -> bool:
        """Whether Redis accepts writes that it refused before. Raises OutOfMemoryError while it still refuses."""
        if not self.is_refused:
            return False
        await connection.check(self._redis)
        self.is_refused = False
        return True

    def groups(self) -> int:
        """How many more groups may be enqueued."""
        if self._closed_because():
            return 0
        book = self._book
        num_groups = self._ahead.room(
            begun_steps=self._state.begun_steps,
            served_steps=self._state.served_steps,
            live_groups=book.num_live + self._state.gathered_groups,
        )
        for backlog in (self._in_redis, self._in_memory):
            num_groups = backlog.room(num_groups, group_size=self._group_size, open_groups=book.num_open)
        return self._ledger.brake.room(num_groups, open_groups=book.num_open, now=time.monotonic())

    def sentence(self) -> str:
        """Why nothing is enqueued at the moment, or how many more groups may be."""
        if reason := self._closed_because():
            return f"closed: {reason}"
        for backlog in (self._in_redis, self._in_memory):
            if closed := backlog.sentence(self._group_size):
                return closed
        room = self._ahead.sentence(
            begun_steps=self._state.begun_steps,
            served_steps=self._state.served_steps,
            live_groups=self._book.num_live + self._state.gathered_groups,
        )
        return "; ".join(one for one in (room, self._staleness.sentence) if one)

    def closed_by(self) -> ClosedBy:
        """The bound that keeps the next group from being enqueued; "" while none does."""
        if self._closed_because():
            return "judge"
        if self.groups():
            return ""
        if self._in_redis.is_full(self._group_size):
            return "redis"
        if self._in_memory.is_full(self._group_size):
            return "memory"
        bound = self._ahead.bound(
            begun_steps=self._state.begun_steps,
            served_steps=self._state.served_steps,
            live_groups=self._book.num_live + self._state.gathered_groups,
        )
        return bound or "failures"

    @property
    def _ahead(self) -> Admission:
        """The bound of staleness at the moment."""
        return replace(self._admission, max_lag_versions=self._staleness.ahead_versions)

    @property
    def needs_checkpoint(self) -> bool:
        """Whether Redis is full of trajectories, which it may only forget after a checkpoint."""
        return self.is_refused or self._in_redis.is_full(self._group_size)

    @property
    def _in_redis(self) -> Backlog:
        limit_bytes = self._bounds.max_queue_bytes
        return Backlog(
            "of trajectories wait in Redis for a checkpoint",
            min(limit_bytes, int(self.redis_bytes * REDIS_SHARE) or limit_bytes),
            held_bytes=self.queue_bytes,
            num_awaited=self._book.num_awaited,
            largest_bytes=self._book.largest_body_bytes,
        )

    @property
    def _in_memory(self) -> Backlog:
        return Backlog(
            "of trajectories wait in the trainer's memory for their step",
            self._bounds.max_held_bytes,
            held_bytes=self._book.held_bytes,
            num_awaited=self._book.num_awaited,
            largest_bytes=self._book.largest_bytes,
        )
