"""Groups that leave the open ones: judged when they are complete or overdue, dropped when their task is in quarantine."""

from trainer.rollouts.groups import Group, GroupBook
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.quarantine import Quarantine


class GroupCloser:
    """Of one run."""

    def __init__(self, book: GroupBook, ledger: Ledger, quarantine: Quarantine) -> None:
        self._book = book
        self._ledger = ledger
        self._quarantine = quarantine

    def close(self, group: Group) -> None:
        """Judge a group that is complete or overdue: it becomes ready for a step, or it is settled untrained."""
        verdict = self._book.verdict(group)
        if verdict == "trained":
            self._ledger.note_signal()
        else:
            self._ledger.drop_group(group, verdict)

    def drop_quarantined(self) -> None:
        """Settle every live group of a task in quarantine, untrained."""
        for task_id in self._quarantine:
            for group in self._book.withdraw_task(task_id):
                self._ledger.close_group(group, group.fates("quarantined"))
