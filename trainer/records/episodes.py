"""Episode rows: of trajectories that arrived, and of requests that were withdrawn before theirs did."""

import time
from dataclasses import dataclass
from typing import Self

from pipeline.request import Purpose, RolloutRequest
from pipeline.trajectory import TrajectoryHead
from trainer.records.journal import EpisodeRow, Fate
from trainer.records.stamps import NO_STAMPS, EpisodeStamps


def episode_row(
    head: TrajectoryHead,
    fate: Fate,
    *,
    cursor: int = -1,
    evaluation: str = "",
    stamps: EpisodeStamps = NO_STAMPS,
) -> EpisodeRow:
    """The row of a trajectory that arrived."""
    return EpisodeRow(
        request_id=head.request_id,
        group_id=head.group_id,
        task_id=head.task_id,
        purpose=head.purpose,
        member=head.member,
        group_size=head.group_size,
        fate=fate,
        cursor=cursor,
        evaluation=evaluation,
        attempt=head.attempt,
        worker=head.worker,
        outcome=head.outcome,
        reward=head.reward,
        num_turns=head.num_turns,
        sampled_tokens=head.sampled_tokens,
        version_at_enqueue=head.version_at_enqueue,
        version_first=head.version_first,
        version_last=head.version_last,
        enqueued_at=head.enqueued_at,
        claimed_at=head.claimed_at,
        finished_at=head.finished_at,
        patch=head.patch,
        control=head.control,
        num_cuts=head.num_cuts,
        repeated_tokens=head.repeated_tokens,
        num_tokens=head.num_tokens,
        stamps=stamps,
        seconds=head.seconds,
    )


@dataclass(frozen=True, slots=True)
class OutstandingRequest:
    """What the trainer keeps of a request until its trajectory arrives: enough for its row, without task and prompts."""

    request_id: str
    group_id: str
    task_id: str
    purpose: Purpose
    member: int
    group_size: int
    cursor: int
    version: int
    enqueued_at: float  # Unix seconds

    @classmethod
    def of(cls, request: RolloutRequest) -> Self:
        return cls(
            request_id=request.id,
            group_id=request.group_id,
            task_id=request.task.id,
            purpose=request.purpose,
            member=request.member,
            group_size=request.group_size,
            cursor=request.cursor if request.purpose == "train" else -1,
            version=request.version_at_enqueue,
            enqueued_at=request.enqueued_at,
        )


def failed_head(run_id: str, request: OutstandingRequest) -> TrajectoryHead:
    """The head that is published for a request that no worker can carry out, because it cannot be read."""
    now = time.time()
    return TrajectoryHead(
        request_id=request.request_id,
        run_id=run_id,
        purpose=request.purpose,
        group_id=request.group_id,
        member=request.member,
        group_size=request.group_size,
        task_id=request.task_id,
        outcome="failed:request",
        reward=None,
        num_turns=0,
        sampled_tokens=0,
        body_bytes=0,
        version_at_enqueue=request.version,
        version_first=None,
        version_last=None,
        attempt=0,
        worker="",
        enqueued_at=request.enqueued_at,
        claimed_at=now,
        finished_at=now,
    )


def withdrawn_row(request: OutstandingRequest, *, evaluation: str = "") -> EpisodeRow:
    """The row of a request that was withdrawn."""
    return EpisodeRow(
        request_id=request.request_id,
        group_id=request.group_id,
        task_id=request.task_id,
        purpose=request.purpose,
        member=request.member,
        group_size=request.group_size,
        fate="withdrawn",
        cursor=request.cursor,
        evaluation=evaluation,
        version_at_enqueue=request.version,
        enqueued_at=request.enqueued_at,
    )
