"""When a run writes checkpoints: every so many steps, at its end, and when only a checkpoint makes room in Redis.

A checkpoint that is due begins after its step and is written beside the next ones; it is finished, and its trajectories are
acknowledged, at the first quiet moment after that. One that must make room is waited for.
"""

from typing import Protocol

from trainer.loop.budget import AdmissionBudget
from trainer.loop.state import RunState
from trainer.loop.step_times import StepTimes
from trainer.rollouts.ledger import Ledger


class CheckpointWriting(Protocol):
    """Writes one checkpoint at a time."""

    @property
    def is_written(self) -> bool: ...

    async def begin(self) -> None: ...

    async def finish(self) -> None: ...

    async def write(self) -> None: ...


class DueCheckpoints:
    """Of one run. Called by the loop's coroutine only, and never between a step and its settlement."""

    def __init__(
        self,
        writer: CheckpointWriting,
        state: RunState,
        budget: AdmissionBudget,
        ledger: Ledger,
        times: StepTimes,
        *,
        every_steps: int,
        num_steps: int,
    ) -> None:
        self._writer = writer
        self._state = state
        self._budget = budget
        self._ledger = ledger
        self._times = times
        self._every_steps = every_steps
        self._num_steps = num_steps
        self._is_due = False

    async def after_step(self, *, may_begin: bool) -> None:
        """Begin the checkpoint of this step, or one that was put off, if it is due. `may_begin` is False while an evaluation is
        under way that a resume would not repeat: then it is put off.
        """
        step = self._state.step
        self._is_due |= step % self._every_steps == 0 or step == self._num_steps
        await self.tend()
        if self._is_due and may_begin:
            self._is_due = False
            with self._times.spent("checkpoint"):
                await self._writer.begin()

    async def tend(self) -> bool:
        """At a quiet moment: finish what is written, and make room in Redis. Returns whether there was anything to do."""
        if not self._writer.is_written and not self._is_room_needed:
            return False
        with self._times.spent("checkpoint"):
            await self._writer.finish()
            if self._is_room_needed:
                await self._writer.write()
        return True

    async def last(self, *, may_begin: bool) -> None:
        """Finish the one under way, then write the run's last, if that is allowed."""
        with self._times.spent("checkpoint"):
            await (self._writer.write() if may_begin else self._writer.finish())

    @property
    def _is_room_needed(self) -> bool:
        return self._budget.needs_checkpoint and bool(self._ledger.pending_ids)
