"""Carries out claims: holds the claim, renews its lease while the stage runs, and settles the result.

This module knows nothing about agents, and about a kind of job only its `JobKind`; the stage knows nothing about Redis. Every claim ends
in exactly one way: its result is published, its request returns to the queue, or its request is dead-lettered (and a failed result is
published, so that its group can close). A bug in our code ends a claim too, but not the worker: it is recorded with its traceback and tried
again within the request's budget. Calls to a Redis that is slow, full or away are repeated until Redis says that the claim is another
worker's.

Each claim is traced: the attempt with everything in it, and the wait in the queue before it. The parent of the attempt's span is known only
at its end. An attempt that is published is a sibling of the queue wait, under the request's own span; any other attempt is part of the
queue wait, which lasts until the attempt that is published.
"""

import asyncio
import contextlib
import logging
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias

from arq.connections import ArqRedis
from msgspec.structs import replace
from redis.exceptions import RedisError

from pipeline import deadletters, queue, redis_calls, stream, telemetry, watching
from pipeline.deadletters import AttemptFailure
from pipeline.errors import LeaseLost, class_of
from pipeline.kinds import H, JobKind, T
from pipeline.queue import RENEW_S, Lease
from pipeline.request import Budget, Claim, EpisodeStatus, R
from pipeline.telemetry import current_traceparent, inside, record, span
from pipeline.trajectory import Failed
from workers.breaker import Breakers


@dataclass(slots=True)
class AttemptTrace:
    """The data about an attempt that is recorded at its end."""

    outcome: str = "given up"  # the default means that its lease was lost, or that the worker ended
    is_published: bool = False


@contextlib.contextmanager
def attempt_trace(kind: str, claim: Claim[Any]) -> Generator[AttemptTrace]:
    """Within the block, new spans are children of the attempt's span, which is recorded when the block ends. The span `claim` lasts from
    the claim to this call.
    """
    request = claim.request
    above = request.traceparent or telemetry.rollout(request.id)
    own, waiting = telemetry.attempt(above, kind, claim.attempt), telemetry.queue_wait(above, kind)
    said = AttemptTrace()
    try:
        with inside(own):
            record("claim", claim.claimed_at, time.time())
            yield said
    finally:
        if said.is_published:
            record("queue wait", request.enqueued_at, claim.claimed_at, parent=above, own=waiting)
        record(
            f"{kind} attempt",
            claim.claimed_at,
            time.time(),
            parent=above if said.is_published else waiting,
            own=own,
            error=said.outcome if said.outcome.startswith("failed") else "",
            request=request.id,
            task=request.task_id,
            attempt=claim.attempt,
            worker=claim.worker,
            outcome=said.outcome,
        )


log = logging.getLogger("swerve.worker")

GIVE_UP_S = 600.0  # the longest outage of Redis after which the result of an episode is still useful
PUT_OFF_WAIT_S = 30.0  # wait before a request that cannot be played at present is due again
OUTAGE_WAIT_S = 1.0  # wait before a request that met an outage is due again, on this worker or another
PUBLISHED = ("published", "duplicate")
"""The ends of a claim whose result is on the stream."""
TAIL_LINES = 200  # number of lines at the end of a claim's log that are kept as evidence of a failure

_tail: ContextVar[deque[str] | None] = ContextVar("tail", default=None)


Stage: TypeAlias = Callable[[Claim[R], EpisodeStatus], Awaitable[T]]
Obstacle: TypeAlias = Callable[[Claim[R]], Awaitable[str]]
"""Returns why a claim cannot be run at present although nothing is wrong with it; empty if it can."""


async def no_obstacle(claim: Claim[R]) -> str:
    return ""


class TailHandler(logging.Handler):
    """Keeps the last log lines of each claim."""

    def emit(self, record: logging.LogRecord) -> None:
        lines = _tail.get()
        if lines is not None:
            lines.append(self.format(record))


@dataclass(slots=True)
class Claimer(Generic[R, T, H]):
    """Runs `stage` on claims of one kind of job.

    `answer` is the arq job. `taken` holds claims whose job has not begun. `running` has the status of each episode by request id,
    for the heartbeat.
    """

    kind: JobKind[R, T, H]
    redis: ArqRedis
    worker: str
    stage: Stage[R, T]
    breakers: Breakers
    obstacle: Obstacle[R] = no_obstacle
    taken: dict[str, Claim[R]] = field(default_factory=dict[str, Claim[R]])
    running: dict[str, EpisodeStatus] = field(default_factory=dict[str, EpisodeStatus])
    finished: int = 0
    failed: int = 0

    async def answer(self, ctx: dict[Any, Any], *_: object, **__: object) -> None:
        """Runs the claim whose request id is that of arq's job `ctx`. Nothing else of the job is used."""
        claim = self.taken.pop(ctx["job_id"], None)
        if claim is not None:
            await self._hold(claim)

    async def _hold(self, claim: Claim[R]) -> None:
        """Runs the claim under its lease. However this ends, no work for the claim continues afterwards."""
        status = self.running[claim.request.id] = EpisodeStatus()
        _tail.set(deque(maxlen=TAIL_LINES))
        work = asyncio.create_task(self._work(claim, status), name=f"work on {claim.request.id}")
        renewal = asyncio.create_task(self._renew(claim, status), name=f"lease of {claim.request.id}")
        settled, wait_s = False, queue.LEASE_S
        try:
            await asyncio.wait({work, renewal}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await renewal
            await work
            settled = True
        except asyncio.CancelledError:  # the worker ends; nothing is wrong with the request
            wait_s = 0.0
            raise
        except LeaseLost:
            log.warning("%s attempt %d: lease lost, nothing published", claim.request.id, claim.attempt)
        finally:
            work.cancel()
            renewal.cancel()
            await asyncio.gather(work, renewal, return_exceptions=True)
            if not settled:
                with contextlib.suppress(RedisError, OSError):
                    returning = queue.return_to_queue(
                        self.redis, claim, wait_s=wait_s, why="the worker gave the claim up", kind=self.kind
                    )
                    await asyncio.shield(returning)
            self.running.pop(claim.request.id, None)

    async def _renew(self, claim: Claim[R], status: EpisodeStatus) -> None:
        """Renew the lease until cancelled. Raises LeaseLost when another worker has it, or after GIVE_UP_S without an answer from Redis."""
        answered_at = time.monotonic()
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                if not await queue.renew(self.redis, claim, _lease(claim, status), self.kind):
                    raise LeaseLost(claim.request.id)
                answered_at = time.monotonic()
                await self._show(claim, status)
            except RedisError as error:
                if not redis_calls.is_outage(error):
                    raise
                if time.monotonic() - answered_at > GIVE_UP_S:
                    raise LeaseLost(claim.request.id) from error

    async def _show(self, claim: Claim[R], status: EpisodeStatus) -> None:
        """Shows the turns to whoever watches the episode. A failure costs the claim nothing."""
        with contextlib.suppress(RedisError, OSError):
            if status.turns and await watching.is_watched(self.redis, claim.request.id):
                await watching.show(self.redis, claim.request.id, claim.attempt, status.turns)

    async def _work(self, claim: Claim[R], status: EpisodeStatus) -> None:
        with attempt_trace(self.kind.name, claim) as attempt:
            attempt.outcome, ending = await self._run_and_settle(claim, status)
            attempt.is_published = ending in PUBLISHED
        log.info("%s %s attempt %d: %s", claim.request.id, attempt.outcome, claim.attempt, ending)

    async def _run_and_settle(self, claim: Claim[R], status: EpisodeStatus) -> tuple[str, str]:
        """Returns two phrases for the log: the outcome of the stage and that of the request. A bug in our code is a failed result."""
        started_at = time.time()
        try:
            if why := await self.obstacle(claim):
                return "put off", await self._put_off(claim, why)
            result = replace(await self._run(claim, status), traceparent=current_traceparent())
            status.phase = "publishing"
            failed, detail = self.kind.failure_of(result), ""
            if failed is None:
                self.breakers.succeeded(claim.request.id)
                with span("push"):
                    ending = await redis_calls.until_answered(
                        lambda: stream.publish(self.redis, result, kind=self.kind)
                    )
                self.finished += ending in PUBLISHED
                return self.kind.tag_of(result), ending
        except LeaseLost:
            raise
        except Exception as error:
            log.exception("%s attempt %d: a bug in Swerve", claim.request.id, claim.attempt)
            failed = Failed(boundary="worker", message=f"{type(error).__name__}: {error}", transient=True)
            result, detail = self.kind.failed_result(claim, failed, started_at), traceback.format_exc()
        return self.kind.tag_of(result), await self._fail(result, failed, detail)

    async def _put_off(self, claim: Claim[R], why: str) -> str:
        """Returns the request to the queue without counting a failure."""
        wait_s = redis_calls.jittered(PUT_OFF_WAIT_S)
        await redis_calls.until_answered(
            lambda: queue.return_to_queue(self.redis, claim, wait_s=wait_s, why=why, kind=self.kind)
        )
        return f"returned to the queue, {why}"

    async def _run(self, claim: Claim[R], status: EpisodeStatus) -> T:
        """Run the stage, unless the request is known to kill workers that do."""
        if claim.num_unended < claim.request.retries.unended_claims:
            return await self.stage(claim, status)
        message = f"{claim.num_unended} workers died while running it, so no other tries"
        failed = Failed(boundary="request", message=message, transient=False)
        return self.kind.failed_result(claim, failed, time.time())

    async def _fail(self, result: T, failed: Failed, detail: str) -> str:
        """Returns the request to the queue if it has tries left, otherwise dead-letters it. Returns a phrase that says which."""
        claim: Claim[R] = result.claim
        failure_class = class_of(failed.boundary, transient=failed.transient)
        self.failed += 1
        log.warning(
            "%s attempt %d failed at %s: %s", claim.request.id, claim.attempt, failed.boundary, failed.message
        )
        is_shared = not failed.is_own and (failed.boundary != "engine" or claim.request.blames_engine)
        if (
            failed.transient
            and is_shared
            and await self.breakers.blamed(failed.boundary, claim.request.id, failed.message)
        ):
            why = f"not counted, {self.breakers.paused or self.breakers.set_aside}"[:300]
            await redis_calls.until_answered(
                lambda: queue.return_to_queue(
                    self.redis, claim, wait_s=redis_calls.jittered(OUTAGE_WAIT_S), why=why, kind=self.kind
                )
            )
            return why
        earlier = await redis_calls.until_answered(
            lambda: deadletters.failures(self.redis, claim.request.id, self.kind)
        )
        mine = deadletters.attempt_failure(claim, failed, detail=_evidence(detail))
        budget, spent = claim.request.retries.of(failure_class), _num_of(mine, earlier) + 1
        if spent < budget.tries:
            wait_s = _backoff_s(budget, spent)
            await redis_calls.until_answered(
                lambda: queue.return_to_queue(self.redis, claim, wait_s=wait_s, failure=mine, kind=self.kind)
            )
            tries = f"{failure_class} failure {spent} of {budget.tries}"
            return f"returned to the queue, {tries}, next try in {wait_s:.1f} s"
        with span("push"):
            return await redis_calls.until_answered(
                lambda: deadletters.dead_letter(self.redis, result, [*earlier, mine], self.kind)
            )


def _lease(claim: Claim[R], status: EpisodeStatus) -> Lease:
    request = claim.request
    return Lease(
        worker=claim.worker,
        attempt=claim.attempt,
        claimed_at=claim.claimed_at,
        phase=status.phase,
        turn=status.turn,
        task_id=request.task_id,
        purpose=request.purpose,
        group_id=request.group_id,
        max_turns=request.max_turns,
    )


def _num_of(mine: AttemptFailure, earlier: tuple[AttemptFailure, ...]) -> int:
    """The number of earlier failures of the same class."""
    return sum(failure.kind == mine.kind for failure in earlier)


def _evidence(detail: str) -> str:
    """The end of the claim's log, tracebacks included; without a log, `detail`."""
    return "\n".join(_tail.get() or ()) or detail


def _backoff_s(budget: Budget, num_failures: int) -> float:
    return min(redis_calls.jittered(budget.wait_s(num_failures)), budget.longest_s)
