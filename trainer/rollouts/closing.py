"""Closes groups: complete or overdue groups become ready or are dropped, and groups whose task is in quarantine are dropped.

No group waits for its last member without limit: at its deadline, the members that have arrived decide. The deadline runs from the first
claim of any member, on Redis's clock, so neither the wait in the queue nor a restart of the trainer counts. That wait may have a separate
limit: a group that nobody claims in time is given up. Requests that are still outstanding when a group closes are surplus, and withdrawn.
"""

import time
from collections.abc import Callable

from redis.asyncio import Redis

from pipeline import queue
from trainer.rollouts.dispatch import Quarantine
from trainer.rollouts.groups import Group, GroupBook
from trainer.rollouts.judging import JudgementWaits
from trainer.rollouts.ledger import Ledger


class GroupCloser:
    """Closes the groups of one run, for any reason."""

    def __init__(
        self, book: GroupBook, ledger: Ledger, quarantine: Quarantine, waits: JudgementWaits
    ) -> None:
        self._book = book
        self._ledger = ledger
        self._quarantine = quarantine
        self._waits = waits

    def close(self, group: Group) -> None:
        """Decides on a group that is complete or overdue: it becomes ready for a step, or is settled untrained."""
        group.closed_at = group.released_at = time.time()
        verdict = self._book.verdict(group)
        if verdict == "trained":
            self._ledger.note_signal()
            self._waits.hold(group)
        else:
            self._ledger.drop_group(group, verdict)

    def drop_quarantined(self) -> None:
        """Settles every live group of a task in quarantine, untrained."""
        for task_id in self._quarantine:
            for group in self._book.withdraw_task(task_id):
                self._ledger.close_group(group, group.fates("quarantined"))


class Deadlines:
    """Closes the groups of one book at their deadlines."""

    def __init__(
        self,
        redis: Redis,
        book: GroupBook,
        closer: GroupCloser,
        *,
        deadline_s: Callable[[int], float],
        queue_s: float | None,
    ) -> None:
        """`deadline_s` is the time of the group at a cursor."""
        self._redis = redis
        self._book = book
        self._closer = closer
        self._deadline_s = deadline_s
        self._queue_s = queue_s

    async def close_overdue(self) -> list[Group]:
        """Close every overdue group with enough valid members, and every group that waited too long for a claim; returns them.

        The call examines every open group.
        """
        claims = await queue.first_claims(self._redis, self._book.unclaimed)
        self._book.note_claims(claims, time.monotonic())
        late = self._book.overdue(time.monotonic(), self._deadline_s)
        if self._queue_s is not None:
            late += self._book.unclaimed_since(time.time(), self._queue_s)
        for group in late:
            self._closer.close(group)
        return late
