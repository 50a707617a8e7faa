"""A request to judge the steps of a finished rollout, and the judgement: the second kind of job (`kinds.py`).

A step is one turn of the rollout: a reply and what its commands did. Its score is in -1..1, or is None where the judge
abstains. None is never a 0: a judge that is slow, broken or undecided says nothing about the step. A teacher is a judge that gives no
scores, but the log-prob of each token that the policy sampled. A judgement belongs to one rollout, by `rollout_id`, and names steps by
their turn, so a turn without a command shifts nothing.
"""

import time
from typing import Annotated, Literal

import msgspec

from pipeline.message import Count, Float32s, Message, Seconds, UnixSeconds
from pipeline.request import Budget, Claim, Endpoint, JobRequest, Purpose, Retries
from pipeline.trajectory import Failed, JobHead, JobResult

Score = Annotated[float, msgspec.Meta(ge=-1, le=1)]

# The method by which steps are scored. votes: a language model writes its verdict, several times. reward_model: a model with one scalar
# output. rule: a rule that needs no model. function: a function that the judge's operator provides. teacher: a language model with the
# policy's vocabulary gives log-probs of the policy's own tokens, and no scores.
JudgeMethod = Literal["votes", "reward_model", "rule", "function", "teacher"]

# Why a step has no score. format_error: the reply held no command; submission: it ended the episode; no_valid_vote: every vote
# abstained or failed; abstained: a rule, function or reward model has nothing to say; too_long: the step alone exceeds the prompt.
# aside: nothing of it is trained, so a teacher is not asked.
Unscored = Literal["format_error", "submission", "no_valid_vote", "abstained", "too_long", "aside"]


class Judge(Message, frozen=True, kw_only=True):
    """Everything that a judge worker needs to know of the judge: workers are interchangeable and need no recipe."""

    method: JudgeMethod
    # Name of the rule or function; otherwise the model's name, for display.
    name: str = ""
    templates: str = ""  # YAML of its prompts (judge_templates.py); "" is the default
    # Content hash under which the judge's own tokenizer is stored. "": none, and a token is counted as 3 characters.
    # A teacher's vocabulary is compared with the policy's.
    tokenizer: str = ""
    num_votes: Annotated[int, msgspec.Meta(ge=1, le=64)] = 3
    temperature: float = 1.0
    max_new_tokens: int = 2048  # the limit of one vote
    prompt_tokens: int = 16384  # the limit of one prompt
    history_steps: Count = 8  # earlier steps that a prompt shows
    # Seed from which, with the rollout, turn and number of the vote, each vote's seed is made
    seed: Count = 0
    vote_s: Seconds = 300.0  # wall time after which one vote, or one answer of a teacher, counts as failed
    score_format_errors: bool = False
    score_submission: bool = False
    endpoint: Endpoint | None = None  # an OpenAI-compatible server; None: the judges' router


class JudgeRequest(JobRequest, frozen=True, kw_only=True):
    """Judge one rollout. Its body is read from Redis, where it stays until the run has settled it."""

    rollout_id: str  # request id of the rollout
    task: str  # id of its task
    judge: Judge
    budgets: Retries = Retries(infrastructure=Budget(tries=5))

    @property
    def task_id(self) -> str:
        return self.task

    @property
    def retries(self) -> Retries:
        return self.budgets


class Vote(Message, frozen=True, kw_only=True):
    """One opinion about one step."""

    seed: Count
    value: Score | None  # None: the vote abstains or failed
    text: str = ""  # what the judge wrote
    error: str = ""  # why the judge wrote no text
    generate_s: Seconds = 0.0


class JudgedStep(Message, frozen=True, kw_only=True):
    """The judge's result for one turn."""

    turn: Count  # its number in the trajectory, from 0
    score: Score | None  # mean of the valid votes; None: the judge abstains, or is a teacher
    unscored: Unscored | None = None  # why it has no score
    votes: tuple[Vote, ...] = ()
    prompt_tokens: Count = 0
    # The teacher's log-prob of each token that the policy sampled in this turn, in nats, at temperature 1; b"" without a teacher.
    logprobs: Float32s = b""

    @property
    def num_logprobs(self) -> int:
        """The number of tokens that a teacher gave log-probs of."""
        return len(self.logprobs) // 4


class Judgement(JobResult[JudgeRequest], frozen=True, kw_only=True):
    """The result of a judge request: one entry per turn of the rollout, in order."""

    steps: tuple[JudgedStep, ...]
    failed: Failed | None = None  # the failure, if any; then no step has a score
    judge: str = ""  # model and weights that answered, or the rule
    started_at: UnixSeconds
    finished_at: UnixSeconds

    @property
    def scores(self) -> dict[int, float]:
        """The scores of the steps that have one, by turn."""
        return {step.turn: step.score for step in self.steps if step.score is not None}

    @property
    def num_logprobs(self) -> int:
        """The number of tokens that a teacher gave log-probs of, in all steps."""
        return sum(step.num_logprobs for step in self.steps)


class JudgementHead(JobHead, frozen=True, kw_only=True):
    """The part of a judgement that lists need. `outcome` is "judged" or "failed:BOUNDARY"."""

    rollout_id: str
    group_id: str
    task_id: str
    num_steps: Count
    num_scored: Count
    num_votes: Count
    num_valid_votes: Count
    # The mean over scored steps as the judge published it, unchecked, because a broken judge may write anything. Scores are checked in the
    # body, so that a head can always be read and its judgement fails, instead of being waited for.
    score_mean: float | None
    body_bytes: Count
    attempt: Count
    worker: str
    enqueued_at: UnixSeconds
    claimed_at: UnixSeconds
    finished_at: UnixSeconds
    traceparent: str = ""
    purpose: Purpose = "train"
    num_logprobs: Count = 0  # tokens that a teacher gave log-probs of


_ID_SUFFIX = ".judge"


def judge_request_id(rollout_id: str) -> str:
    """The id of the one request that judges a rollout, so that enqueuing it again changes nothing."""
    return f"{rollout_id}{_ID_SUFFIX}"


def judged_rollout_id(request_id: str) -> str | None:
    """Inverse of `judge_request_id`; None if it is not the id of a judge request."""
    return request_id.removesuffix(_ID_SUFFIX) if request_id.endswith(_ID_SUFFIX) else None


def judgement_tag(judgement: Judgement) -> str:
    """The outcome in a word or two, for display."""
    return "judged" if judgement.failed is None else f"failed:{judgement.failed.boundary}"


def judgement_head(judgement: Judgement, body_bytes: int) -> JudgementHead:
    """The head that announces `judgement` on the stream."""
    claim, scores = judgement.claim, judgement.scores
    votes = [vote for step in judgement.steps for vote in step.votes]
    return JudgementHead(
        request_id=claim.request.id,
        run_id=claim.request.run_id,
        outcome=judgement_tag(judgement),
        rollout_id=claim.request.rollout_id,
        group_id=claim.request.group_id,
        task_id=claim.request.task,
        num_steps=len(judgement.steps),
        num_scored=len(scores),
        num_votes=len(votes),
        num_valid_votes=sum(vote.value is not None for vote in votes),
        score_mean=sum(scores.values()) / len(scores) if scores else None,
        body_bytes=body_bytes,
        attempt=claim.attempt,
        worker=claim.worker,
        enqueued_at=claim.request.enqueued_at,
        claimed_at=claim.claimed_at,
        finished_at=judgement.finished_at,
        traceparent=judgement.traceparent,
        purpose=claim.request.purpose,
        num_logprobs=judgement.num_logprobs,
    )


def failed_judgement(claim: Claim[JudgeRequest], failed: Failed, started_at: float) -> Judgement:
    """The judgement of a claim that has none of its own."""
    return Judgement(claim=claim, steps=(), failed=failed, started_at=started_at, finished_at=time.time())


def judgement_failure(judgement: Judgement) -> Failed | None:
    """The failure, if the judgement failed."""
    return judgement.failed
