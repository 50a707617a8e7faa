"""The rollout stage: plays a claimed request, grades the result, and returns both as a trajectory. It knows nothing of Redis or queues.

A rollout that fails is a trajectory too. Only bugs of ours and a lost lease raise.
"""

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from pipeline.agent.config import load_agent
from pipeline.chat import ChatMessage
from pipeline.errors import LeaseLost, RolloutError, SandboxRuined
from pipeline.request import Claim
from pipeline.telemetry import span
from pipeline.trajectory import Exhausted, Failed, Outcome, Reward, Trajectory, Turn
from workers.agent.loop import Policy, Watcher, play
from workers.agent.times import EpisodeTimes, TimedPolicy, TimedSandbox
from workers.sandbox.protocol import Sandboxes
from workers.status import EpisodeStatus

log = logging.getLogger("swerve.worker")


class Policies(Protocol):
    """Opens the conversation of one claim."""

    async def open(self, claim: Claim) -> Policy: ...


class PatchGrader(Protocol):
    """PatchGrader a patch in a sandbox that the agent never saw. Raises GraderError for an infrastructure failure, never returns a
    reward.
    """

    async def grade(self, claim: Claim, patch: bytes) -> Reward: ...


async def run_rollout(
    claim: Claim,
    status: EpisodeStatus,
    *,
    policies: Policies,
    sandboxes: Sandboxes,
    grader: PatchGrader,
    watcher: Watcher | None = None,
) -> Trajectory:
    """Play the claim to its end and grade what it submitted. The agent's sandbox is removed before the grader's opens.

    `watcher` is told of the episode as it happens.
    """
    turns: list[Turn] = []
    reward: Reward | None = None
    started_at, times = time.time(), EpisodeTimes()
    try:
        outcome, reward = await _play_and_grade(
            claim, status, turns, _Progress(status, watcher), policies, sandboxes, grader, times
        )
    except LeaseLost:
        raise
    except RolloutError as error:
        outcome = Failed(boundary=error.boundary, message=str(error), transient=error.transient)
    return Trajectory(
        claim=replace(claim, request=claim.request.without_calibration()),
        turns=tuple(turns),
        outcome=outcome,
        reward=reward,
        started_at=started_at,
        finished_at=time.time(),
        seconds=times.seconds(turns),
    )


async def _play_and_grade(
    claim: Claim,
    status: EpisodeStatus,
    turns: list[Turn],
    progress: Watcher,
    policies: Policies,
    sandboxes: Sandboxes,
    grader: PatchGrader,
    times: EpisodeTimes,
) -> tuple[Outcome, Reward]:
    named = {"gen_ai.operation.name": "invoke_agent", "gen_ai.conversation.id": claim.request.id}
    with span("agent", named=named):
        with span("open conversation"):
            policy = await policies.open(claim)
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.callback(times.turn_to, "other")
                with times.spent("open"):
                    opening = sandboxes.open(_agents_claim(claim), role="agent")
                    sandbox = await stack.enter_async_context(opening)
                stack.callback(times.turn_to, "close")
                outcome = await play(
                    claim.request,
                    policy=TimedPolicy(policy, times),
                    sandbox=TimedSandbox(sandbox, times),
                    turns=turns,
                    watcher=progress,
                )
        except SandboxRuined as ruin:
            if not turns:  # the task's own setup did it
                raise
            log.info("%s: %s", claim.request.id, ruin)
            outcome = Exhausted(limit="sandbox", patch=b"")
    status.phase = "grading"
    with span("grade"), times.spent("grade"):
        reward = await grader.grade(claim, outcome.patch)
    return outcome, reward


@dataclass(frozen=True, slots=True)
class _Progress:
    """Counts finished turns in `status`, and passes everything on to `watcher`."""

    status: EpisodeStatus
    watcher: Watcher | None

    def told(self, messages: Sequence[ChatMessage]) -> None:
        if self.watcher is not None:
            self.watcher.told(messages)

    def replied(self, turn: Turn) -> None:
        if self.watcher is not None:
            self.watcher.replied(turn)

    def acted(self, turn: Turn) -> None:
        self.status.phase, self.status.turn = "agent", self.status.turn + 1
        if self.watcher is not None:
            self.watcher.acted(turn)


def _agents_claim(claim: Claim) -> Claim:
    """The claim without the task's calibration, and with the environment variables of the agent's YAML added to the task's, which
    take precedence. Variables that the YAML forwards are those of this process.
    """
    request = claim.request.without_calibration()
    config = load_agent(request.agent_config)
    forwarded = {name: os.environ[name] for name in config.forward_env if name in os.environ}
    env = forwarded | dict(config.env) | request.task.env
    return replace(claim, request=replace(request, task=replace(request.task, env=env)))
