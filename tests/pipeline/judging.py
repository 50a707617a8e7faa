"""A second kind of job, as a judge of steps would define it."""

import time

from arq.connections import ArqRedis

from pipeline import queue
from pipeline.kinds import JobKind
from pipeline.request import Budget, Claim, JobRequest, Retries
from pipeline.trajectory import Failed, JobHead, JobResult
from tests.pipeline import samples


class JudgeRequest(JobRequest, frozen=True, kw_only=True):
    """Asks what each step of a trajectory was worth."""

    trajectory_id: str

    @property
    def retries(self) -> Retries:
        return Retries(infrastructure=Budget(tries=2, first_s=0.01))


class Judgement(JobResult[JudgeRequest], frozen=True, kw_only=True):
    values: tuple[float, ...]
    failed: Failed | None = None


class JudgementHead(JobHead, frozen=True, kw_only=True):
    num_steps: int


def judgement_head(judgement: Judgement, body_bytes: int) -> JudgementHead:
    request = judgement.claim.request
    return JudgementHead(
        request_id=request.id,
        run_id=request.run_id,
        outcome=judgement_tag(judgement),
        num_steps=len(judgement.values),
    )


def judgement_tag(judgement: Judgement) -> str:
    return "judged" if judgement.failed is None else f"failed:{judgement.failed.boundary}"


def failed_judgement(claim: Claim[JudgeRequest], failed: Failed, started_at: float) -> Judgement:
    return Judgement(claim=claim, values=(), failed=failed)


JUDGE = JobKind(
    name="judge",
    prefix="swerve.judge",
    request=JudgeRequest,
    result=Judgement,
    head=JudgementHead,
    head_of=judgement_head,
    tag_of=judgement_tag,
    failure_of=lambda judgement: judgement.failed,
    failed_result=failed_judgement,
)


def judge_request(request_id: str = "judge-1") -> JudgeRequest:
    return JudgeRequest(
        id=request_id,
        run_id=samples.RUN,
        purpose="train",
        group_id="g",
        enqueued_at=time.time(),
        trajectory_id="laptop-0001",
    )


async def enqueued(pool: ArqRedis, request_id: str = "judge-1") -> JudgeRequest:
    request = judge_request(request_id)
    await queue.enqueue(pool, request, JUDGE)
    return request
