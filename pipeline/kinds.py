"""The kinds of jobs that the queue carries, and the prefix of the Redis keys of each.

ROLLOUT plays an episode, JUDGE scores the steps of a finished one. A further stage is a further JobKind and a function from
its claim to its result: its messages derive from `JobRequest`, `JobResult` and `JobHead`, every function of `queue`, `stream`,
`deadletters` and `request_store` takes it as `kind`, and a worker's `Claimer` is of one kind. Kinds have different key
prefixes, so their requests never meet; only arq's own keys are the same for all, which is why request ids are unique
among all kinds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias

from typing_extensions import TypeVar

from pipeline.judge import (
    Judgement,
    JudgementHead,
    JudgeRequest,
    failed_judgement,
    judgement_failure,
    judgement_head,
    judgement_tag,
)
from pipeline.request import Claim, R, RolloutRequest
from pipeline.trajectory import (
    Failed,
    JobHead,
    JobResult,
    Trajectory,
    TrajectoryHead,
    failed_trajectory,
    failure_of,
    head_of,
    tag_of,
)

T = TypeVar("T", bound=JobResult[Any], default=Trajectory)
H = TypeVar("H", bound=JobHead, default=TrajectoryHead)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobKind(Generic[R, T, H]):
    """A stage of work: its name, and the messages that travel to its workers and back."""

    name: str  # the name of arq's function
    prefix: str  # the beginning of its Redis keys, up to the first colon; no other kind has the same
    request: type[R]
    result: type[T]
    head: type[H]
    head_of: Callable[[T, int], H]  # the head of a result whose encoded body has this many bytes
    tag_of: Callable[[T], str]  # how the claim ended, in a word or two for display
    failure_of: Callable[[T], Failed | None]  # the failure; None if the claim ended as it should
    # Makes the result of a claim whose stage returned none; the float is the Unix time at which the claim began.
    failed_result: Callable[[Claim[R], Failed, float], T]


AnyKind: TypeAlias = JobKind[Any, Any, Any]

ROLLOUT = JobKind(
    name="rollout",
    prefix="swerve",
    request=RolloutRequest,
    result=Trajectory,
    head=TrajectoryHead,
    head_of=head_of,
    tag_of=tag_of,
    failure_of=failure_of,
    failed_result=failed_trajectory,
)

JUDGE = JobKind(
    name="judge",
    prefix="swerve.judge",
    request=JudgeRequest,
    result=Judgement,
    head=JudgementHead,
    head_of=judgement_head,
    tag_of=judgement_tag,
    failure_of=judgement_failure,
    failed_result=failed_judgement,
)

KINDS: tuple[AnyKind, ...] = (ROLLOUT, JUDGE)
