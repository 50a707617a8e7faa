"""No group waits for ever for its last member: at its deadline it is judged by the members that have arrived.

The deadline runs from the first claim of any member, on Redis's clock, so neither the wait in the queue nor a restart of the
trainer counts. That wait may have a bound of its own: a group that nobody claims in time is given up. Requests that are still
outstanding when a group closes are surplus, and withdrawn.
"""

import time

from redis.asyncio import Redis

from pipeline import queue
from trainer.rollouts.closing import GroupCloser
from trainer.rollouts.groups import Group, GroupBook


class Deadlines:
    """Closes the groups of one book in time."""

    def __init__(
        self, redis: Redis, book: GroupBook, closer: GroupCloser, *, deadline_s: float, queue_s: float | None
    ) -> None:
        self._redis = redis
        self._book = book
        self._closer = closer
        self._deadline_s = deadline_s
        self._queue_s = queue_s

    async def close_overdue(self) -> list[Group]:
        """Close every overdue group with enough valid members, and every group that waited too long for a claim; returns them.

        Looks at every open group.
        """
        claims = await queue.first_claims(self._redis, self._book.unclaimed)
        self._book.note_claims(claims, time.monotonic())
        late = self._book.overdue(time.monotonic(), self._deadline_s)
        if self._queue_s is not None:
            late += self._book.unclaimed_since(time.time(), self._queue_s)
        for group in late:
            self._closer.close(group)
        return late
