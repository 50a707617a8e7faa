"""The order of things in one run, on rank 0: recover, publish, then train step by step until the run ends.

pump            reads trajectories and enqueues requests beside everything else, in tasks of its own
learner         works on one thread; the event loop never waits for arithmetic
publication     waits for an evaluation under way: its weights must not change under it
checkpoint      is complete before the trajectories in it are acknowledged, and never holds half an evaluation
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from pipeline import retry
from trainer.loop.ending import EndRecorder
from trainer.loop.evaluations import Evaluations
from trainer.loop.heartbeat import Heartbeat
from trainer.loop.next_groups import NextGroups
from trainer.loop.publications import Publications
from trainer.loop.pump import Pump
from trainer.loop.recovery import RunRecovery
from trainer.loop.state import RunState
from trainer.loop.step import Stepper
from trainer.recipe import Recipe
from trainer.records.journal import COMPLETE, EndReason
from trainer.rollouts.ledger import LedgerState
from trainer.weights.publish import NoEngineServes

RECOVERING = "recovering"
"""The phase before anything is published or enqueued."""


class Loop:
    """One run from where its checkpoint left it to its end."""

    def __init__(
        self,
        recipe: Recipe,
        restored: LedgerState,
        state: RunState,
        *,
        is_complete: bool,
        recovery: RunRecovery,
        publications: Publications,
        pump: Pump,
        next_groups: NextGroups,
        stepper: Stepper,
        evaluations: Evaluations,
        checkpoint: Callable[[], Awaitable[None]],
        needs_checkpoint: Callable[[], bool],
        heartbeat: Heartbeat,
        ending: EndRecorder,
        say: Callable[[str], None],
    ) -> None:
        """`is_complete`: the run took all its steps in an earlier process, and nothing is left to do.
        `needs_checkpoint` says whether only a checkpoint makes room in Redis.
        """
        self._recipe = recipe
        self._restored = restored
        self._state = state
        self._is_complete = is_complete
        self._recovery = recovery
        self._publications = publications
        self._pump = pump
        self._next_groups = next_groups
        self._stepper = stepper
        self._evaluations = evaluations
        self._checkpoint = checkpoint
        self._needs_checkpoint = needs_checkpoint
        self._heartbeat = heartbeat
        self._ending = ending
        self._say = say
        self._waiting_since = time.monotonic()

    def stop(self) -> None:
        """End in good order after what is under way; what is open stays open for a resume."""
        self._say("stopping in good order; once more to stop at once")
        self._state.request_stop()

    async def run(self) -> EndReason:
        """Everything, until the run ends. Raises what broke, in an ExceptionGroup."""
        try:
            reason = await self._run()
        except BaseException as error:
            self._ending.write_row("error", error)
            await self._ending.write_status("error", error)
            raise
        await self._ending.write_status(reason)
        return reason

    async def _run(self) -> EndReason:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._heartbeat.run())]
            self._state.phase = RECOVERING
            await retry.until_answered(lambda: self._recovery.restore(self._restored))
            reason: EndReason = "finished"
            if not self._is_complete:
                try:
                    await self._begin()
                    loops = (self._pump.run(), self._pump.run_sweeps(), self._publications.watch_engines())
                    background += [tasks.create_task(loop) for loop in loops]
                    reason = await self._train()
                except NoEngineServes:  # told to stop while waiting for one
                    reason = "stopped"
                reason = await self._finish(reason)
            for task in background:
                task.cancel()
        return reason

    async def _begin(self) -> None:
        """Publish the checkpoint's weights, and enqueue what is missing of the open groups."""
        await self._publications.publish_first()
        size = self._recipe.rollout.group_size
        await retry.until_answered(lambda: self._recovery.enqueue_missing(size, version=self._state.version))
        await retry.until_answered(self._pump.sweep)

    async def _train(self) -> EndReason:
        """Step by step. The first evaluation begins with the first step's groups: it need not hold them up."""
        recipe, state = self._recipe, self._state
        while state.step < recipe.num_steps:
            groups = await self._next_groups.wait()
            if isinstance(groups, str):
                return groups
            await self._evaluations.begin_before()
            if not await self._stepper.take(groups, wait_s=time.monotonic() - self._waiting_since):
                continue
            if not await self._evaluations.finished():
                return "stopped"
            if self._is_checkpoint_due():
                await self._checkpoint()
            await self._publications.publish()
            if state.step < recipe.num_steps:
                await self._evaluations.begin_between()
            self._waiting_since = time.monotonic()
        return "finished"

    def _is_checkpoint_due(self) -> bool:
        """By the recipe, at the end, or because only a checkpoint makes room in Redis."""
        recipe, step = self._recipe, self._state.step
        wanted = step % recipe.checkpoint.every_steps == 0 or step == recipe.num_steps
        return wanted or self._needs_checkpoint()

    async def _finish(self, reason: EndReason) -> EndReason:
        """The last evaluation, then an account of every request, then the last checkpoint.

        A run that was stopped, or to which nothing but failures came back, is left as it is for a resume.
        """
        if reason in COMPLETE:
            await self._pump.finish()
            await self._evaluations.begin_after()
            if await self._evaluations.finished():
                self._ending.write_row(reason)
            else:
                reason = "stopped"
        if not self._evaluations.is_under_way:
            await self._checkpoint()
        if reason not in COMPLETE:
            self._ending.write_row(reason)
        self._state.phase = reason
        return reason
