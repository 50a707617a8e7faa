"""The rollout stage: plays a claimed request, grades the result, and returns both as a trajectory. It does not use Redis or queues.

A failed rollout is a trajectory, too. Only bugs in our code and a lost lease raise errors.

The worker's time in an episode is measured: each moment is charged to one part as it passes.
"""

import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from msgspec.structs import replace

from pipeline.agent.config import load_agent
from pipeline.chat import ChatMessage
from pipeline.errors import LeaseLost, RolloutError, SandboxRuined
from pipeline.part_times import PartTimes
from pipeline.request import Claim, EpisodeStatus
from pipeline.telemetry import span
from pipeline.trajectory import (
    EpisodeSeconds,
    Exhausted,
    Failed,
    Outcome,
    ProgramEnd,
    Reward,
    Submitted,
    Trajectory,
    Turn,
)
from workers.agent.commands import AgentSandbox, Submission
from workers.agent.loop import Policy, Watcher, play
from workers.sandbox.protocol import CommandResult, PatchCheck, Sandbox, Sandboxes

if TYPE_CHECKING:
    from workers.policy.speaker import AnyVoice

EpisodePart = Literal["open", "policy", "command", "program", "close", "grade", "other"]

log = logging.getLogger("swerve.worker")


class EpisodeTimes(PartTimes[EpisodePart]):
    """The clock of one episode. The episode's coroutine names the current part."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(get_args(EpisodePart), "other", clock)

    def seconds(self, turns: Sequence[Turn]) -> EpisodeSeconds:
        """The times since the last call, for an episode with these turns. While the policy was asked, all time except the engines' work on
        the turns counts as waiting, even if no turn resulted. An agent program's time without a pending reply counts as that of its
        commands; simultaneous replies count one after the other.
        """
        spent = self.lap()
        spent["policy"] += (asked_s := min(spent["program"], sum(turn.generate_s for turn in turns)))
        spent["command"] += spent["program"] - asked_s
        generate_s = min(spent["policy"], sum(turn.generate_s - turn.engine_wait_s for turn in turns))
        return EpisodeSeconds(
            open_s=spent["open"],
            engine_wait_s=spent["policy"] - generate_s,
            generate_s=generate_s,
            command_s=spent["command"],
            close_s=spent["close"],
            grade_s=spent["grade"],
            other_s=spent["other"],
        )


@dataclass(frozen=True, slots=True)
class _TimedPolicy:
    """A policy whose time is measured."""

    policy: Policy
    times: EpisodeTimes

    async def begin(self, opening: Sequence[ChatMessage]) -> Turn | None:
        with self.times.spent("policy"):
            return await self.policy.begin(opening)

    async def answer(self, messages: Sequence[ChatMessage], forget_reply: bool = False) -> Turn | None:
        with self.times.spent("policy"):
            return await self.policy.answer(messages, forget_reply=forget_reply)


@dataclass(frozen=True, slots=True)
class _TimedSandbox:
    """A sandbox whose time is measured."""

    sandbox: AgentSandbox
    times: EpisodeTimes

    @property
    def workdir(self) -> str:
        return self.sandbox.workdir

    async def run(self, command: str, *, timeout_s: float, keep_bytes: int) -> CommandResult:
        with self.times.spent("command"):
            return await self.sandbox.run(command, timeout_s=timeout_s, keep_bytes=keep_bytes)

    async def diff(self) -> bytes:
        with self.times.spent("command"):
            return await self.sandbox.diff()

    async def check(self, printed: bytes) -> PatchCheck:
        with self.times.spent("command"):
            return await self.sandbox.check(printed)


class Policies(Protocol):
    """The source of replies for one claim: a conversation for the built-in loop, a voice for an agent program."""

    async def open(self, claim: Claim) -> Policy: ...

    async def voice(self, claim: Claim) -> "AnyVoice": ...


class PatchGrader(Protocol):
    """Grades a patch in a sandbox that the agent never had access to.

    For an infrastructure failure it raises GraderError and never returns a reward.
    """

    async def can_apply(self, claim: Claim, patch: bytes) -> bool: ...

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
    """Play the claim to its end and grade the submitted patch. The agent's sandbox is removed before the grader's opens.

    `watcher` watches the episode while it is played.
    """
    reward: Reward | None = None
    started_at, played = time.time(), _Played()
    try:
        outcome, reward = await _play_and_grade(
            claim, status, played, _Progress(status, watcher), policies, sandboxes, grader
        )
    except LeaseLost:
        raise
    except RolloutError as error:
        outcome = Failed.of(error)
    return Trajectory(
        claim=replace(claim, request=claim.request.without_calibration()),
        turns=tuple(played.turns),
        outcome=outcome,
        reward=reward,
        started_at=started_at,
        finished_at=time.time(),
        seconds=played.times.seconds(played.turns),
        program=played.program,
    )


@dataclass(slots=True)
class _Played:
    """The results of an episode, even if it breaks off."""

    turns: list[Turn] = field(default_factory=list[Turn])
    program: ProgramEnd | None = None  # the end of the agent program, if one played
    times: EpisodeTimes = field(default_factory=EpisodeTimes)


async def _play_and_grade(
    claim: Claim,
    status: EpisodeStatus,
    played: _Played,
    progress: Watcher,
    policies: Policies,
    sandboxes: Sandboxes,
    grader: PatchGrader,
) -> tuple[Outcome, Reward]:
    times = played.times
    named = {"gen_ai.operation.name": "invoke_agent", "gen_ai.conversation.id": claim.request.id}
    with span("agent", named=named):
        with span("open conversation"):
            plays = await _player(claim, policies, played, progress)
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.callback(times.turn_to, "other")
                with times.spent("open"):
                    opening = sandboxes.open(agents_claim(claim), role="agent")
                    sandbox = await stack.enter_async_context(opening)
                stack.callback(times.turn_to, "close")
                outcome = await plays(sandbox)
        except SandboxRuined as ruin:
            if not played.turns:  # the task's own setup ruined it
                raise
            log.info("%s: %s", claim.request.id, ruin)
            outcome = Exhausted(limit="sandbox", patch=b"")
    status.phase = "grading"
    with span("grade"), times.spent("grade"):
        if isinstance(outcome, Submission):
            outcome = await outcome.chosen(claim, grader)
        reward = await grader.grade(claim, outcome.patch)
    return outcome, reward


async def _player(
    claim: Claim, policies: Policies, played: _Played, progress: Watcher
) -> Callable[[Sandbox], Awaitable[Submission | Submitted | Exhausted]]:
    """The function that plays the episode in a sandbox: with the agent program that the request names, or with the built-in loop."""
    request, times = claim.request, played.times
    if request.harness is None:
        policy = await policies.open(claim)
        return lambda sandbox: play(
            request,
            policy=_TimedPolicy(policy, times),
            sandbox=_TimedSandbox(sandbox, times),
            turns=played.turns,
            watcher=progress,
        )
    # The modules that render prompts are loaded only where an agent program plays.
    from workers.foreign.program import Program

    program = Program(request, request.harness, await policies.voice(claim), progress)

    async def played_by_program(sandbox: Sandbox) -> Submitted | Exhausted:
        try:
            with times.spent("program"):
                return await program.play(sandbox)
        finally:
            played.turns, played.program = program.turns, program.end

    return played_by_program


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
        self.status.turns.append(turn)
        if self.watcher is not None:
            self.watcher.acted(turn)


def agents_claim(claim: Claim) -> Claim:
    """The claim without the task's calibration, and with the environment variables of the agent's YAML added to the task's, which
    take precedence. Variables that the YAML forwards are those of this process. An agent program has no YAML.
    """
    request = claim.request.without_calibration()
    if request.harness is not None:
        return replace(claim, request=request)
    config = load_agent(request.agent_config)
    forwarded = {name: os.environ[name] for name in config.forward_env if name in os.environ}
    env = forwarded | dict(config.env) | request.task.env
    return replace(claim, request=replace(request, task=replace(request.task, env=env)))
