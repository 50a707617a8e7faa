"""What a store never holds: the known fix, the hidden tests, and whatever may quote them.

People read stores, and train on what is exported from them. So these are taken out before a record is written:

- of the task, everything but what the agent was given: how the verdict is reached, setup and its patch (undoing the patch that
  makes a problem solves it), hidden paths, calibration;
- of the reward, the log of grading and the outcome of each test by name; the counts of passed tests stay. Of `decided_by` what
  follows "but" or a list of files, which may name tests;
- of a failure of grading, the traceback, the log, and what its message says behind the first colon.
"""

from typing import Final

from msgspec.structs import replace

from pipeline.deadletters import AttemptFailure
from pipeline.errors import QUOTES_TESTS, shown_message
from pipeline.judge import Judgement
from pipeline.rollout_store.record import StoredRollout
from pipeline.task import ExitCode, Task
from pipeline.trajectory import Failed, Outcome, Reward, Trajectory

# Stands in a stored task for the verdict, which a Task cannot be without.
NO_VERDICT: Final = ExitCode(eval_script="")


def without_hidden(rollout: StoredRollout) -> StoredRollout:
    """The rollout as a store may hold it."""
    trajectory = rollout.trajectory
    return StoredRollout(
        trajectory=None if trajectory is None else _trajectory(trajectory),
        failures=tuple(_failure(failure) for failure in rollout.failures),
    )


def judgement_without_hidden(judgement: Judgement) -> Judgement:
    """The judgement as a store may hold it."""
    failed = judgement.failed
    if failed is None:
        return judgement
    return replace(judgement, failed=replace(failed, message=shown_message(failed.boundary, failed.message)))


def _trajectory(trajectory: Trajectory) -> Trajectory:
    claim = trajectory.claim
    request = replace(claim.request, task=_task(claim.request.task))
    return replace(
        trajectory,
        claim=replace(claim, request=request),
        outcome=_outcome(trajectory.outcome),
        reward=None if trajectory.reward is None else _reward(trajectory.reward),
    )


def _task(task: Task) -> Task:
    """Built from what is kept, so that a field that a later release adds is not kept by accident."""
    return Task(
        id=task.id,
        repo=task.repo,
        base_commit=task.base_commit,
        image=task.image,
        workdir=task.workdir,
        problem=task.problem,
        verdict=NO_VERDICT,
        resources=task.resources,
    )


def _reward(reward: Reward) -> Reward:
    return Reward(
        value=reward.value,
        resolved=reward.resolved,
        decided_by=reward.decided_by.partition(", but ")[0].partition(" [")[0],
        fail_to_pass=reward.fail_to_pass,
        pass_to_pass=reward.pass_to_pass,
        applied_by=reward.applied_by,
        grade_s=reward.grade_s,
        grade_cpu_s=reward.grade_cpu_s,
        control=reward.control,
        num_controlled=reward.num_controlled,
    )


def _outcome(outcome: Outcome) -> Outcome:
    if isinstance(outcome, Failed):
        return replace(outcome, message=shown_message(outcome.boundary, outcome.message))
    return outcome


def _failure(failure: AttemptFailure) -> AttemptFailure:
    detail = "" if failure.boundary in QUOTES_TESTS else failure.detail
    return replace(failure, message=shown_message(failure.boundary, failure.message), detail=detail)
