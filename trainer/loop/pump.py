"""Trajectories in and requests out, while the learner works: read, close groups in time, withdraw surplus, enqueue groups.

The pump also goes on through outages of Redis. Afterwards it reads again what was delivered into the broken connection, and
enqueues anew what Redis forgot.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from redis.exceptions import OutOfMemoryError, RedisError

from pipeline import retry
from trainer.loop.budget import AdmissionBudget
from trainer.loop.notices import Notices
from trainer.loop.open_requests import OpenRequests
from trainer.loop.recovery import RunRecovery
from trainer.loop.state import RunState
from trainer.rollouts.deadlines import Deadlines
from trainer.rollouts.judging import Judging
from trainer.rollouts.run_streams import RunStreams

log = logging.getLogger("swerve.trainer")

READ_BLOCK_MS = 200
RETRY_S = 1.0
LOOK_S = 1.0  # between two looks at what takes longer the more is open, or hardly ever changes


class Pump:
    """Of one run."""

    def __init__(
        self,
        state: RunState,
        budget: AdmissionBudget,
        *,
        streams: RunStreams,
        deadlines: Deadlines,
        requests: OpenRequests,
        judging: Judging,
        recovery: RunRecovery,
        notices: Notices,
        sweep_every_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._state = state
        self._budget = budget
        self._streams = streams
        self._deadlines = deadlines
        self._requests = requests
        self._judging = judging
        self._recovery = recovery
        self._notices = notices
        self._sweep_every_s = sweep_every_s
        self._say = say
        self._looked_at = float("-inf")
        self._may_enqueue = True

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                await self._turn()
            except OutOfMemoryError as error:
                await self._wait_for_memory(error)
            except RedisError as error:
                if not retry.is_outage(error):
                    raise
                await self._wait_for_redis(error)
            self._state.changed.set()

    async def run_sweeps(self) -> None:
        """For ever, every `sweep_every_s`: an open request must be in the queue, claimed, answered or dead."""
        while True:
            await asyncio.sleep(self._sweep_every_s)
            try:
                await self.sweep()
            except RedisError as error:
                if not retry.is_outage(error):
                    raise
                log.warning("sweep put off: %s", error)

    async def sweep(self) -> None:
        num_requeued = await self._requests.sweep() + await self._judging.requests.sweep()
        if num_requeued:
            self._say(f"enqueued {num_requeued} open requests again that were in no queue")

    async def finish(self) -> None:
        """Enqueue no more for training: withdraw what is not answered, and take in what was answered before that."""
        self._may_enqueue = False
        await retry.until_answered(self._requests.withdraw_training)
        await retry.until_answered(self._judging.requests.withdraw_unneeded)
        await retry.until_answered(self._read_the_rest)

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
        """Redis is full: trajectories are still read, nothing is enqueued, and the next checkpoint makes room."""
        if not self._budget.is_refused:
            self._say(f"Redis is full ({error}); enqueuing nothing until a checkpoint makes room")
        self._budget.is_refused = True
        await asyncio.sleep(RETRY_S)

    async def _wait_for_redis(self, error: Exception) -> None:
        """Until it answers. Then read again what was delivered into the broken connection."""
        self._say(f"Redis does not answer ({error}); waiting for it")
        while True:
            await asyncio.sleep(RETRY_S)
            with retry.tolerating_outage():
                await self._streams.recover()
                num_forgotten = await self._recovery.replace_forgotten()
                what = f"; {num_forgotten} requests that it forgot are enqueued anew" if num_forgotten else ""
                self._say(f"Redis answers again{what}")
                return

    async def _read_the_rest(self) -> None:
        await self._streams.recover()
        while await self._streams.read(block_ms=1):
            pass
