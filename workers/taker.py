"""The arq worker that takes requests that are due. arq runs the jobs; our scripts decide which worker has which.

arq itself reads the head of its queue, which includes jobs that other workers run, with three round trips for each; and it settles a job by
its id, whoever holds it now. So here taking is one script (`queue.take`), an idle worker blocks on a list that is pushed to when there is
work, and a request is settled by its claim, in one fenced script. What remains of arq is the format of the job, its function, and its task.
"""

import asyncio
import contextlib
import logging
import random
from typing import Generic

from arq.worker import Worker, func
from redis.exceptions import RedisError

from pipeline import keys, queue, request_store
from pipeline.kinds import H, T
from pipeline.queue import Unclaimable
from pipeline.request import Claim, R
from workers.claim import Claimer

log = logging.getLogger("swerve.worker")

TAKE_AT_ONCE = 4  # a large worker leaves some of a short queue to the others
# Longest sleep of an idle worker. A request that comes due by itself (after a back-off, or when a dead worker's lease expires)
# wakes nobody.
IDLE_S = 2.0
PAUSE_S = 0.25  # between two checks for a free slot
FOREVER_S = 30 * 24 * 3600  # a job is ended by the request's own limits
NO_LIMIT = 1_000_000  # tries are limited by the request's own budget


class Taker(Worker, Generic[R, T, H]):
    """Fills `slots` with claims of the claimer's kind of job until told to stop."""

    def __init__(self, claimer: Claimer[R, T, H], *, slots: int) -> None:
        super().__init__(
            functions=[func(claimer.answer, name=claimer.kind.name, timeout=FOREVER_S)],
            queue_name=keys.queue(claimer.kind),
            redis_pool=claimer.redis,
            max_jobs=slots,
            job_timeout=FOREVER_S,
            max_tries=NO_LIMIT,
            keep_result=0,
            handle_signals=False,
            job_serializer=request_store.encode_job,
            job_deserializer=request_store.decode_job,
            log_results=False,
        )
        self._claimer = claimer
        self._kind = claimer.kind
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Take no more requests. `async_run` returns; running jobs go on."""
        self._stopping.set()
        self._changed.set()

    async def drain(self, grace_s: float) -> None:
        """Give running episodes `grace_s` to end, then return the others to the queue."""
        if self.tasks:
            log.info("draining %d episodes for up to %.0f s", len(self.tasks), grace_s)
            await asyncio.wait(self.tasks.values(), timeout=grace_s)
        for task in self.job_tasks.values():
            task.cancel()
        for request_id in list(self._claimer.taken):  # taken, but arq has not started its job
            claim = self._claimer.taken.pop(request_id)
            with contextlib.suppress(RedisError, OSError):
                await queue.return_to_queue(self.pool, claim, why="the worker ends", kind=self._kind)
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    async def main(self) -> None:
        while not self._stopping.is_set():
            room = self._claimer.breakers.room(self.max_jobs - len(self.tasks))
            if room <= 0:
                await self._wait_for_room()
            elif not await self._take(room):
                await self._wait_for_work()

    async def _take(self, room: int) -> bool:
        """Take up to `room` requests. False if none was due."""
        try:
            found = await queue.take(self.pool, self._claimer.worker, min(room, TAKE_AT_ONCE), self._kind)
        except (RedisError, OSError) as error:
            self._claimer.breakers["redis"].open(str(error))
            return True
        for one in found:
            match one:
                case Unclaimable():
                    log.error(
                        "request %s is unreadable and was dead-lettered: %s", one.request_id, one.reason
                    )
                case Claim() if one.request.id in self.tasks:
                    await self._return_duplicate(one)
                case Claim():
                    self._start(one)
        return bool(found)

    async def _return_duplicate(self, claim: Claim[R]) -> None:
        """Return a claim whose older attempt still runs here. That lease expired unnoticed, so the attempt ends at its next renewal."""
        log.warning("%s attempt %d: its older attempt still runs here", claim.request.id, claim.attempt)
        with contextlib.suppress(RedisError, OSError):
            await queue.return_to_queue(
                self.pool,
                claim,
                wait_s=queue.LEASE_S,
                why="its older attempt still ran here",
                kind=self._kind,
            )

    def _start(self, claim: Claim[R]) -> None:
        request_id = claim.request.id
        self._claimer.breakers.claimed(request_id)
        self._claimer.taken[request_id] = claim
        task = asyncio.create_task(self._run(claim))
        self.tasks[request_id] = task
        task.add_done_callback(lambda _: self._ended(request_id))

    def _ended(self, request_id: str) -> None:
        self.tasks.pop(request_id, None)
        self._claimer.taken.pop(request_id, None)
        self._claimer.breakers.ended(request_id)
        self._changed.set()

    async def _run(self, claim: Claim[R]) -> None:
        try:
            await self.run_job(claim.request.id, 0)
        except (RedisError, OSError) as error:
            # The job did not begin, so its lease expires and another worker takes it.
            self._claimer.breakers["redis"].open(str(error))

    async def _wait_for_room(self) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_S):
                await self._changed.wait()

    async def _wait_for_work(self) -> None:
        """Return when there may be work, or when told to stop."""
        sleep_s = random.uniform(0.5, 1.0) * IDLE_S
        work = asyncio.create_task(queue.wait_for_work(self.pool, sleep_s, self._kind))
        stop = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        stop.cancel()
        await asyncio.wait({work, stop})
        error = None if work.cancelled() else work.exception()
        if isinstance(error, RedisError | OSError):
            self._claimer.breakers["redis"].open(str(error) or type(error).__name__)
        elif error is not None:
            raise error

    async def finish_job(self, *_: object, **__: object) -> None:
        """Does nothing: the claim has settled the request, and arq would do so without a fence."""

    async def finish_failed_job(self, job_id: str, result_data: bytes | None) -> None:
        """arq could not read the job: write the job again and return the request to the queue, uncounted."""
        claim = self._claimer.taken.pop(job_id, None)
        if claim is not None:
            await queue.rewrite_job(self.pool, claim.request, self._kind)
            await queue.return_to_queue(
                self.pool,
                claim,
                wait_s=1.0,
                why="arq's job was unreadable and was written again",
                kind=self._kind,
            )
