"""Plays requests that no queue holds. What fails is tried again within the budgets that the queue would give it."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from pipeline.errors import FailureClass, class_of
from pipeline.frames import EpisodeReport
from pipeline.request import Claim, RolloutRequest
from pipeline.trajectory import Failed, Trajectory, failed_trajectory, failure_of
from workers.rollout import PatchGrader, Policies, run_rollout
from workers.sandbox.protocol import Sandboxes
from workers.status import EpisodeStatus

log = logging.getLogger("swerve.worker")

REPORT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class EpisodePlayer:
    """Plays and grades one request after the other, or several side by side."""

    policies: Policies
    sandboxes: Sandboxes
    grader: PatchGrader
    worker: str
    report: Callable[[EpisodeReport], Awaitable[None]]

    async def play(self, request: RolloutRequest) -> Trajectory:
        """The trajectory of `request`; a failed one once its budget is spent."""
        spent = Counter[FailureClass]()
        while True:
            trajectory = await self._attempt(request, attempt=spent.total() + 1)
            failed = failure_of(trajectory)
            if failed is None:
                return trajectory
            kind = class_of(failed.boundary, transient=failed.transient)
            spent[kind] += 1
            budget = request.retries.of(kind)
            log.warning("%s failed at %s: %s", request.id, failed.boundary, failed.message)
            if spent[kind] >= budget.tries:
                return trajectory
            await asyncio.sleep(budget.wait_s(spent[kind]))

    async def _attempt(self, request: RolloutRequest, *, attempt: int) -> Trajectory:
        started_at = time.time()
        claim = Claim(request=request, attempt=attempt, worker=self.worker, claimed_at=started_at)
        status = EpisodeStatus()
        async with self._reported(request.id, status):
            try:
                return await run_rollout(
                    claim, status, policies=self.policies, sandboxes=self.sandboxes, grader=self.grader
                )
            except Exception as error:
                log.exception("%s attempt %d: a bug of ours", request.id, attempt)
                message = f"{type(error).__name__}: {error}"
                failed = Failed(boundary="worker", message=message, transient=True)
                return failed_trajectory(claim, failed, started_at)

    @contextlib.asynccontextmanager
    async def _reported(self, request_id: str, status: EpisodeStatus) -> AsyncGenerator[None]:
        """Report the episode's status while the block runs, whenever it has changed."""

        async def watch() -> None:
            known = ("", -1)
            while True:
                if (status.phase, status.turn) != known:
                    known = (status.phase, status.turn)
                    await self.report(EpisodeReport(request_id=request_id, phase=known[0], turn=known[1]))
                await asyncio.sleep(REPORT_EVERY_S)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
