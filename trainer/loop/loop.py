"""The order of things in one run, on rank 0: recover, publish, then train step by step until the run ends.

pump            reads trajectories and enqueues requests beside everything else, in tasks of its own
learner         works on one thread; the event loop never waits for arithmetic
publication     comes right after the step; engines load the weights beside what follows, and nothing here waits for them
audit           comes after the publication, then the step's row
checkpoint      is complete before the trajectories in it are acknowledged
evaluation      plays beside the next steps; no newer weights are brought to the engines until it is finished
"""

import asyncio
from collections.abc import Callable

from pipeline import retry
from trainer.loop.alarms import StorageWatch
from trainer.loop.due_checkpoints import DueCheckpoints
from trainer.loop.ending import EndRecorder
from trainer.loop.evaluations import Evaluations
from trainer.loop.fleet import FleetWatch
from trainer.loop.heartbeat import Heartbeat
from trainer.loop.next_groups import NextGroups
from trainer.loop.publications import NoEngineServes, Publications
from trainer.loop.pump import Pump
from trainer.loop.recovery import RunRecovery
from trainer.loop.state import RunState
from trainer.loop.step import Stepper
from trainer.loop.step_times import StepTimes
from trainer.recipe import Recipe
from trainer.records.journal import COMPLETE, EndReason
from trainer.records.time_rows import StartRow
from trainer.rollouts.ledger import LedgerState

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
        times: StepTimes,
        checkpoints: DueCheckpoints,
        heartbeat: Heartbeat,
        storage: StorageWatch,
        fleet: FleetWatch,
        ending: EndRecorder,
        record: Callable[[StartRow], None],
        say: Callable[[str], None],
    ) -> None:
        """`is_complete`: the run took all its steps in an earlier process, and nothing is left to do."""
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
        self._times = times
        self._checkpoints = checkpoints
        self._heartbeat = heartbeat
        self._storage = storage
        self._fleet = fleet
        self._ending = ending
        self._record = record
        self._say = say

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
            beside = (
                self._heartbeat.run(),
                self._storage.run(),
                self._fleet.run(),
                self._publications.deliver(),
                self._evaluations.run(),
            )
            background = [tasks.create_task(one) for one in beside]
            self._state.phase = RECOVERING
            await retry.until_answered(lambda: self._recovery.restore(self._restored))
            reason: EndReason = "finished"
            if not self._is_complete:
                try:
                    await self._begin()
                    pumping = (self._pump.run(), self._pump.run_sweeps())
                    background += [tasks.create_task(one) for one in pumping]
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
        await retry.until_answered(
            lambda: self._recovery.enqueue_missing(size, version=self._state.served_version)
        )
        await retry.until_answered(self._pump.sweep)

    async def _train(self) -> EndReason:
        """Step by step. The first evaluation begins with the first step's groups: it need not hold them up."""
        recipe, state = self._recipe, self._state
        self._record(StartRow(step=state.step, seconds={**self._times.lap()}))
        if state.step < recipe.num_steps:
            self._evaluations.begin_between()  # a resume starts over what was under way
        while state.step < recipe.num_steps:
            with self._times.spent("wait"):
                if recipe.batch.streaming:
                    groups = await self._next_groups.gather(self._stepper.accumulate)
                else:
                    groups = await self._next_groups.wait()
            if isinstance(groups, str):
                return groups
            self._evaluations.begin_before()
            taken = await self._stepper.take(groups)
            if taken is None:
                continue
            await self._publications.publish()
            await self._stepper.settle(taken)
            if not await self._follow_up():
                return "stopped"
        return "finished"

    async def _follow_up(self) -> bool:
        """What is due after a settled step: a checkpoint, an evaluation. False if told to stop meanwhile."""
        await self._checkpoints.after_step(may_begin=self._evaluations.may_checkpoint)
        if self._state.step < self._recipe.num_steps and self._evaluations.is_due:
            with self._times.spent("evaluation"):
                if not await self._evaluations.finished():
                    return False
            await self._checkpoints.after_step(may_begin=True)
            self._evaluations.begin_between()
        return True

    async def _finish(self, reason: EndReason) -> EndReason:
        """The last evaluation, then an account of every request, then the last checkpoint.

        A run that was stopped, or to which nothing but failures came back, is left as it is for a resume.
        """
        if reason in COMPLETE:
            await self._pump.finish()
            if await self._evaluate_at_the_end():
                self._ending.write_row(reason)
            else:
                reason = "stopped"
        await self._checkpoints.last(may_begin=self._evaluations.may_checkpoint)
        if reason not in COMPLETE:
            self._ending.write_row(reason)
        self._state.phase = reason
        return reason

    async def _evaluate_at_the_end(self) -> bool:
        """False if told to stop before the evaluation under way and the last one are finished."""
        with self._times.spent("evaluation"):
            if not await self._evaluations.finished():
                return False
            self._evaluations.begin_after()
            if not await self._evaluations.finished():
                return False
        await self._publications.finish()
        return True
