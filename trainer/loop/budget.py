"""The number of groups that may be enqueued at the moment. It has four bounds, of which the tightest counts: staleness, bytes in Redis,
bytes in memory, and a pause after groups that failed. No group is enqueued while a service that the recipe requires is unavailable.
"""

import time
from dataclasses import replace

from pipeline import connection, stream
from pipeline.journal.rows import ClosedBy
from pipeline.kinds import KINDS
from trainer.loop.state import RunState
from trainer.rollouts.admission import Admission, Backlog, StalenessController
from trainer.rollouts.books import Books

REDIS_SHARE = 0.5
"""The share of a Redis with a memory limit that trajectories may use; the rest is for requests, and other runs."""


class AdmissionBudget:
    """The budget of one run. The contents of Redis are those of the last measurement."""

    def __init__(self, books: Books, state: RunState, staleness: StalenessController) -> None:
        self._redis = books.redis
        self._run_id = books.run_id
        self._admission = books.admission
        self._staleness = staleness
        self._book = books.groups
        self._ledger = books.ledger
        self._judges = books.judging.presence
        self._state = state
        self._bounds = books.recipe.admission
        self._group_size = books.recipe.largest_group_size
        self.queue_bytes = 0  # bytes of this run's trajectories and judgements in Redis
        self.redis_bytes = 0  # bytes that Redis may hold in all; 0 without a limit
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
        """The number of groups that may be enqueued now."""
        if self._judges.closed_because:
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
        """The reason why nothing is enqueued at the moment, or the number of groups that may be."""
        if reason := self._judges.closed_because:
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
        if self._judges.closed_because:
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
        """Whether Redis is full of trajectories that it may only delete after a checkpoint."""
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
