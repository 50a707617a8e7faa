"""The stage: one claimed request played, graded, and told as a trajectory. Knows nothing of Redis or queues.

A rollout that breaks is a trajectory too; only our own bugs and a lost lease raise.
"""

import time
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from pipeline.agent_config import load_agent
from pipeline.errors import LeaseLost, RolloutError
from pipeline.request import Claim
from pipeline.telemetry import span
from pipeline.trajectory import Failed, Outcome, Reward, Trajectory, Turn
from workers.agent.loop import Policy, play
from workers.claim import Progress

if TYPE_CHECKING:
    from workers.sandbox.docker import DockerSandboxes


class Policies(Protocol):
    """Opens the conversation of one claim."""

    async def open(self, claim: Claim) -> Policy: ...


class Grades(Protocol):
    """Judges a patch in a container that the agent never saw. Raises GraderError, never returns for an infrastructure failure."""

    async def grade(self, claim: Claim, patch: bytes) -> Reward: ...


async def run_rollout(
    claim: Claim, progress: Progress, *, policies: Policies, sandboxes: "DockerSandboxes", grader: Grades
) -> Trajectory:
    """Play the claim to its end and grade what it submitted; the agent's container is gone before the grader's opens."""
    turns: list[Turn] = []
    reward: Reward | None = None
    started_at = time.time()
    try:
        outcome, reward = await _play_and_grade(claim, progress, turns, policies, sandboxes, grader)
    except LeaseLost:
        raise
    except RolloutError as error:
        outcome = Failed(boundary=error.boundary, message=str(error), transient=error.transient)
    return Trajectory(
        claim=claim,
        turns=tuple(turns),
        outcome=outcome,
        reward=reward,
        started_at=started_at,
        finished_at=time.time(),
    )


async def _play_and_grade(
    claim: Claim,
    progress: Progress,
    turns: list[Turn],
    policies: Policies,
    sandboxes: "DockerSandboxes",
    grader: Grades,
) -> tuple[Outcome, Reward]:
    def on_turn(turn: int) -> None:
        progress.phase, progress.turn = "agent", turn

    with span("agent"):
        policy = await policies.open(claim)
        async with sandboxes.open(_with_agent_env(claim), role="agent") as shell:
            outcome = await play(claim.request, policy=policy, shell=shell, turns=turns, on_turn=on_turn)
    progress.phase = "grading"
    with span("grade"):
        reward = await grader.grade(claim, outcome.patch)
    return outcome, reward


def _with_agent_env(claim: Claim) -> Claim:
    """The agent's YAML may set variables (pagers, progress bars); the task's own win."""
    request = claim.request
    env = dict(load_agent(request.agent_config).env) | request.task.env
    return replace(claim, request=replace(request, task=replace(request.task, env=env)))
