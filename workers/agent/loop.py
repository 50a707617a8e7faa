"""The episode: the policy replies, its commands run, and it sees their output, until it submits or reaches a limit.

A turn is in `turns` as soon as it was sampled, so nothing sampled is lost if something breaks later. At a limit the submitted patch is the
repository's diff at that moment. The policy's mistakes are observations; failures of sandbox or engine propagate as rollout errors.

An `exact` agent file gets the behaviour of its version of mini-swe-agent even where ours is better: nothing is submitted at a limit, 2.x
removes a reply with a format error from the context, and only the file's limits apply.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from msgspec.structs import replace

from pipeline.agent.config import AgentConfig, load_agent
from pipeline.chat import ChatMessage
from pipeline.errors import RequestError
from pipeline.request import RolloutRequest
from pipeline.telemetry import span
from pipeline.trajectory import Action, Exhausted, Turn
from workers.agent.commands import (
    AgentSandbox,
    BashCommand,
    CommandRunner,
    FormatError,
    Submission,
    observe,
    read_reply,
    submitted,
    text_of,
)
from workers.sandbox.protocol import CommandResult

MIN_COMMAND_S = 0.1  # time limit of a command that starts at the episode's very end
# Characters of an output that a template without a limit of its own shows in exact mode.
EXACT_OBSERVATION_CHARS = 2_000_000

Limit = Literal["turns", "context", "wall_s", "format_errors"]


class Watcher(Protocol):
    """Watches an episode while it is played."""

    def told(self, messages: Sequence[ChatMessage]) -> None:
        """The policy is about to be shown `messages`."""
        ...

    def replied(self, turn: Turn) -> None:
        """The policy replied; no command of the reply has run."""
        ...

    def acted(self, turn: Turn) -> None:
        """The commands of the reply have run."""
        ...


class Policy(Protocol):
    """One episode's conversation. Its turns have no actions yet. Raises EngineError."""

    async def begin(self, opening: Sequence[ChatMessage]) -> Turn | None:
        """The first reply; None if the context has no room for one."""
        ...

    async def answer(self, messages: Sequence[ChatMessage], forget_reply: bool = False) -> Turn | None:
        """The next reply, after `messages`; None if the context has no room for one.

        `forget_reply`: the last reply is removed from the context before the messages are added.
        """
        ...


async def play(
    request: RolloutRequest,
    *,
    policy: Policy,
    sandbox: AgentSandbox,
    turns: list[Turn],
    watcher: Watcher,
) -> Submission | Exhausted:
    """Play `request` to its end. Appends to `turns`.

    Raises RequestError for an agent config that cannot be used, and the errors of policy and sandbox.
    """
    config = load_agent(request.agent_config)
    runner = CommandRunner.of(config, sandbox)
    await start_up(request, config, runner)
    episode = _Play(request, config, policy, runner, turns, watcher)
    ending = await episode.run()
    if isinstance(ending, Submission):
        return ending
    with span("diff"):
        return Exhausted(limit=ending, patch=b"" if config.exact else await sandbox.diff())


async def start_up(request: RolloutRequest, config: AgentConfig, runner: CommandRunner) -> None:
    """Run the agent file's start-up command. Raises RequestError if it fails."""
    command = config.startup_command(request.task)
    if command is None:
        return
    with span("start-up command"):
        result = await runner.run(command, timeout_s=_command_s(request, config))
    if result.exit_code != 0:
        ended = "took too long" if result.exit_code is None else f"ended with status {result.exit_code}"
        raise RequestError(f"run.env_startup_command {ended}: {text_of(result, exact=False)[-500:]}")


def _command_s(request: RolloutRequest, config: AgentConfig) -> float:
    """The time limit of a command."""
    return min(request.limits.command_s, config.command_s or request.limits.command_s)


@dataclass(slots=True)
class _Play:
    """One episode while it is played."""

    request: RolloutRequest
    config: AgentConfig
    policy: Policy
    runner: CommandRunner
    turns: list[Turn]
    watcher: Watcher
    format_errors: int = 0  # number of consecutive ones
    started_at: float = field(default_factory=time.monotonic)

    async def run(self) -> Submission | Limit:
        messages = self._opening()
        while len(self.turns) < self._max_turns:
            with span("turn", number=len(self.turns) + 1):
                result = await self._turn(messages)
            if not isinstance(result, list):
                return result
            messages = result
        return "turns"

    async def _turn(self, messages: list[ChatMessage]) -> list[ChatMessage] | Submission | Limit:
        """Gets a reply to `messages`, and returns the next messages, or the end of the episode."""
        turn = await self._sample(messages)
        if not isinstance(turn, Turn):
            return turn
        self.turns.append(turn)
        self.watcher.replied(turn)
        result = await self._act(turn)
        self.watcher.acted(self.turns[-1])
        if isinstance(result, list) and 0 < self._max_format_errors <= self.format_errors:
            return "format_errors"
        return result

    def _opening(self) -> list[ChatMessage]:
        system, task = self.config.opening(self._live)
        return [ChatMessage("system", system), ChatMessage("user", task)]

    async def _sample(self, messages: list[ChatMessage]) -> Turn | Literal["context", "wall_s"]:
        left_s = self._left_s
        if left_s <= 0 or 0 < (self.config.wall_s or 0) <= int(self._elapsed_s):
            return "wall_s"
        self.watcher.told(messages)
        deadline = asyncio.timeout(left_s)
        try:
            async with deadline:
                if self.turns:
                    forget = self.format_errors > 0 and self.config.exact and self.config.upstream == "2.4"
                    turn = await self.policy.answer(messages, forget_reply=forget)
                else:
                    turn = await self.policy.begin(messages)
        except TimeoutError:
            if not deadline.expired():
                raise
            return "wall_s"
        return turn or "context"

    async def _act(self, turn: Turn) -> Submission | list[ChatMessage]:
        """Run the turn's commands; returns the next messages to the policy, or the submission."""
        with span("read commands"):
            commands = await read_reply(turn, self.config)
        if isinstance(commands, FormatError):
            self.format_errors += 1
            return self._refusal(turn, commands)
        self.format_errors = 0
        actions = [Action(command=one.text, tool_call_id=one.tool_call_id) for one in commands]
        results: list[CommandResult | None] = []
        for number, command in enumerate(commands):
            self.turns[-1] = replace(turn, actions=tuple(actions))
            result = await self._run(command.text) if number == 0 or self._left_s > 0 else None
            results.append(result)
            if result is None:
                continue
            submission = await submitted(result, self.config, self.runner.sandbox)
            if submission is not None:
                return submission
            seen = observe(
                result,
                limit_chars=self.request.limits.observation_chars,
                exact=self._has_one_line_end(result),
            )
            actions[number] = replace(actions[number], observation=seen)
        self.turns[-1] = replace(turn, actions=tuple(actions))
        return self._told_of(commands, results)

    async def _run(self, command: str) -> CommandResult:
        # A command is killed at the episode's deadline, not cancelled: the sandbox is still needed for the diff.
        limit_s = max(min(self._command_s, self._left_s), MIN_COMMAND_S)
        named = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "bash"}
        with span("command", named=named) as current:
            result = await self.runner.run(command, timeout_s=limit_s)
            if result.exit_code is not None:
                current.set_attribute("process.exit.code", result.exit_code)
            return result

    def _refusal(self, turn: Turn, wrong: FormatError) -> list[ChatMessage]:
        """The messages to the policy about a format error. If the reply stays in the context, each of its calls gets an answer."""
        calls = turn.said.tool_calls
        ours = "length" if turn.stop != "stop" else "tool_calls" if calls else "stop"
        text = self.config.format_error(
            self._live,
            reason=wrong.reason,
            actions=wrong.actions,
            finish_reason=turn.finish_reason or ours,
            has_tool_calls=bool(calls),
        )
        if self.config.exact or not calls:
            return [ChatMessage("user", text)]
        return [ChatMessage("tool", text, tool_call_id=call.id) for call in calls]

    def _told_of(
        self, commands: Sequence[BashCommand], results: Sequence[CommandResult | None]
    ) -> list[ChatMessage]:
        """A message for each command, the last with the reminder of how many turns are left."""
        live = self._live
        texts = [
            self.config.not_executed(live, command=command.text)
            if result is None
            else self.config.observation(
                live, command=command.text, exit_code=result.exit_code, output=self._shown(result)
            )
            for command, result in zip(commands, results, strict=True)
        ]
        last = results[-1]
        if last is None or last.exit_code is not None or self.config.after_timeout is None:
            texts[-1] += self.config.reminder(self._max_turns - len(self.turns))
        role = "user" if self.config.dialect == "text" else "tool"
        return [
            ChatMessage(role, text, tool_call_id=command.tool_call_id)
            for command, text in zip(commands, texts, strict=True)
        ]

    def _shown(self, result: CommandResult) -> str:
        """The output for the observation template. It is complete if the template itself limits it, because after two cuts the number of
        omitted characters would be wrong.
        """
        limit, shows = self.request.limits.observation_chars, self.config.shows_chars
        if self.config.exact:
            limit = EXACT_OBSERVATION_CHARS
        if shows is not None and shows <= limit:
            return text_of(result, exact=self._has_one_line_end(result))
        return observe(result, limit_chars=limit, exact=self._has_one_line_end(result)).output

    def _has_one_line_end(self, result: CommandResult) -> bool:
        """Whether upstream reads the output in text mode, with one kind of line end. 1.x does not do that for the output of a killed
        command.
        """
        return self.config.exact and (result.exit_code is not None or self.config.upstream == "2.4")

    @property
    def _max_turns(self) -> int:
        return min(self.request.limits.turns, self.config.step_limit or self.request.limits.turns)

    @property
    def _max_format_errors(self) -> int:
        """The limit of consecutive format errors; 0: no limit."""
        said = self.config.max_format_errors
        if self.config.exact and said is not None:
            return said
        return min(self.request.limits.format_errors, said or self.request.limits.format_errors)

    @property
    def _command_s(self) -> float:
        return _command_s(self.request, self.config)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def _left_s(self) -> float:
        """The seconds until a running command is killed. Upstream checks the file's limit only between turns."""
        own = None if self.config.exact else self.config.wall_s
        return min(self.request.limits.wall_s, own or self.request.limits.wall_s) - self._elapsed_s

    @property
    def _live(self) -> dict[str, object]:
        """The variables of the templates at this moment, under mini-swe-agent's names."""
        return {
            "task": self.request.task.problem,
            "image": self.request.task.image,
            "cwd": self.runner.sandbox.workdir,
            "timeout": int(self._command_s) if self._command_s % 1 == 0 else self._command_s,
            "step_limit": self._max_turns,
            "n_model_calls": len(self.turns),
            "model_cost": 0.0,
            "elapsed_seconds": int(self._elapsed_s),
        }
