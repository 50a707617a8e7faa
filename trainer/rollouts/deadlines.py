"""No group waits for ever for its last member: at its deadline it is judged by who is in.

The wait in the queue has a bound of its own, if any: a group that nobody claims is given up. The deadline runs from the
first claim of any member, as Redis's clock has it, so that neither that wait nor a restart of the trainer counts. What is
still missing then is surplus, and withdrawn.
"""

import time

from redis.asyncio import Redis

from pipeline import queue
from trainer.rollouts.groups import Group, GroupBook
from trainer.rollouts.intake import Intake


class Deadlines:
    """Closes the groups of one book in time."""

    def __init__(
        self, redis: Redis, book: GroupBook, intake: Intake, *, deadline_s: float, queue_s: float | None
    ) -> None:
        self._redis = redis
        self._book = book
        self._intake = intake
        self._deadline_s = deadline_s
        self._queue_s = queue_s

    async def close_overdue(self) -> list[Group]:
        """Close every group whose time is up and that has members enough, or that nobody claimed; returns those. Looks
        at every open group.
        """
        claims = await queue.first_claims(self._redis, self._book.unclaimed)
        self._book.note_claims(claims, time.monotonic())
        late = self._book.overdue(time.monotonic(), self._deadline_s)
        if self._queue_s is not None:
            late += self._book.left_lying(time.time(), self._queue_s)
        for group in late:
            self._intake.close(group)
        return late
