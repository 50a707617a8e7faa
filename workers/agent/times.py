"""Measures how a worker's time in an episode is spent. Each moment is charged to one part as it passes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.chat import ChatMessage
from pipeline.part_times import PartTimes
from pipeline.trajectory import EpisodeSeconds, Turn
from workers.agent.commands import AgentSandbox
from workers.agent.loop import Policy
from workers.sandbox.protocol import CommandResult, PatchCheck

EpisodePart = Literal["open", "policy", "command", "program", "close", "grade", "other"]


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
class TimedPolicy:
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
class TimedSandbox:
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
