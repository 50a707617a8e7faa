"""Judge requests and judgements to test with."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from arq.connections import ArqRedis

from pipeline import deadletters, queue, stream
from pipeline.judge import Judge, JudgedStep, Judgement, JudgeRequest, Vote, failed_judgement
from pipeline.kinds import JUDGE
from pipeline.message import pack_float32s
from pipeline.request import Budget, Claim, Retries
from pipeline.trajectory import Failed, Turn
from tests.pipeline import samples


def judge_request(request_id: str = "judge-1", **fields: Any) -> JudgeRequest:
    given: dict[str, Any] = {
        "id": request_id,
        "run_id": samples.RUN,
        "purpose": "train",
        "group_id": "g",
        "enqueued_at": time.time(),
        "rollout_id": "laptop-0001",
        "task": "task-1",
        "judge": Judge(method="rule", name="commands"),
        "budgets": Retries(infrastructure=Budget(tries=2, first_s=0.01)),
    }
    return JudgeRequest(**(given | fields))


def judgement(claim: Claim[JudgeRequest], *scores: float | None) -> Judgement:
    steps = tuple(
        JudgedStep(turn=turn, score=score, unscored="abstained" if score is None else None)
        for turn, score in enumerate(scores)
    )
    return Judgement(claim=claim, steps=steps, started_at=claim.claimed_at, finished_at=time.time())


def voted(claim: Claim[JudgeRequest], *steps: tuple[float | None, ...] | None) -> Judgement:
    """A judgement whose steps have these votes; None: a step without a command, on which nobody voted."""
    return Judgement(
        claim=claim,
        steps=tuple(_step(turn, votes) for turn, votes in enumerate(steps)),
        judge="judge-8b at v1",
        started_at=claim.claimed_at,
        finished_at=time.time(),
    )


def _step(turn: int, values: tuple[float | None, ...] | None) -> JudgedStep:
    if values is None:
        return JudgedStep(turn=turn, score=None, unscored="format_error")
    valid = [value for value in values if value is not None]
    votes = tuple(
        Vote(seed=seed, value=value, text="It hangs." if value is None else f"\\boxed{{{value:+g}}}")
        for seed, value in enumerate(values)
    )
    score = sum(valid) / len(valid) if valid else None
    return JudgedStep(turn=turn, score=score, unscored=None if valid else "no_valid_vote", votes=votes)


async def dead_lettered(pool: ArqRedis, request_id: str = "judge-1", worker: str = "host/1") -> str:
    claim = await taken(pool, request_id, worker)
    failed = Failed(boundary="engine", message="no reply", transient=True)
    evidence = [deadletters.attempt_failure(claim, failed, detail="Traceback: judge")]
    await deadletters.dead_letter(pool, failed_judgement(claim, failed, time.time()), evidence, JUDGE)
    return request_id


async def judge_all(pool: ArqRedis, *scores: float | None, limit: int | None = None) -> list[str]:
    """Judge what is queued until nothing is, or `limit` are done, each with these scores. Returns the ids of the rollouts."""
    judged: list[str] = []
    while limit is None or len(judged) < limit:
        claims = await queue.take(pool, "judge", 1, JUDGE)
        if not claims:
            break
        (claim,) = claims
        assert isinstance(claim, Claim)
        await stream.publish(pool, judgement(claim, *scores), kind=JUDGE)
        judged.append(claim.request.rollout_id)
    return judged


def taught(claim: Claim[JudgeRequest], turns: Sequence[Turn], logprob: float = -1.0) -> Judgement:
    """A teacher's judgement that gives every token of these turns the same log-prob."""
    steps = tuple(
        JudgedStep(turn=number, score=None, logprobs=pack_float32s([logprob] * (len(turn.sampled) // 4)))
        for number, turn in enumerate(turns)
    )
    return Judgement(
        claim=claim, steps=steps, judge="big@7", started_at=claim.claimed_at, finished_at=time.time()
    )


async def teach_all(
    pool: ArqRedis,
    change: Callable[[Judgement], Judgement] = lambda made: made,
    *,
    logprob: float = -1.0,
    limit: int | None = None,
) -> list[str]:
    """Judge what is queued as a teacher would, until nothing is or `limit` are done. Returns the ids of the rollouts."""
    done: list[str] = []
    while limit is None or len(done) < limit:
        claims = await queue.take(pool, "judge", 1, JUDGE)
        if not claims:
            break
        (claim,) = claims
        assert isinstance(claim, Claim)
        trajectory = await stream.read_body(pool, claim.request.rollout_id)
        assert trajectory is not None
        await stream.publish(pool, change(taught(claim, trajectory.turns, logprob)), kind=JUDGE)
        done.append(claim.request.rollout_id)
    return done


async def fail_all(pool: ArqRedis) -> None:
    """Every judge request that is queued is dead-lettered."""
    for claim in await queue.take(pool, "judge", 1000, JUDGE):
        assert isinstance(claim, Claim)
        failed = Failed(boundary="request", message="no such rule", transient=False)
        result = failed_judgement(claim, failed, claim.claimed_at)
        evidence = [deadletters.attempt_failure(claim, failed)]
        await deadletters.dead_letter(pool, result, evidence, JUDGE)


async def enqueued(pool: ArqRedis, request_id: str = "judge-1", **fields: Any) -> JudgeRequest:
    request = judge_request(request_id, **fields)
    await queue.enqueue(pool, request, JUDGE)
    return request


async def taken(
    pool: ArqRedis, request_id: str = "judge-1", worker: str = "host/1", **fields: Any
) -> Claim[JudgeRequest]:
    """A claim on a new judge request."""
    request = await enqueued(pool, request_id, **fields)
    claim = await queue.claim(pool, request.id, worker, JUDGE)
    assert isinstance(claim, Claim)
    return claim
