"""Groups that leave the open ones: ready or dropped when they are complete or overdue, dropped when their task is in quarantine."""

import time

from trainer.rollouts.groups import Group, GroupBook
from trainer.rollouts.judge_waits import JudgementWaits
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.quarantine import Quarantine


class GroupCloser:
    """Of one run."""

    def __init__(
        self, book: GroupBook, ledger: Ledger, quarantine: Quarantine, waits: JudgementWaits
    ) -> None:
        self._book = book
        self._ledger = ledger
        self._quarantine = quarantine
        self._waits = waits

    def close(self, group: Group) -> None:
        """Decide on a group that is complete or overdue: it becomes ready for a step, or it is settled untrained."""
        group.closed_at = group.released_at = time.time()
        verdict = self._book.verdict(group)
        if verdict == "trained":
            self._ledger.note_signal()
            self._waits.hold(group)
        else:
            self._ledger.drop_group(group, verdict)

    def drop_quarantined(self) -> None:
        """Settle every live group of a task in quarantine, untrained."""
        for task_id in self._quarantine:
            for group in self._book.withdraw_task(task_id):
                self._ledger.close_group(group, group.fates("quarantined"))
