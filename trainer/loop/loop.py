"""The order of things in one run, on rank 0: ask, take in, learn, keep, publish, and say so all the while.

reading and asking      goes on beside everything else, a loop of its own
learner                 lives on one thread; the event loop never waits for arithmetic
publication             waits for an evaluation under way: its version must not change under it
checkpoint              comes before the acknowledgements of what it holds, and never holds half an evaluation
"""

import asyncio
import time
from typing import Literal

from pipeline import retry, stream
from trainer.loop.budget import Room
from trainer.loop.heartbeat import WAITING, Bulletin
from trainer.loop.parts import Parts
from trainer.loop.publications import Publications
from trainer.loop.pump import Pump
from trainer.loop.recovery import adopt, recover
from trainer.loop.state import Standing
from trainer.loop.step import Stepper
from trainer.recipe import Recipe
from trainer.records.journal import EndRow, PublicationRow, read
from trainer.rollouts.groups import Group
from trainer.rollouts.ledger import LedgerState, encode_state
from trainer.weights.publish import NoEngineServes

Ending = Literal["finished", "stopped", "failing", "nothing to learn"]


class Loop:
    """One run from where its checkpoint left it to its end."""

    def __init__(self, recipe: Recipe, run_id: str, parts: Parts, state: LedgerState) -> None:
        self._recipe = recipe
        self._run_id = run_id
        self._parts = parts
        self._state = state
        self._standing = Standing.at(state, read(parts.journal.directory, PublicationRow))
        self._ended = any(row.step >= recipe.num_steps for row in read(parts.journal.directory, EndRow))
        self._room = Room(recipe, parts, self._standing)
        self._pump = Pump(recipe, run_id, parts, self._standing, self._room)
        self._publications = Publications(run_id, parts, self._standing)
        self._stepper = Stepper(recipe, parts, self._standing)
        self._bulletin = Bulletin(recipe, run_id, parts, self._standing, self._room)
        self._waiting_since = time.monotonic()

    def stop(self) -> None:
        """End in good order after what is under way; what is open stays open for a resume."""
        self._parts.progress.say("stopping in good order; once more to stop at once")
        self._standing.stop.set()
        self._standing.changed.set()

    async def run(self) -> Ending:
        """Everything. Raises what broke, in an ExceptionGroup."""
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._bulletin.run())]
            self._standing.phase = "taking up what is owed"
            await retry.until_answered(lambda: recover(self._parts, self._run_id, self._state))
            ending: Ending = "finished"
            if not self._ended:
                try:
                    await self._take_up()
                    loops = (self._pump.run(), self._pump.sweep(), self._publications.watch_engines())
                    beside += [tasks.create_task(loop) for loop in loops]
                    ending = await self._train()
                except NoEngineServes:  # told to stop while waiting for one
                    ending = "stopped"
                ending = await self._end(ending)
            for task in beside:
                task.cancel()
        return ending

    async def _take_up(self) -> None:
        """Publish the checkpoint's weights, and ask for what is missing of what is owed."""
        await self._publications.take_up()
        size = self._recipe.rollout.group_size
        await retry.until_answered(lambda: adopt(self._parts, size, version=self._standing.version))
        await retry.until_answered(self._pump.requeue_lost)

    async def _train(self) -> Ending:
        recipe, standing = self._recipe, self._standing
        while standing.step < recipe.num_steps:
            groups = await self._wait_for_groups()
            if groups is None:
                return self._why_no_groups()
            if standing.step == 0 and recipe.evaluation.before:
                await self._evaluate(
                    "heldout_before"
                )  # after the first rollouts: the first step need not wait for it
            if not await self._stepper.take(groups, wait_s=time.monotonic() - self._waiting_since):
                continue
            if not await self._evaluated():
                return "stopped"
            if self._is_checkpoint_due():
                await self._checkpoint()
            await self._publications.publish()
            every = recipe.evaluation.every_steps
            if every and standing.step % every == 0 and standing.step < recipe.num_steps:
                await self._evaluate(f"heldout_step_{standing.step}")
            self._waiting_since = time.monotonic()
        return "finished"

    async def _wait_for_groups(self) -> list[Group] | None:
        """The groups of the next step; None if there will be none."""
        standing = self._standing
        standing.phase = WAITING
        while not standing.is_stopping:
            signalless = self._parts.ledger.groups_without_signal
            if signalless >= self._recipe.batch.max_groups_without_signal or self._has_failed_too_often():
                return None
            if self._parts.dispatcher.is_exhausted:
                self._parts.progress.say("every training task is in quarantine")
                return None
            standing.changed.clear()
            groups = self._parts.book.take(standing.timeline.lag)
            if groups is not None:
                return groups
            if self._room.needs_checkpoint and self._parts.ledger.pending_ids:
                await self._checkpoint()  # what came to nothing takes up the room that a step's groups need
                standing.phase = WAITING
                continue
            await standing.changed.wait()
        return None

    def _why_no_groups(self) -> Ending:
        if self._standing.is_stopping:
            return "stopped"
        return "failing" if self._has_failed_too_often() else "nothing to learn"

    def _has_failed_too_often(self) -> bool:
        return self._parts.ledger.brake.failed_groups >= self._recipe.batch.max_failed_groups

    def _is_checkpoint_due(self) -> bool:
        """By the recipe, at the end, or because only a checkpoint makes room in Redis."""
        recipe, step = self._recipe, self._standing.step
        wanted = step % recipe.checkpoint.every_steps == 0 or step == recipe.num_steps
        return wanted or self._room.needs_checkpoint

    async def _checkpoint(self) -> None:
        """Weights, optimizer and ledger to disk; then, and only then, acknowledge what they hold."""
        parts, standing = self._parts, self._standing
        standing.phase = "writing a checkpoint"
        cursor = parts.dispatcher.cursor
        state = parts.ledger.state(step=standing.step, version=standing.version, cursor=cursor)
        place = parts.checkpoints.place(standing.step)
        await parts.learner(parts.feed.save, place, encode_state(state))
        await asyncio.to_thread(parts.checkpoints.complete, place)
        await retry.until_answered(lambda: stream.acknowledge(parts.redis, self._run_id, list(state.pending)))
        parts.ledger.acknowledged(state)
        parts.intake.forget(state.pending)

    async def _evaluate(self, name: str) -> None:
        heldout = self._parts.heldout
        if heldout.is_wanted and name not in self._parts.ledger.evaluations:
            heldout.start(name, version=self._standing.version, step=self._standing.step)
            await retry.until_answered(self._ask_for_evaluation)

    async def _ask_for_evaluation(self) -> None:
        """May be called again. A Redis that is full has room after a checkpoint, which an evaluation may wait for."""
        if self._room.needs_checkpoint and self._parts.ledger.pending_ids:
            await self._checkpoint()
        async with self._pump.asking:
            await self._parts.heldout.send()

    async def _evaluated(self) -> bool:
        """Wait for an evaluation under way; False if told to stop instead."""
        self._standing.phase = "evaluating"
        stop = self._standing.stop
        waits = [asyncio.create_task(self._parts.heldout.finished()), asyncio.create_task(stop.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return not self._parts.heldout.progress

    async def _end(self, ending: Ending) -> Ending:
        """The last evaluation, then an account of everything asked for, then the last checkpoint.

        A run that was stopped, or that nothing but failures came back to, is left as it is for a resume.
        """
        parts, standing = self._parts, self._standing
        if ending not in ("stopped", "failing"):
            await self._pump.finish()
            if self._recipe.evaluation.after:
                await self._evaluate("heldout_after")
            if await self._evaluated():
                parts.records.append(EndRow(step=standing.step, version=standing.version, reason=ending))
            else:
                ending = "stopped"
        if not parts.heldout.progress:
            await self._checkpoint()
        standing.phase = ending
        return ending
