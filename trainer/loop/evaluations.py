"""When a run evaluates on held-out tasks: before its first step, every so many steps, and at its end.

An evaluation plays beside training, but its weights must not change under it: whoever publishes waits for it first.
"""

import asyncio
from collections.abc import Awaitable, Callable

from pipeline import retry
from trainer.loop.budget import AdmissionBudget
from trainer.loop.open_requests import OpenRequests
from trainer.loop.state import RunState
from trainer.recipe import EvaluationRecipe
from trainer.rollouts.heldout import HeldOut
from trainer.rollouts.ledger import Ledger


class Evaluations:
    """Of one run, each held once."""

    def __init__(
        self,
        recipe: EvaluationRecipe,
        state: RunState,
        budget: AdmissionBudget,
        *,
        heldout: HeldOut,
        ledger: Ledger,
        requests: OpenRequests,
        checkpoint: Callable[[], Awaitable[None]],
    ) -> None:
        self._recipe = recipe
        self._state = state
        self._budget = budget
        self._heldout = heldout
        self._ledger = ledger
        self._requests = requests
        self._checkpoint = checkpoint

    @property
    def is_under_way(self) -> bool:
        return bool(self._heldout.progress)

    async def begin_before(self) -> None:
        """With the starting weights. Call when the first step has its groups: training need not wait for it until then."""
        if self._recipe.before and self._state.step == 0:
            await self._begin("heldout_before")

    async def begin_between(self) -> None:
        """With the weights of the step just published, if it is one to be evaluated."""
        every, step = self._recipe.every_steps, self._state.step
        if every and step % every == 0:
            await self._begin(f"heldout_step_{step}")

    async def begin_after(self) -> None:
        """With the last weights."""
        if self._recipe.after:
            await self._begin("heldout_after")

    async def finished(self) -> bool:
        """Wait for an evaluation under way; False if told to stop before it is finished."""
        self._state.phase = "evaluating"
        waits = [
            asyncio.create_task(self._heldout.finished()),
            asyncio.create_task(self._state.stop.wait()),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return not self.is_under_way

    async def _begin(self, name: str) -> None:
        if self._heldout.is_wanted and name not in self._ledger.evaluations:
            self._heldout.start(name, version=self._state.version, step=self._state.step)
            await retry.until_answered(self._enqueue)

    async def _enqueue(self) -> None:
        """May be called again. A full Redis has room after a checkpoint."""
        if self._budget.needs_checkpoint and self._ledger.pending_ids:
            await self._checkpoint()
        await self._requests.enqueue_evaluation()
