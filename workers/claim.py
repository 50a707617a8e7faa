"""The shell between queue and stage: holds a claim, breathes while the stage runs, and settles what came of it.

It knows nothing of agents; the stage knows nothing of Redis. Every claim ends in exactly one of: published, handed back for
another try, or dead-lettered (and published as failed, so that its group can close). A bug of ours is an ending too, not a crash:
it is recorded with its traceback and tried again within the request's budget. A Redis that is slow, full or away is asked again
until it says that the claim is another's.
"""

import asyncio
import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from arq.connections import ArqRedis
from msgspec.structs import replace
from redis.exceptions import RedisError

from pipeline import deadletters, queue, retry, stream
from pipeline.deadletters import AttemptFailure
from pipeline.errors import LeaseLost, class_of
from pipeline.queue import RENEW_S, Lease
from pipeline.request import Budget, Claim
from pipeline.telemetry import current_traceparent, span
from pipeline.trajectory import Failed, Trajectory, outcome_tag
from workers.breaker import Breakers
from workers.status import EpisodeStatus

log = logging.getLogger("swerve.worker")

SILENCE_S = 600.0  # a Redis away for longer than this: nobody will want to know how the episode ended
OUTAGE_WAIT_S = 1.0  # before a request that met an outage is due again, here or where there is none
TAIL_LINES = 200  # of a claim's log, kept as evidence should it fail

_tail: ContextVar[deque[str] | None] = ContextVar("tail", default=None)


Stage = Callable[[Claim, EpisodeStatus], Awaitable[Trajectory]]


class TailHandler(logging.Handler):
    """Keeps what is logged while a claim is worked on, with the claim."""

    def emit(self, record: logging.LogRecord) -> None:
        lines = _tail.get()
        if lines is not None:
            lines.append(self.format(record))


@dataclass(slots=True)
class Claimer:
    """`answer` is the arq job. `taken` holds claims whose job has not begun; `running` maps request ids to their
    status, for the worker's status.
    """

    redis: ArqRedis
    worker: str
    stage: Stage
    breakers: Breakers
    taken: dict[str, Claim] = field(default_factory=dict[str, Claim])
    running: dict[str, EpisodeStatus] = field(default_factory=dict[str, EpisodeStatus])
    finished: int = 0
    failed: int = 0

    async def answer(self, ctx: dict[Any, Any], *_: object, **__: object) -> None:
        """Answer the request of arq's job `ctx`, whose claim is at hand. Whatever the job says besides is not believed."""
        claim = self.taken.pop(ctx["job_id"], None)
        if claim is not None:
            await self._hold(claim)

    async def _hold(self, claim: Claim) -> None:
        """Run the claim under its lease; whichever way this ends, nothing of it goes on afterwards."""
        status = self.running[claim.request.id] = EpisodeStatus()
        _tail.set(deque(maxlen=TAIL_LINES))
        work = asyncio.create_task(self._work(claim, status))
        breath = asyncio.create_task(self._breathe(claim, status))
        settled, rest_s = False, queue.LEASE_S
        try:
            await asyncio.wait({work, breath}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await breath
            await work
            settled = True
        except asyncio.CancelledError:  # the worker ends: nothing is wrong with the request
            rest_s = 0.0
            raise
        except LeaseLost:
            log.warning(
                "%s attempt %d: overtaken or withdrawn, nothing published", claim.request.id, claim.attempt
            )
        finally:
            work.cancel()
            breath.cancel()
            await asyncio.gather(work, breath, return_exceptions=True)
            if not settled:
                with contextlib.suppress(RedisError, OSError):
                    giving = queue.return_to_queue(self.redis, claim, wait_s=rest_s, why="the worker let go")
                    await asyncio.shield(giving)
            self.running.pop(claim.request.id, None)

    async def _breathe(self, claim: Claim, status: EpisodeStatus) -> None:
        """Renew until told to stop. Raises LeaseLost when the lease is another's, or Redis was silent for SILENCE_S."""
        heard_at = time.monotonic()
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                if not await queue.renew(self.redis, claim, _lease(claim, status)):
                    raise LeaseLost(claim.request.id)
                heard_at = time.monotonic()
            except RedisError as error:
                if not retry.is_outage(error):
                    raise
                if time.monotonic() - heard_at > SILENCE_S:
                    raise LeaseLost(claim.request.id) from error

    async def _work(self, claim: Claim, status: EpisodeStatus) -> None:
        request = claim.request
        with span(
            "rollout",
            traceparent=request.traceparent,
            request=request.id,
            task=request.task.id,
            attempt=claim.attempt,
            worker=self.worker,
        ) as current:
            trajectory, ending = await self._play_and_settle(claim, status)
            current.set_attribute("swerve.outcome", outcome_tag(trajectory.outcome))
        log.info("%s %s attempt %d: %s", request.id, outcome_tag(trajectory.outcome), claim.attempt, ending)

    async def _play_and_settle(self, claim: Claim, status: EpisodeStatus) -> tuple[Trajectory, str]:
        """What came of the claim, and what became of the request. A bug of ours is a failed trajectory too."""
        started_at = time.time()
        try:
            trajectory = replace(await self._play(claim, status), traceparent=current_traceparent())
            status.phase = "publishing"
            if not isinstance(trajectory.outcome, Failed):
                self.breakers.succeeded(claim.request.id)
                ending = await retry.until_answered(lambda: stream.publish(self.redis, trajectory))
                self.finished += ending in ("published", "duplicate")
                return trajectory, ending
            failed, detail = trajectory.outcome, ""
        except LeaseLost:
            raise
        except Exception as error:
            log.exception("%s attempt %d: a bug of ours", claim.request.id, claim.attempt)
            failed = Failed(boundary="worker", message=f"{type(error).__name__}: {error}", transient=True)
            trajectory, detail = _broken(claim, failed, started_at), traceback.format_exc()
        return trajectory, await self._fail(trajectory, failed, detail)

    async def _play(self, claim: Claim, status: EpisodeStatus) -> Trajectory:
        """The stage, unless the request is known to kill those who play it."""
        if claim.num_unended < claim.request.limits.retries.unended_claims:
            return await self.stage(claim, status)
        message = f"{claim.num_unended} workers fell silent over it; it is not tried on another"
        return _broken(claim, Failed(boundary="request", message=message, transient=False), time.time())

    async def _fail(self, trajectory: Trajectory, failed: Failed, detail: str) -> str:
        """Hand the request back if another try is due, else bury it; returns what became of it."""
        claim, kind = trajectory.claim, class_of(failed.boundary, transient=failed.transient)
        self.failed += 1
        log.warning(
            "%s attempt %d failed at %s: %s", claim.request.id, claim.attempt, failed.boundary, failed.message
        )
        if failed.transient and await self.breakers.blamed(failed.boundary, claim.request.id, failed.message):
            why = f"not counted, {self.breakers.paused or self.breakers.set_aside}"[:300]
            await retry.until_answered(
                lambda: queue.return_to_queue(
                    self.redis, claim, wait_s=retry.jittered(OUTAGE_WAIT_S), why=why
                )
            )
            return why
        earlier = await retry.until_answered(lambda: deadletters.failures(self.redis, claim.request.id))
        mine = deadletters.attempt_failure(claim, failed, detail=_evidence(detail))
        budget, spent = claim.request.limits.retries.of(kind), _num_of(mine, earlier) + 1
        if spent < budget.tries:
            wait_s = _backoff_s(budget, spent)
            await retry.until_answered(
                lambda: queue.return_to_queue(self.redis, claim, wait_s=wait_s, failure=mine)
            )
            return f"handed back, {kind} failure {spent} of {budget.tries}, next try in {wait_s:.1f} s"
        return await retry.until_answered(
            lambda: deadletters.dead_letter(self.redis, trajectory, [*earlier, mine])
        )


def _lease(claim: Claim, status: EpisodeStatus) -> Lease:
    request = claim.request
    return Lease(
        worker=claim.worker,
        attempt=claim.attempt,
        claimed_at=claim.claimed_at,
        phase=status.phase,
        turn=status.turn,
        task_id=request.task.id,
        purpose=request.purpose,
        group_id=request.group_id,
        max_turns=request.limits.turns,
    )


def _broken(claim: Claim, failed: Failed, started_at: float) -> Trajectory:
    return Trajectory(
        claim=claim, turns=(), outcome=failed, reward=None, started_at=started_at, finished_at=time.time()
    )


def _num_of(mine: AttemptFailure, earlier: tuple[AttemptFailure, ...]) -> int:
    """Failures of the same class."""
    return sum(failure.kind == mine.kind for failure in earlier)


def _evidence(detail: str) -> str:
    """What the claim's log says last, tracebacks included; without a log, `detail`."""
    return "\n".join(_tail.get() or ()) or detail


def _backoff_s(budget: Budget, num_failures: int) -> float:
    return min(retry.jittered(budget.wait_s(num_failures)), budget.longest_s)
