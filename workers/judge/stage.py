"""The judge stage: scores the turns of a claim's rollout, and returns the judgement. It does not use queues.

Which turns are scored is decided here, once for all methods: each turn of the rollout gets exactly one entry, by its number, so that a turn
without a command shifts nothing. A judge that fails returns a judgement without scores that contains the reason. Only bugs in our code and
a lost lease raise errors.

Judges get the rollout without its reward, its verdict and the hidden tests. A turn of an agent program is judged in its own
conversation: other conversations and branches are not part of its history, because the policy did not see them there.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from redis.asyncio import Redis

from pipeline import redis_calls, stream
from pipeline.errors import LeaseLost, RequestError, RolloutError
from pipeline.judge import Judge, JudgedStep, Judgement, JudgeMethod, JudgeRequest, Unscored, failed_judgement
from pipeline.message import MalformedMessage
from pipeline.request import Claim, EpisodeStatus
from pipeline.trajectory import FIRST_IN_CONTEXT, Failed, Submitted, Trajectory, Turn, parents_of


@dataclass(frozen=True, slots=True)
class FinishedRollout:
    """The part of a rollout that a judge gets. A judge that knew the outcome would score steps by it."""

    id: str
    issue: str
    turns: tuple[Turn, ...]
    submitted: bool  # whether the last turn submitted

    def conversation(self, turn: int) -> tuple[int, ...]:
        """The numbers of the turns of the turn's conversation: those that it follows, the turn itself, and those after it. If
        several branches follow it, the one with the newest turn counts.
        """
        parents = parents_of(self.turns)
        following, number = {turn}, turn
        for later in range(turn + 1, len(self.turns)):
            if parents[later] in following:
                following.add(later)
                number = later
        path = list[int]()
        while number != FIRST_IN_CONTEXT:
            path.append(number)
            number = parents[number]
        return tuple(reversed(path))

    def instruction(self, first: int) -> str:
        """The instruction of an agent program's conversation that begins with turn `first`; "" if that is the issue."""
        turn = self.turns[first]
        if turn.after is None:
            return ""
        words = "\n\n".join(message.content for message in turn.told if message.role == "user")
        return "" if self.issue.strip() in words else words

    def unscored(self, turn: int, judge: Judge) -> Unscored | None:
        """The reason why the judge is not asked about this turn; None if it is asked. A teacher is asked about every turn, because every
        token that the policy sampled is trained.
        """
        if judge.method == "teacher":
            return None
        if not self.turns[turn].actions:
            return None if judge.score_format_errors else "format_error"
        is_submission = self.submitted and turn == len(self.turns) - 1
        return "submission" if is_submission and not judge.score_submission else None


class RolloutReader(Protocol):
    """Access to finished rollouts."""

    async def read(self, rollout_id: str) -> FinishedRollout:
        """The rollout. Raises RequestError if it is gone or cannot be read."""
        ...


class StoredRollouts:
    """Rollouts whose bodies are in Redis. It waits during outages of Redis; a claim whose lease is lost in the meantime is cancelled."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def read(self, rollout_id: str) -> FinishedRollout:
        """The rollout. Raises RequestError if it is gone or cannot be read."""
        try:
            trajectory = await redis_calls.until_answered(lambda: stream.read_body(self._redis, rollout_id))
        except MalformedMessage as error:
            raise RequestError(f"rollout {rollout_id} cannot be read: {error}") from error
        if trajectory is None:
            raise RequestError(
                f"rollout {rollout_id} is no longer in Redis, so its steps cannot be judged any more"
            )
        return finished_rollout(trajectory)


def finished_rollout(trajectory: Trajectory) -> FinishedRollout:
    """The part of `trajectory` that a judge gets. Raises RequestError for turns that follow none before them."""
    request = trajectory.claim.request
    try:
        parents_of(trajectory.turns)
    except ValueError as error:
        raise RequestError(f"rollout {request.id} cannot be judged: {error}") from error
    # An agent program submits by ending, and its last turn is a step like any other.
    submitted = isinstance(trajectory.outcome, Submitted) and trajectory.program is None
    return FinishedRollout(request.id, request.task.problem, trajectory.turns, submitted)


@dataclass(frozen=True, slots=True)
class Scored:
    """The result of one method: an entry for each turn that it was asked about, with its score or its log-probs, and the judge's name."""

    steps: Sequence[JudgedStep]
    judge: str  # the model and its weights, or the rule


class StepJudge(Protocol):
    """One method of scoring steps."""

    async def score(
        self,
        claim: Claim[JudgeRequest],
        rollout: FinishedRollout,
        turns: Sequence[int],
        status: EpisodeStatus,
    ) -> Scored:
        """Score these turns, of which there is at least one, counting finished ones in `status`. Raises RolloutError: nothing is scored."""
        ...


async def judge_rollout(
    claim: Claim[JudgeRequest],
    status: EpisodeStatus,
    *,
    rollouts: RolloutReader,
    methods: Mapping[JudgeMethod, StepJudge],
) -> Judgement:
    """Judge the claim's rollout by the method that its request names."""
    started_at = time.time()
    status.phase = "judging"
    try:
        rollout = await rollouts.read(claim.request.rollout_id)
        scored = await _score(claim, rollout, status, methods)
    except LeaseLost:
        raise
    except RolloutError as error:
        failed = Failed.of(error)
        return failed_judgement(claim, failed, started_at)
    return Judgement(
        claim=claim,
        steps=tuple(scored.steps),
        judge=scored.judge,
        started_at=started_at,
        finished_at=time.time(),
    )


async def _score(
    claim: Claim[JudgeRequest],
    rollout: FinishedRollout,
    status: EpisodeStatus,
    methods: Mapping[JudgeMethod, StepJudge],
) -> Scored:
    """An entry for every turn of the rollout, in order."""
    judge = claim.request.judge
    steps = {
        turn: JudgedStep(turn=turn, score=None, unscored=reason)
        for turn in range(len(rollout.turns))
        if (reason := rollout.unscored(turn, judge)) is not None
    }
    asked = [turn for turn in range(len(rollout.turns)) if turn not in steps]
    said = judge.name or judge.method
    if asked:
        method = methods.get(judge.method)
        if method is None:
            raise RequestError(f"this judge has no method {judge.method!r}; it has {', '.join(methods)}")
        scored = await method.score(claim, rollout, asked, status)
        assert [step.turn for step in scored.steps] == asked
        steps |= {step.turn: step for step in scored.steps}
        said = scored.judge
    return Scored([steps[turn] for turn in range(len(rollout.turns))], said)
