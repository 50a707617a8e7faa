"""The shell between queue and stage: claims a request, breathes while the stage runs, and settles what came of it.

It knows nothing of agents; the stage knows nothing of Redis. Every claim ends in exactly one of: published, handed back for
another try, or dead-lettered (and published as failed, so that its group can close). A bug of ours is an ending too, not a crash:
it is recorded with its traceback and tried again within the request's budget.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from arq import Retry
from arq.connections import ArqRedis
from msgspec.structs import replace
from redis.exceptions import RedisError

from pipeline import keys, queue, stream
from pipeline.errors import LeaseLost
from pipeline.message import MalformedMessage
from pipeline.queue import LEASE_S, RENEW_S, Lease
from pipeline.request import Claim
from pipeline.telemetry import current_traceparent, span
from pipeline.trajectory import Failed, Trajectory, outcome_tag

log = logging.getLogger("swerve.worker")

BACKOFF_S = (1.0, 4.0, 15.0)  # before the second, third and any later try


@dataclass(slots=True)
class Progress:
    """Where a running claim is; written by the stage, sent with every breath."""

    phase: str = "opening"
    turn: int = 0


Stage = Callable[[Claim, Progress], Awaitable[Trajectory]]


@dataclass(slots=True)
class Claimer:
    """`answer` is the arq job. `running` maps request ids to their progress, for the worker's status."""

    redis: ArqRedis
    worker: str
    stage: Stage
    running: dict[str, Progress] = field(default_factory=dict[str, Progress])
    finished: int = 0
    failed: int = 0

    async def answer(self, ctx: dict[Any, Any], request_id: str) -> None:
        """Answer one request. Raises arq's Retry to hand it back; anything else would make arq forget the job."""
        try:
            claim = await queue.claim(self.redis, request_id, self.worker)
        except MalformedMessage as error:
            log.error("request %s cannot be read, dead-lettered: %s", request_id, error)
            await queue.bury_unreadable(self.redis, request_id, error)
            return
        match claim:
            case "gone" | "answered":
                return
            case "held":
                raise Retry(defer=LEASE_S)
            case Claim():
                await self._hold(claim)

    async def _hold(self, claim: Claim) -> None:
        """Run the claim under its lease; whichever way this ends, nothing of it goes on afterwards."""
        progress = self.running[claim.request.id] = Progress()
        work = asyncio.create_task(self._work(claim, progress))
        breath = asyncio.create_task(self._breathe(claim, progress))
        try:
            await asyncio.wait({work, breath}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await breath
            await work
        except LeaseLost:
            log.warning("%s attempt %d: overtaken or withdrawn, nothing published", claim.request.id, claim.attempt)
            if await self.redis.exists(keys.request(claim.request.id)):
                raise Retry(defer=LEASE_S) from None
        finally:
            work.cancel()
            breath.cancel()
            await asyncio.gather(work, breath, return_exceptions=True)
            await asyncio.shield(queue.release(self.redis, claim))
            self.running.pop(claim.request.id, None)

    async def _breathe(self, claim: Claim, progress: Progress) -> None:
        """Renew until told to stop. Raises LeaseLost when the lease is another's, or Redis was silent for longer than it lasts."""
        heard_at = time.monotonic()
        while True:
            await asyncio.sleep(RENEW_S)
            lease = Lease(
                worker=self.worker,
                attempt=claim.attempt,
                claimed_at=claim.claimed_at,
                phase=progress.phase,
                turn=progress.turn,
            )
            try:
                if not await queue.renew(self.redis, claim, lease):
                    raise LeaseLost(claim.request.id)
                heard_at = time.monotonic()
            except RedisError as error:
                if time.monotonic() - heard_at > LEASE_S:
                    raise LeaseLost(claim.request.id) from error

    async def _work(self, claim: Claim, progress: Progress) -> None:
        request = claim.request
        with span(
            "rollout",
            traceparent=request.traceparent,
            request=request.id,
            task=request.task.id,
            attempt=claim.attempt,
            worker=self.worker,
        ) as current:
            trajectory, detail = await self._play(claim, progress)
            trajectory = replace(trajectory, traceparent=current_traceparent())
            current.set_attribute("swerve.outcome", outcome_tag(trajectory.outcome))
            if isinstance(trajectory.outcome, Failed):
                await self._fail(claim, trajectory.outcome, detail)
            progress.phase = "publishing"
            verdict = await stream.publish(self.redis, trajectory)
        self.finished += verdict == "published"
        log.info("%s %s attempt %d: %s", request.id, outcome_tag(trajectory.outcome), claim.attempt, verdict)

    async def _play(self, claim: Claim, progress: Progress) -> tuple[Trajectory, str]:
        """The stage, with a bug of ours turned into a failed trajectory and its traceback."""
        started_at = time.time()
        try:
            return await self.stage(claim, progress), ""
        except LeaseLost:
            raise
        except Exception as error:
            log.exception("%s attempt %d: a bug of ours", claim.request.id, claim.attempt)
            failed = Failed(boundary="worker", message=f"{type(error).__name__}: {error}", transient=True)
            trajectory = Trajectory(
                claim=claim, turns=(), outcome=failed, reward=None, started_at=started_at, finished_at=time.time()
            )
            return trajectory, traceback.format_exc()

    async def _fail(self, claim: Claim, failed: Failed, detail: str) -> None:
        """Record the evidence. Raises Retry while another try may help and the budget lasts; otherwise buries the request."""
        self.failed += 1
        num_failures = await queue.record_failure(self.redis, claim, failed, detail=detail)
        log.warning("%s attempt %d failed at %s: %s", claim.request.id, claim.attempt, failed.boundary, failed.message)
        if failed.transient and num_failures < claim.request.limits.attempts:
            raise Retry(defer=BACKOFF_S[min(num_failures, len(BACKOFF_S)) - 1])
        await queue.bury(self.redis, claim)
