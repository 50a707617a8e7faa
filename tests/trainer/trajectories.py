"""Makers of heads, members and trajectories for the trainer's tests."""

from collections.abc import Mapping

import numpy as np

from benchmarks.scripted_fleet import task, with_digests
from pipeline.errors import Boundary
from pipeline.journal.rows import JudgedTurn
from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import Claim, Limits, RolloutRequest, Sampling
from pipeline.trajectory import Reward, Submitted, Trajectory, TrajectoryHead, Turn, VersionSpan, reply_digest
from trainer.batching.batch import Sample, SampledReply
from trainer.rollouts.groups import Lag, Member, MemberJudgement, group_id_of

DIGEST = reply_digest(pack_int32s([5]), pack_int32s([6, 7]), pack_float32s([-1.0, -2.0]))
"""Of the reply that `sample` holds."""


def behind(newest: int) -> Lag:
    """Lags of a run that never crashed, in which steps and versions are one."""
    return lambda version: newest - version


def head(
    cursor: int,
    number: int,
    *,
    group_size: int = 4,
    reward: float | None = 1.0,
    version: int = 0,
    boundary: Boundary = "sandbox",
    patch: str = "",
    **counts: int,
) -> TrajectoryHead:
    return TrajectoryHead(
        request_id=f"r{cursor}.{number}",
        run_id="run",
        purpose="train",
        group_id=group_id_of(cursor),
        member=number,
        group_size=group_size,
        task_id=f"t{cursor}",
        outcome="submitted" if reward is not None else f"failed:{boundary}",
        reward=reward,
        num_turns=1,
        sampled_tokens=2,
        body_bytes=100,
        version_at_enqueue=version,
        version_first=version,
        version_last=version,
        attempt=1,
        worker="w",
        enqueued_at=1.0,
        claimed_at=2.0,
        finished_at=3.0,
        patch=patch,
        **counts,
    )


def member(
    cursor: int,
    number: int,
    *,
    group_size: int = 4,
    reward: float | None = 1.0,
    version: int = 0,
    fault: str = "",
) -> Member:
    """Two sampled tokens after one that was fed."""
    made = head(cursor, number, group_size=group_size, reward=reward, version=version)
    samples = () if fault or reward is None else (sample(made, version),)
    return Member(head=made, samples=samples, entries=[f"{cursor}-{number}"], fault=fault)


def sample(of: TrajectoryHead, version: int = 0) -> Sample:
    return Sample(
        request_id=of.request_id,
        group_id=of.group_id,
        branch=0,
        tokens_T=np.array([5, 6, 7], np.int32),
        trained_T=np.array([False, True, True]),
        behaviour_logprobs_T=np.array([0.0, -1.0, -2.0], np.float32),
        advantages_T=np.zeros(3, np.float32),
        versions_T=np.array([-1, version, version], np.int32),
        replies=(SampledReply(0, 1, 3, DIGEST),),
    )


def joined(scores: Mapping[int, float | None]) -> MemberJudgement:
    """A judgement that came in time, with these scores by turn."""
    return MemberJudgement("joined", tuple(JudgedTurn(turn, score) for turn, score in scores.items()))


def turn(fed: list[int], sampled: list[int], *, kept: int, logprob: float = -0.5, version: int = 3) -> Turn:
    return Turn(
        kept_tokens=kept,
        fed=pack_int32s(fed),
        sampled=pack_int32s(sampled),
        logprobs=pack_float32s([logprob] * len(sampled)),
        versions=(VersionSpan(version=version, start=0, end=len(sampled)),) if sampled else (),
        stop="stop",
        text="",
    )


def trajectory(*turns: Turn) -> Trajectory:
    """With the digests that its turns have unless somebody changes them."""
    request = RolloutRequest(
        id="r",
        run_id="run",
        purpose="train",
        task=task("t"),
        group_id=group_id_of(0),
        member=0,
        group_size=2,
        version_at_enqueue=3,
        sampling=Sampling(),
        limits=Limits(),
        agent_config="",
        tokenizer="",
        enqueued_at=1.0,
    )
    return Trajectory(
        claim=Claim(request=request, attempt=1, worker="w", claimed_at=2.0),
        turns=with_digests(turns),
        outcome=Submitted(patch=b""),
        reward=Reward(value=1.0, resolved=True, decided_by="test"),
        started_at=2.0,
        finished_at=3.0,
    )
