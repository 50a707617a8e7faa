"""The order of things in one run, on rank 0: ask, take in, learn, keep, publish, and say so all the while.

reading and asking      goes on beside everything else, a loop of its own
learner                 lives on one thread; the event loop never waits for arithmetic
publication             waits for an evaluation under way: its version must not change under it
checkpoint              comes before the acknowledgements of what it holds, and never holds half an evaluation
"""

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeline import census, queue, stream
from pipeline.telemetry import span
from pipeline.weights import ServedWeights, WeightVersion, newest_version
from trainer.admission import Backlog
from trainer.audit import Gap, measure_gap
from trainer.batch import Batch
from trainer.deadlines import Deadlines
from trainer.groups import Group, make_batch
from trainer.journal import EndRow, Fate, PublicationRow, StepRow, read
from trainer.learner.config import StepMetrics
from trainer.ledger import LedgerState, SinceStep, encode_state
from trainer.parts import Parts
from trainer.patience import REDIS_AWAY, RETRY_S, insist
from trainer.recipe import Recipe
from trainer.recovery import adopt, ask_again, recover
from trainer.timeline import Timeline
from trainer.weights.engines import EngineFailure
from trainer.weights.publish import NoEngineServes
from trainer.withdrawal import withdraw_rest, withdraw_surplus

if TYPE_CHECKING:
    pass

log = logging.getLogger("swerve.trainer")

READ_BLOCK_MS = 200
BEAT_S = 1.0
ENGINES_S = 2.0  # between two looks at what they serve

Ending = Literal["finished", "stopped", "failing", "nothing to learn"]


class Loop:
    """One run from where its checkpoint left it to its end."""

    def __init__(self, recipe: Recipe, run_id: str, parts: Parts, state: LedgerState) -> None:
        self._recipe = recipe
        self._run_id = run_id
        self._parts = parts
        self._state = state
        self._step = state.step
        self._begun_steps = state.step
        self._published_steps = state.step
        self._version = state.version
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._timeline = Timeline()
        for row in read(parts.journal.directory, PublicationRow):
            self._timeline.add(row.version, row.step)
        self._ended = any(row.step >= recipe.num_steps for row in read(parts.journal.directory, EndRow))
        self._failures_told = 0
        self._deadlines = Deadlines(parts.redis, parts.book, parts.intake, deadline_s=recipe.group_deadline_s)
        self._queue_bytes = 0
        self._quarantine_seen: set[str] = set()
        self._asks = True
        self._asking = asyncio.Lock()  # a sweep between owing and queueing would take a request for lost
        self._phase = "starting"
        self._waiting_since = time.monotonic()

    def stop(self) -> None:
        """End in good order after what is under way; what is open stays open for a resume."""
        self._parts.progress.say("stopping in good order; once more to stop at once")
        self._stop.set()
        self._changed.set()

    async def run(self) -> Ending:
        """Everything. Raises what broke, in an ExceptionGroup."""
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(self._beat())]
            self._phase = "taking up what is owed"
            await insist(lambda: recover(self._parts, self._run_id, self._state))
            ending: Ending = "finished"
            if not self._ended:
                try:
                    await self._take_up()
                    loops = (self._pump(), self._sweep(), self._watch_engines())
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
        await self._publish_first()
        size = self._recipe.rollout.group_size
        await insist(lambda: adopt(self._parts, size, version=self._version))
        await insist(self._requeue_lost)

    # Beside everything

    async def _pump(self) -> None:
        while True:
            try:
                await self._parts.intake.read(block_ms=READ_BLOCK_MS)
                await self._tell_of_failures()
                self._tell_of_quarantine()
                await self._see_to_deadlines()
                async with self._asking:
                    await withdraw_surplus(self._parts, self._run_id)
                self._queue_bytes = await stream.unacknowledged_bytes(self._parts.redis, self._run_id)
                if self._asks and not self._stop.is_set():
                    async with self._asking:
                        await self._parts.dispatcher.open_groups(self._room(), version=self._version)
            except REDIS_AWAY as error:
                await self._wait_for_redis(error)
            self._changed.set()

    @property
    def _in_redis(self) -> Backlog:
        book = self._parts.book
        return Backlog(
            "of answers wait in Redis for a checkpoint",
            self._recipe.admission.max_queue_bytes,
            held_bytes=self._queue_bytes,
            num_awaited=book.num_awaited,
            largest_bytes=book.largest_body_bytes,
        )

    @property
    def _in_memory(self) -> Backlog:
        book = self._parts.book
        return Backlog(
            "of answers wait in the trainer's memory for their step",
            self._recipe.admission.max_held_bytes,
            held_bytes=book.held_bytes,
            num_awaited=book.num_awaited,
            largest_bytes=book.largest_bytes,
        )

    def _room(self) -> int:
        book = self._parts.book
        room = self._parts.admission.room(
            begun_steps=self._begun_steps,
            published_steps=self._published_steps,
            live_groups=book.num_live,
        )
        for backlog in (self._in_redis, self._in_memory):
            room = backlog.room(room, group_size=self._recipe.rollout.group_size, open_groups=book.num_open)
        return self._parts.ledger.brake.room(room, open_groups=book.num_open, now=time.monotonic())

    async def _tell_of_failures(self) -> None:
        """Once per group that failed after others: what is the matter, and that less is asked for."""
        brake = self._parts.ledger.brake
        if brake.pause_s and brake.failed_groups != self._failures_told:
            letter = await queue.dead_letter(self._parts.redis, self._run_id, self._parts.intake.last_failed)
            evidence = letter.failures[-1:] if letter else ()
            last = "".join(f", the last at {one.boundary}: {one.message}" for one in evidence)
            self._parts.progress.say(
                f"{brake.failed_groups} groups in a row failed{last}; "
                f"the next is asked for in {brake.pause_s:.0f} s"
            )
        self._failures_told = brake.failed_groups

    def _tell_of_quarantine(self) -> None:
        quarantine = self._parts.quarantine
        for task_id in [one for one in quarantine if one not in self._quarantine_seen]:
            self._quarantine_seen.add(task_id)
            self._parts.progress.say(
                f"{task_id} is in quarantine and not played any more: {quarantine.reason(task_id)}"
            )

    async def _see_to_deadlines(self) -> None:
        for group in await self._deadlines.see_to():
            self._parts.progress.say(
                f"group {group.cursor} ({group.task_id}) closes at its deadline with {len(group.members)} of "
                f"{group.size} members"
            )

    async def _wait_for_redis(self, error: Exception) -> None:
        """Until it answers; then read again whatever was delivered into the broken connection."""
        self._parts.progress.say(f"Redis does not answer ({error}); waiting for it")
        while True:
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(*REDIS_AWAY):
                await self._parts.intake.recover()
                num_forgotten = await ask_again(self._parts, self._run_id)
                what = (
                    f"; {num_forgotten} requests that it forgot are asked for anew" if num_forgotten else ""
                )
                self._parts.progress.say(f"Redis answers again{what}")
                return

    async def _sweep(self) -> None:
        """Now and then: what is owed must be somewhere."""
        while True:
            await asyncio.sleep(self._recipe.admission.sweep_every_s)
            try:
                async with self._asking:
                    await self._requeue_lost()
            except REDIS_AWAY as error:
                log.warning("sweep put off: %s", error)

    async def _watch_engines(self) -> None:
        """Every engine that answers must serve the newest weights, also one that has just started."""
        trouble = ""
        while True:
            await asyncio.sleep(ENGINES_S)
            try:
                served = await self._parts.publisher.mend()
            except (EngineFailure, *REDIS_AWAY) as error:
                if str(error) != trouble:
                    log.warning("engines: %s", error)
                trouble = str(error)
                continue
            trouble = ""
            if served is not None:
                log.info("weights v%d brought to engines that were behind", served.version)

    async def _requeue_lost(self) -> None:
        requeued = await queue.sweep(self._parts.redis, self._run_id)
        if requeued:
            self._parts.progress.say(f"queued {len(requeued)} requests again that were owed but in no queue")

    async def _beat(self) -> None:
        while True:
            status = self._status()
            with contextlib.suppress(*REDIS_AWAY):
                await census.beat_run(self._parts.redis, status)
            parts = (
                f"step {status.step}/{status.num_steps}",
                f"weights v{status.version}",
                status.phase,
                status.detail,
            )
            self._parts.progress.beat("  ·  ".join(part for part in parts if part))
            await asyncio.sleep(BEAT_S)

    def _status(self) -> census.RunStatus:
        return census.RunStatus(
            run_id=self._run_id,
            phase=self._phase,
            detail=self._detail(),
            step=self._step,
            num_steps=self._recipe.num_steps,
            version=max(0, self._version),
            admission=self._admission_sentence(),
            journal=str(self._parts.journal.directory.resolve()),
            quarantined=tuple(self._parts.quarantine),
            updated_at=time.time(),
        )

    def _admission_sentence(self) -> str:
        for backlog in (self._in_redis, self._in_memory):
            if closed := backlog.sentence(self._recipe.rollout.group_size):
                return closed
        return self._parts.admission.sentence(
            begun_steps=self._begun_steps,
            published_steps=self._published_steps,
            live_groups=self._parts.book.num_live,
        )

    def _detail(self) -> str:
        book, heldout = self._parts.book, self._parts.heldout.progress
        if self._phase != "waiting for trajectories":
            return heldout
        per_step = self._recipe.batch.groups_per_step
        if book.num_ready >= per_step:
            waits = f"step {self._step + 1} waits for an older group, lest it be trained too late"
        else:
            waits = (
                f"step {self._step + 1} waits for {book.needed} more trajectories; "
                f"{book.num_ready} of {per_step} groups ready"
            )
            since = self._parts.ledger.since_step
            if since.zero_variance + since.invalid:
                waits += f", {since.zero_variance} dropped without signal, {since.invalid} for failures"
        return f"{waits}; {heldout}" if heldout else waits

    # Learning

    async def _train(self) -> Ending:
        recipe = self._recipe
        while self._step < recipe.num_steps:
            groups = await self._wait_for_groups()
            if groups is None:
                return self._why_no_groups()
            if self._step == 0 and recipe.evaluation.before:
                await self._evaluate(
                    "heldout_before"
                )  # after the first rollouts: the first step need not wait for it
            if not await self._learn(groups):
                continue
            if not await self._evaluated():
                return "stopped"
            if self._is_checkpoint_due():
                await self._checkpoint()
            await self._publish(await self._next_version())
            every = recipe.evaluation.every_steps
            if every and self._step % every == 0 and self._step < recipe.num_steps:
                await self._evaluate(f"heldout_step_{self._step}")
            self._waiting_since = time.monotonic()
        return "finished"

    def _is_checkpoint_due(self) -> bool:
        """By the recipe, at the end, or because only a checkpoint makes room in Redis."""
        recipe = self._recipe
        wanted = self._step % recipe.checkpoint.every_steps == 0 or self._step == recipe.num_steps
        return wanted or self._in_redis.is_full(recipe.rollout.group_size)

    def _why_no_groups(self) -> Ending:
        if self._stop.is_set():
            return "stopped"
        return "failing" if self._has_failed_too_often() else "nothing to learn"

    def _has_failed_too_often(self) -> bool:
        return self._parts.ledger.brake.failed_groups >= self._recipe.batch.max_failed_groups

    async def _wait_for_groups(self) -> list[Group] | None:
        """The groups of the next step; None if there will be none."""
        self._phase = "waiting for trajectories"
        while not self._stop.is_set():
            signalless = self._parts.ledger.groups_without_signal
            if signalless >= self._recipe.batch.max_groups_without_signal or self._has_failed_too_often():
                return None
            if self._parts.dispatcher.is_exhausted:
                self._parts.progress.say("every training task is in quarantine")
                return None
            self._changed.clear()
            groups = self._parts.book.take(self._timeline.lag)
            if groups is not None:
                return groups
            await self._changed.wait()
        return None

    async def _learn(self, groups: list[Group]) -> bool:
        """Take one step; False if the groups turned out to hold nothing to train."""
        recipe, parts = self._recipe, self._parts
        withheld = recipe.admission.stragglers == "withhold"
        batch, fates = make_batch(
            groups,
            step=self._step + 1,
            lag_of=self._timeline.lag,
            temperature=recipe.rollout.sampling.temperature,
            kind=recipe.batch.advantage,
            withhold_beyond=recipe.admission.max_lag_versions if withheld else None,
        )
        if batch.num_trained_tokens == 0:
            parts.progress.say("a whole batch was withheld or empty; asking for others")
            self._close(groups, fates)
            return False
        self._begun_steps += 1
        if batch.lag_max > recipe.admission.max_lag_versions:
            log.warning("step %d trains trajectories up to %d versions late", batch.step, batch.lag_max)
        wait_s = time.monotonic() - self._waiting_since
        self._phase = "optimizer step"
        with contextlib.ExitStack() as spans:
            for group in groups:
                for member in group.members.values():
                    attributes = {
                        "step": batch.step,
                        "request": member.head.request_id,
                        "version": self._version,
                    }
                    if fates[member.head.request_id] == "trained":
                        spans.enter_context(span("train", traceparent=member.head.traceparent, **attributes))
            metrics = await parts.learner(parts.feed.step, batch)
        self._step = batch.step
        self._phase = "measuring the log-prob gap"
        gap = await parts.learner(
            measure_gap, batch, parts.feed.learner.versions_held, parts.feed.logprobs_under
        )
        self._record(groups, batch, metrics, gap, wait_s)
        self._close(groups, fates)
        return True

    def _close(self, groups: list[Group], fates: dict[str, Fate]) -> None:
        for group in groups:
            members = group.members.items()
            self._parts.ledger.close_group(group, {number: fates[m.head.request_id] for number, m in members})

    def _record(
        self, groups: list[Group], batch: Batch, metrics: StepMetrics, gap: Gap, wait_s: float
    ) -> None:
        since = self._parts.ledger.since_step
        rewards = [reward for group in groups for reward in group.rewards.values()]
        heads = {m.head.request_id: m.head for group in groups for m in group.members.values()}
        row = StepRow(
            step=batch.step,
            version=self._version,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            lr=metrics.lr,
            reward_mean=(since.reward_sum + sum(rewards)) / (since.num_rewards + len(rewards)),
            num_trajectories=batch.num_trajectories,
            request_ids=batch.request_ids,
            num_trained_tokens=metrics.num_trained_tokens,
            num_unique_sampled_tokens=sum(heads[one].sampled_tokens for one in batch.request_ids),
            groups_dropped_zero_variance=since.zero_variance,
            groups_dropped_invalid=since.invalid,
            members_refilled=since.refilled,
            members_withdrawn=since.withdrawn,
            lag_max=batch.lag_max,
            lag_mean=batch.lag_mean,
            logprob_gap_max=gap.max,
            logprob_gap_mean=gap.mean,
            num_gap_tokens=gap.num_tokens,
            entropy=metrics.entropy,
            ratio_mean=metrics.ratio_mean,
            ratio_max=metrics.ratio_max,
            ess_share=metrics.ess_share,
            masked_share=metrics.masked_share,
            vetoed_share=metrics.vetoed_share,
            wait_s=wait_s,
            train_s=metrics.train_s,
            at=time.time(),
        )
        self._parts.ledger.since_step = SinceStep()
        self._parts.journal.append(row)
        self._parts.board.show(row)
        self._parts.progress.show(row, len(groups))

    # Keeping and publishing

    async def _checkpoint(self) -> None:
        """Weights, optimizer and ledger to disk; then, and only then, acknowledge what they hold."""
        parts = self._parts
        self._phase = "writing a checkpoint"
        state = parts.ledger.state(step=self._step, version=self._version, cursor=parts.dispatcher.cursor)
        place = parts.checkpoints.place(self._step)
        await parts.learner(parts.feed.save, place, encode_state(state))
        await asyncio.to_thread(parts.checkpoints.complete, place)
        await insist(lambda: stream.acknowledge(parts.redis, self._run_id, list(state.pending)))
        parts.ledger.acknowledged(state)
        parts.intake.forget(state.pending)

    async def _publish_first(self) -> None:
        """After a resume, the newest version may hold these very weights: then it is brought to the engines
        again under its number.

        It does if it is of the checkpoint's step: a run publishes as soon as it has resumed, so a version of
        steps that were lost is never the newest for long enough to be mistaken for one of steps taken since.
        """
        newest = await insist(lambda: newest_version(self._parts.redis, self._run_id))
        if newest is None or newest.step != self._step or not await asyncio.to_thread(_is_there, newest):
            await self._publish(await self._next_version())
        else:
            await self._publish(newest.version)

    async def _next_version(self) -> int:
        return max(await insist(self._parts.publisher.next_version), self._version + 1)

    async def _publish(self, version: int) -> None:
        """Bring the present weights to the engines as `version`; without any engine to take it, wait for
        one.
        """
        self._phase = "publishing weights"
        row = await insist(lambda: self._deliver(version))
        self._parts.journal.append(row)
        await self._parts.learner(self._parts.feed.snapshot, version)
        self._timeline.add(version, self._step)
        self._version = version
        self._published_steps = self._step

    async def _deliver(self, version: int) -> PublicationRow:
        """May be called again if Redis went away under it."""
        parts, began = self._parts, time.monotonic()
        newest = await newest_version(parts.redis, self._run_id)
        try:
            if newest is None or newest.version < version:
                return await parts.publisher.publish(version, self._step)
            served = await parts.publisher.catch_up()
        except NoEngineServes as error:
            served = await self._wait_for_engine(version, error)
        newest = await newest_version(parts.redis, self._run_id)
        assert newest is not None, "a version has been announced"
        assert served is not None, "a version has been announced"
        return PublicationRow(
            version=version,
            step=self._step,
            num_bytes=newest.num_bytes,
            engines=served.engines,
            quarantined=served.quarantined,
            export_s=0.0,
            update_s=time.monotonic() - began,
        )

    async def _wait_for_engine(self, version: int, error: EngineFailure) -> ServedWeights:
        """Until one takes the announced version. Raises NoEngineServes if told to stop meanwhile."""
        self._parts.progress.say(f"{error}; waiting for one")
        self._phase = f"waiting for an engine to take weights v{version}"
        while not self._stop.is_set():
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(EngineFailure):
                served = await self._parts.publisher.catch_up()
                assert served is not None, "a version has been announced"
                return served
        raise error

    async def _evaluate(self, name: str) -> None:
        heldout = self._parts.heldout
        if heldout.is_wanted and name not in self._parts.ledger.evaluations:
            heldout.start(name, version=self._version, step=self._step)
            async with self._asking:
                await insist(heldout.send)

    async def _evaluated(self) -> bool:
        """Wait for an evaluation under way; False if told to stop instead."""
        self._phase = "evaluating"
        waits = [asyncio.create_task(self._parts.heldout.finished()), asyncio.create_task(self._stop.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return not self._parts.heldout.progress

    # Ending

    async def _end(self, ending: Ending) -> Ending:
        """The last evaluation, then an account of everything asked for, then the last checkpoint.

        A run that was stopped, or that nothing but failures came back to, is left as it is for a resume.
        """
        parts = self._parts
        if ending not in ("stopped", "failing"):
            self._asks = False
            async with self._asking:
                await insist(lambda: withdraw_rest(parts, self._run_id))
            await insist(self._read_the_rest)
            if self._recipe.evaluation.after:
                await self._evaluate("heldout_after")
            if await self._evaluated():
                parts.journal.append(EndRow(step=self._step, version=self._version, reason=ending))
            else:
                ending = "stopped"
        if not parts.heldout.progress:
            await self._checkpoint()
        self._phase = ending
        return ending

    async def _read_the_rest(self) -> None:
        """Answers that came before they could be withdrawn."""
        await self._parts.intake.recover()
        while await self._parts.intake.read(block_ms=1):
            pass


def _is_there(version: WeightVersion) -> bool:
    return Path(version.directory).is_dir()
