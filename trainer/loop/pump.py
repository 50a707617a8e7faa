"""Reading and asking, beside everything else: answers in, groups closed in time, surplus withdrawn, new groups asked for.

Goes on whatever the learner does, and through outages of Redis: afterwards what was delivered into a broken connection is
read again, and what Redis forgot is asked for anew.
"""

import asyncio
import logging
import time

from redis.exceptions import OutOfMemoryError, RedisError

from pipeline import connection, deadletters, queue, retry, stream
from trainer.loop.budget import Room
from trainer.loop.parts import Parts
from trainer.loop.recovery import answer_unreadable, ask_again
from trainer.loop.state import Standing
from trainer.loop.withdrawal import withdraw_rest, withdraw_surplus
from trainer.recipe import Recipe
from trainer.rollouts.deadlines import Deadlines

log = logging.getLogger("swerve.trainer")

READ_BLOCK_MS = 200
RETRY_S = 1.0
LOOK_S = 1.0  # between two looks at what takes the longer the more is under way, or hardly ever changes


class Pump:
    """Of one run. Whoever else asks for something or withdraws it holds `asking` meanwhile: a sweep between owing and
    queueing would take a request for lost.
    """

    def __init__(self, recipe: Recipe, run_id: str, parts: Parts, standing: Standing, room: Room) -> None:
        self._run_id = run_id
        self._parts = parts
        self._standing = standing
        self._room = room
        self._sweep_every_s = recipe.admission.sweep_every_s
        self._deadlines = Deadlines(
            parts.redis,
            parts.book,
            parts.intake,
            deadline_s=recipe.group_deadline_s,
            queue_s=recipe.rollout.queue_s,
        )
        self._looked_at = float("-inf")
        self._asks = True
        self._failures_told = 0
        self._quarantine_seen: set[str] = set()
        self.asking = asyncio.Lock()

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                await self._stroke()
            except OutOfMemoryError as error:
                await self._make_do(error)
            except RedisError as error:
                if not retry.is_outage(error):
                    raise
                await self._wait_for_redis(error)
            self._standing.changed.set()

    async def sweep(self) -> None:
        """For ever, now and then: what is owed must be somewhere."""
        while True:
            await asyncio.sleep(self._sweep_every_s)
            try:
                async with self.asking:
                    await self.requeue_lost()
            except RedisError as error:
                if not retry.is_outage(error):
                    raise
                log.warning("sweep put off: %s", error)

    async def requeue_lost(self) -> None:
        requeued = await queue.sweep(self._parts.redis, self._run_id)
        if requeued:
            self._parts.progress.say(f"queued {len(requeued)} requests again that were owed but in no queue")
        asked = (*self._parts.book.outstanding, *self._parts.heldout.outstanding)
        await answer_unreadable(self._parts.redis, self._run_id, asked)

    async def finish(self) -> None:
        """Ask no more: withdraw what has not been answered, and take in what was before it could be withdrawn."""
        self._asks = False
        async with self.asking:
            await retry.until_answered(lambda: withdraw_rest(self._parts, self._run_id))
        await retry.until_answered(self._read_the_rest)

    async def _stroke(self) -> None:
        await self._parts.intake.read(block_ms=READ_BLOCK_MS)
        await self._tell_of_failures()
        self._tell_of_quarantine()
        if time.monotonic() >= self._looked_at + LOOK_S:
            self._looked_at = time.monotonic()
            self._room.redis_bytes = await stream.max_bytes(self._parts.redis)
            await self._see_to_deadlines()
        async with self.asking:
            await withdraw_surplus(self._parts, self._run_id)
        self._room.queue_bytes = await stream.unacknowledged_bytes(self._parts.redis, self._run_id)
        if self._room.is_refused:
            await connection.check(self._parts.redis)
            self._room.is_refused = False
            self._parts.progress.say("Redis has room again")
        if self._asks and not self._standing.is_stopping:
            async with self.asking:
                await self._parts.dispatcher.open_groups(self._room.groups(), version=self._standing.version)

    async def _tell_of_failures(self) -> None:
        """Once per group that failed after others: what is the matter, and that less is asked for."""
        brake = self._parts.ledger.brake
        if brake.pause_s and brake.failed_groups != self._failures_told:
            letter = await deadletters.find(self._parts.redis, self._run_id, self._parts.intake.last_failed)
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

    async def _make_do(self, error: Exception) -> None:
        """Redis is full: answers are read on, nothing is asked for, and the next checkpoint makes room."""
        if not self._room.is_refused:
            self._parts.progress.say(
                f"Redis is full ({error}); asking for nothing until a checkpoint makes room"
            )
        self._room.is_refused = True
        await asyncio.sleep(RETRY_S)

    async def _wait_for_redis(self, error: Exception) -> None:
        """Until it answers; then read again whatever was delivered into the broken connection."""
        self._parts.progress.say(f"Redis does not answer ({error}); waiting for it")
        while True:
            await asyncio.sleep(RETRY_S)
            with retry.tolerating_outage():
                await self._parts.intake.recover()
                num_forgotten = await ask_again(self._parts, self._run_id)
                what = (
                    f"; {num_forgotten} requests that it forgot are asked for anew" if num_forgotten else ""
                )
                self._parts.progress.say(f"Redis answers again{what}")
                return

    async def _read_the_rest(self) -> None:
        await self._parts.intake.recover()
        while await self._parts.intake.read(block_ms=1):
            pass
