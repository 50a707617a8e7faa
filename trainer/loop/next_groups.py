"""Waiting for the groups of the next step, or for the reason why there will be none."""

from collections.abc import Awaitable, Callable

from trainer.loop.budget import AdmissionBudget
from trainer.loop.run_status import WAITING
from trainer.loop.state import RunState
from trainer.recipe import BatchRecipe
from trainer.records.journal import EndReason
from trainer.rollouts.dispatch import Dispatcher
from trainer.rollouts.groups import Group, GroupBook
from trainer.rollouts.ledger import Ledger


class NextGroups:
    """Of one run."""

    def __init__(
        self,
        state: RunState,
        budget: AdmissionBudget,
        *,
        book: GroupBook,
        ledger: Ledger,
        dispatcher: Dispatcher,
        limits: BatchRecipe,
        checkpoint: Callable[[], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        self._state = state
        self._budget = budget
        self._book = book
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._limits = limits
        self._checkpoint = checkpoint
        self._say = say

    async def wait(self) -> list[Group] | EndReason:
        """The groups of the next step; or, if there will be none, how the run ends."""
        state = self._state
        while not (end := self._end()):
            state.phase = WAITING
            state.changed.clear()
            groups = self._book.take(state.timeline.lag)
            if groups is not None:
                return groups
            if self._budget.needs_checkpoint and self._ledger.pending_ids:
                # Dropped trajectories take up the room in Redis that the next step's groups need.
                await self._checkpoint()
            else:
                await state.changed.wait()
        return end

    def _end(self) -> EndReason | None:
        if self._state.is_stopping:
            return "stopped"
        if self._ledger.brake.failed_groups >= self._limits.max_failed_groups:
            return "failing"
        if self._ledger.groups_without_signal >= self._limits.max_groups_without_signal:
            return "nothing to learn"
        if self._dispatcher.is_exhausted:
            self._say("every training task is in quarantine")
            return "nothing to learn"
        return None
