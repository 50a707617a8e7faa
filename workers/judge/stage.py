"""The judge stage: scores the turns of a claim's rollout, and returns the judgement. It knows nothing of queues.

Which turns are scored is decided here, once for all methods: each turn of the rollout gets exactly one entry, by its number, so that a turn
without a command shifts nothing. A judge that fails returns a judgement without scores that says why. Only bugs of ours and a lost lease
raise.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import LeaseLost, RequestError, RolloutError
from pipeline.judge import JudgedStep, Judgement, JudgeMethod, JudgeRequest, failed_judgement
from pipeline.request import Claim
from pipeline.trajectory import Failed
from workers.judge.rollouts import FinishedRollout, RolloutReader
from workers.status import EpisodeStatus


@dataclass(frozen=True, slots=True)
class Scored:
    """What one method says: an entry for each turn that it was asked about, and who spoke."""

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
        failed = Failed(boundary=error.boundary, message=str(error), transient=error.transient)
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
