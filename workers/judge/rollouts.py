"""The rollout that is judged, as judges see it: without its reward, its verdict and whatever the hidden tests are."""

from dataclasses import dataclass
from typing import Protocol

from redis.asyncio import Redis

from pipeline import retry, stream
from pipeline.errors import RequestError
from pipeline.judge import Judge, Unscored
from pipeline.message import MalformedMessage
from pipeline.trajectory import Submitted, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """What a judge may know. A judge that knew the outcome would score steps by it."""

    id: str
    issue: str
    turns: tuple[Turn, ...]
    submitted: bool  # with the last turn

    def unscored(self, turn: int, judge: Judge) -> Unscored | None:
        """Why the judge is not asked about this turn; None if it is."""
        if not self.turns[turn].actions:
            return None if judge.score_format_errors else "format_error"
        is_submission = self.submitted and turn == len(self.turns) - 1
        return "submission" if is_submission and not judge.score_submission else None


class RolloutReader(Protocol):
    """Where finished rollouts are."""

    async def read(self, rollout_id: str) -> FinishedRollout:
        """Raises RequestError if it is gone or cannot be read."""
        ...


class StoredRollouts:
    """Those whose bodies are in Redis. Waits through outages of Redis; a claim whose lease is lost meanwhile is cancelled."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def read(self, rollout_id: str) -> FinishedRollout:
        """Raises RequestError if it is gone or cannot be read."""
        try:
            trajectory = await retry.until_answered(lambda: stream.read_body(self._redis, rollout_id))
        except MalformedMessage as error:
            raise RequestError(f"rollout {rollout_id} cannot be read: {error}") from error
        if trajectory is None:
            raise RequestError(
                f"rollout {rollout_id} is no longer in Redis, so its steps cannot be judged any more"
            )
        return finished_rollout(trajectory)


def finished_rollout(trajectory: Trajectory) -> FinishedRollout:
    """What of `trajectory` a judge may know."""
    request = trajectory.claim.request
    submitted = isinstance(trajectory.outcome, Submitted)
    return FinishedRollout(request.id, request.task.problem, trajectory.turns, submitted)
