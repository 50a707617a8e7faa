"""Waiting for the groups of the next step, or for the reason why there will be none."""

from collections.abc import Awaitable, Callable

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
        *,
        book: GroupBook,
        ledger: Ledger,
        dispatcher: Dispatcher,
        limits: BatchRecipe,
        tend_checkpoints: Callable[[], Awaitable[bool]],
        say: Callable[[str], None],
    ) -> None:
        """`tend_checkpoints` finishes and writes checkpoints as needed, and returns whether there was anything to do."""
        self._state = state
        self._book = book
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._limits = limits
        self._tend_checkpoints = tend_checkpoints
        self._say = say

    async def wait(self) -> list[Group] | EndReason:
        """The groups of the next step; or, if there will be none, how the run ends."""
        return await self._wait(lambda: self._book.take(self._state.timeline.lag))

    async def gather(self, use: Callable[[list[Group]], Awaitable[None]]) -> list[Group] | EndReason:
        """As `wait`, with `use` called for the groups that are ready while the others are awaited."""
        gathered: list[Group] = []
        while (number := len(gathered)) < self._limits.groups_per_step:
            some = await self._wait(
                lambda num_taken=number: self._book.take_some(self._state.timeline.lag, num_taken=num_taken)
            )
            if isinstance(some, str):
                self._book.put_back(gathered)
                self._state.gathered_groups = 0
                return some
            gathered += some
            self._state.gathered_groups = len(gathered)
            await use(some)
        return gathered

    async def _wait(self, take: Callable[[], list[Group] | None]) -> list[Group] | EndReason:
        state = self._state
        while not (end := self._end()):
            state.phase = WAITING
            state.changed.clear()
            # Dropped trajectories may take up the room in Redis that the next step's groups need.
            has_tended = await self._tend_checkpoints()
            groups = take()
            if groups is not None:
                return groups
            if not has_tended:
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
