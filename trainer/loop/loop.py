"""The concurrent loops of a run on rank 0. Only the learner has a thread.

loop          waits for                                         is unblocked by
train         enough ready groups                               `RunState.changed`, which the pump sets after every turn; a stop
              the learner                                       its thread, one call at a time
              the end of an evaluation, before the next begins  the last held-out trajectory; a stop
              the first version of a process                    an engine that serves it; a stop
pump          new stream entries, 200 ms at most                a worker that publishes; after an outage, Redis
              its turn at the open requests                     the lock in `rollouts/open_requests.py`
sweep         `admission.sweep_every_s`                         the same lock: nothing may be half enqueued
deliveries    a second, or the end of a delivery                a new version; each engine has a task of its own, with a deadline
evaluations   the engines to serve its version                  the deliveries
              its trajectories                                  the last held-out trajectory
heartbeat     a second                                          nothing else: it also beats while the learner works
storage       30 s                                              nothing else
fleet         5 s, longer for a large fleet                     nothing else
lease keeper  a second                                          nothing else; it sets the stop if another run took the lease

`train` is in `step.py`, deliveries are in `weights/deliveries.py`, the lease keeper is in `weights/publish.py`. The pump continues while
the learner works: requests of the next steps are enqueued as soon as a publication raises the budget, trajectories are received, and groups
are closed. The first signal ends the loop after the current call; no task is cancelled before that.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from redis.exceptions import OutOfMemoryError, RedisError

from pipeline import redis_calls
from pipeline.journal.reading import read
from pipeline.journal.rows import COMPLETE, EndReason, EndRow, StartRow
from pipeline.stream import RunForgotten
from pipeline.telemetry import meter
from trainer.loop.alarms import Notices, measured_storage
from trainer.loop.checkpoints import CheckpointWriter, DueCheckpoints
from trainer.loop.evaluations import Evaluations
from trainer.loop.publications import NoEngineServes, Publications
from trainer.loop.run import Run
from trainer.loop.status import SAMPLE_S, EndRecorder, FleetWatch, RunGauges, beat, pause_s, status_of
from trainer.loop.step import Steps
from trainer.rollouts.closing import Deadlines
from trainer.rollouts.open_requests import RunRecovery

log = logging.getLogger("swerve.trainer")

RECOVERING = "recovering"
"""The phase before anything is published or enqueued."""

MEASURE_STORAGE_S = 30.0
READ_BLOCK_MS = 200
RETRY_S = 1.0
LOOK_S = 1.0  # pause between two looks at values that are expensive to compute or hardly ever change


class Loop:
    """One run from its checkpoint to its end: recover, publish, train step by step, end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._state = run.state
        writer = CheckpointWriter(
            run.checkpoints, run.learner, run.state, run.books, run.streams, run.recorder
        )
        self._recovery = RunRecovery(run.books, run.streams, run.requests)
        self._checkpoints = DueCheckpoints(writer, run.budget, run.times, run.recipe)
        self._evaluations = Evaluations(run, self._checkpoints)
        self._publications = Publications(run)
        self._steps = Steps(run, self._publications, self._checkpoints, self._evaluations)
        self._pump = Pump(run, self._recovery)
        self._ending = EndRecorder(run)

    def stop(self) -> None:
        """Ends in good order after the current work; open requests stay open for a resume."""
        self._run.say("stopping in good order; once more to stop at once")
        self._state.request_stop()

    async def run(self) -> EndReason:
        """Runs everything until the run ends. Raises errors in an ExceptionGroup."""
        try:
            reason = await self._beside_each_other()
        except BaseException as error:
            await self._ending.write_error(error)
            raise
        await self._ending.write_status(reason)
        return reason

    async def _beside_each_other(self) -> EndReason:
        run, gauges = self._run, RunGauges(meter(), self._run)
        async with asyncio.TaskGroup() as tasks:
            background: list[asyncio.Task[None]] = []

            def begin(**loops: Coroutine[Any, Any, None]) -> None:
                background.extend(tasks.create_task(one, name=name) for name, one in loops.items())

            status = partial(status_of, run)
            begin(
                heartbeat=beat(run.redis, status, show=run.console.beat, measure=gauges.measure),
                storage=self._watch_storage(),
                fleet=self._watch_fleet(),
                deliveries=self._publications.deliver(),
                evaluations=self._play_evaluations(),
            )
            self._state.phase = RECOVERING
            await redis_calls.until_answered(lambda: self._recovery.restore(run.books.restored))
            reason: EndReason = "finished"
            if not self._was_complete():
                try:
                    await self._publish_first()
                    begin(pump=self._pump.run(), sweep=self._pump.run_sweeps())
                    reason = await self._train()
                except NoEngineServes:  # a stop arrived while the loop waited for an engine
                    reason = "stopped"
                reason = await self._finish(reason)
            for task in background:
                task.cancel()
        return reason

    def _was_complete(self) -> bool:
        """Whether an earlier process took all steps of the run, so that nothing is left to do."""
        num_steps = self._run.recipe.num_steps
        return any(row.is_complete and row.step >= num_steps for row in read(self._run.journal, EndRow))

    async def _publish_first(self) -> None:
        """Publishes the checkpoint's weights, and enqueues the missing requests of the open groups."""
        await self._publications.publish_first()
        version = self._state.served_version
        await redis_calls.until_answered(lambda: self._recovery.enqueue_missing(version=version))
        await redis_calls.until_answered(self._pump.sweep)

    async def _train(self) -> EndReason:
        run, step = self._run, self._state.step
        num_threads = run.learner.num_threads
        run.record(StartRow(step=step, seconds={**run.times.lap()}, num_threads=num_threads))
        if step < run.recipe.num_steps:
            self._evaluations.begin_between()  # a resume starts unfinished evaluations again
        return await self._steps.train()

    async def _finish(self, reason: EndReason) -> EndReason:
        """Play the last evaluation, account for every request, and write the last checkpoint.

        A run that was stopped, or whose groups only failed, keeps its open requests for a resume.
        """
        if reason in COMPLETE:
            await self._pump.finish()
            if await self._evaluate_at_the_end():
                await self._ending.write_row(reason)
            else:
                reason = "stopped"
        await self._checkpoints.last(may_begin=self._evaluations.may_checkpoint)
        if reason not in COMPLETE:
            await self._ending.write_row(reason)
        self._state.phase = reason
        return reason

    async def _evaluate_at_the_end(self) -> bool:
        """Returns False if a stop comes before the current evaluation and the last one are finished."""
        with self._run.times.spent("evaluation"):
            if not await self._evaluations.finished():
                return False
            self._evaluations.begin_after()
            if not await self._evaluations.finished():
                return False
        await self._publications.finish()
        return True

    async def _play_evaluations(self) -> None:
        while True:
            await self._evaluations.play_next()

    async def _watch_storage(self) -> None:
        """Records the alarms about the run's disk and its Redis."""
        run = self._run
        while True:
            for row in run.alarms.observe_storage(await measured_storage(run.redis, run.root)):
                run.record(row)
            await asyncio.sleep(MEASURE_STORAGE_S)

    async def _watch_fleet(self) -> None:
        """Records the states of the workers' slots."""
        run, wait_s = self._run, SAMPLE_S
        watch = FleetWatch(
            run.redis,
            run.state,
            closed_by=run.budget.closed_by,
            heldout=lambda: run.books.heldout.progress,
        )
        while True:
            await asyncio.sleep(wait_s)
            with redis_calls.tolerating_outage():
                row = await watch.sample()
                run.record(row)
                wait_s = pause_s(row)


class Pump:
    """Receives trajectories and enqueues requests while the learner works: it reads, closes groups in time, withdraws surplus requests, and
    enqueues groups.

    The pump also continues after outages of Redis. It then reads again what was delivered into the broken connection, and enqueues requests
    again that Redis lost, which may be all of them.
    """

    def __init__(self, run: Run, recovery: RunRecovery) -> None:
        self._state = run.state
        self._budget = run.budget
        self._streams = run.streams
        self._requests = run.requests
        self._judging = run.books.judging
        self._recovery = recovery
        self._sweep_every_s = run.recipe.admission.sweep_every_s
        self._deadlines = Deadlines(
            run.redis,
            run.books.groups,
            run.books.closer,
            deadline_s=lambda cursor: run.books.sources.at(cursor).recipe.group_deadline_s,
            queue_s=run.recipe.rollout.queue_s,
        )
        self._notices = Notices(run.books, run.intake, run.alarms, say=run.say)
        self._say = run.say
        self._looked_at = float("-inf")
        self._may_enqueue = True

    async def run(self) -> None:
        """Pumps until it is cancelled."""
        while True:
            try:
                await self._turn()
            except OutOfMemoryError as error:
                await self._wait_for_memory(error)
            except RunForgotten as error:
                await self._recover(f"Redis answers, and {error}")
            except RedisError as error:
                if not redis_calls.is_outage(error):
                    raise
                await self._recover(f"Redis does not answer ({error}); waiting for it")
            self._state.changed.set()

    async def run_sweeps(self) -> None:
        """Sweeps every `sweep_every_s` until it is cancelled: an open request must be in the queue, claimed, answered or dead."""
        while True:
            await asyncio.sleep(self._sweep_every_s)
            try:
                await self.sweep()
            except RedisError as error:
                if not redis_calls.is_outage(error):
                    raise
                log.warning("sweep put off: %s", error)

    async def sweep(self) -> None:
        num_requeued = await self._requests.sweep() + await self._judging.requests.sweep()
        if num_requeued:
            self._say(f"enqueued {num_requeued} open requests again that were in no queue")
        if num_forgotten := await self._recovery.replace_forgotten():
            self._say(f"{num_forgotten} requests that Redis forgot are enqueued anew")

    async def finish(self) -> None:
        """Stops enqueueing for training: withdraws unanswered requests, and receives the results that arrived before that."""
        self._may_enqueue = False
        await redis_calls.until_answered(self._requests.withdraw_training)
        await redis_calls.until_answered(lambda: self._judging.requests.withdraw_unneeded(is_end=True))
        await redis_calls.until_answered(self._read_the_rest)

    async def _turn(self) -> None:
        await self._streams.read(block_ms=READ_BLOCK_MS)
        await self._notices.give()
        if time.monotonic() >= self._looked_at + LOOK_S:
            self._looked_at = time.monotonic()
            await self._budget.measure_limit()
            await self._close_overdue_groups()
            await self._judging.presence.look()
        await self._judging.tend()
        await self._requests.withdraw_surplus()
        await self._budget.measure_backlog()
        if await self._budget.has_room_again():
            self._say("Redis has room again")
        if self._may_enqueue and not self._state.is_stopping:
            await self._requests.enqueue_groups(self._budget.groups(), version=self._state.served_version)

    async def _close_overdue_groups(self) -> None:
        for group in await self._deadlines.close_overdue():
            self._say(
                f"group {group.cursor} ({group.task_id}) closes at its deadline with {len(group.members)} of "
                f"{group.size} members"
            )

    async def _wait_for_memory(self, error: Exception) -> None:
        """Handles a full Redis: trajectories are still read, nothing is enqueued, and the next checkpoint makes room."""
        if not self._budget.is_refused:
            self._say(f"Redis is full ({error}); enqueuing nothing until a checkpoint makes room")
        self._budget.is_refused = True
        await asyncio.sleep(RETRY_S)

    async def _recover(self, trouble: str) -> None:
        """Waits until Redis answers.

        Then reads again what was delivered into the broken connection, and has requests enqueued again that Redis has lost.
        """
        self._say(trouble)
        what = ""
        while True:
            await asyncio.sleep(RETRY_S)
            with redis_calls.tolerating_outage():
                if await self._recovery.reopen():
                    what = "; it has forgotten this run"
                await self._streams.recover()
                if num_forgotten := await self._recovery.replace_forgotten():
                    what += f"; {num_forgotten} requests that it forgot are enqueued anew"
                self._say(f"Redis answers again{what}")
                return

    async def _read_the_rest(self) -> None:
        await self._streams.recover()
        while await self._streams.read(block_ms=1):
            pass
