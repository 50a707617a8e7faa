"""The episode: the policy replies, its command runs, and it is shown the output, until it submits or reaches a limit.

A turn is in `turns` as soon as it was sampled, so nothing sampled is lost if something breaks later. At a limit the
submitted patch is the repository's diff at that moment. The policy's mistakes are observations; failures of sandbox or
engine pass through as rollout errors.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from msgspec.structs import replace

from pipeline.agent.config import AgentConfig, load_agent
from pipeline.chat import ChatMessage
from pipeline.request import RolloutRequest
from pipeline.trajectory import Action, Exhausted, Submitted, Turn
from workers.agent.observation import observe, submission
from workers.agent.reply import FormatError, parse_reply
from workers.sandbox.protocol import CommandResult

MIN_COMMAND_S = 0.1  # time limit of a command that starts at the episode's very end

Limit = Literal["turns", "context", "wall_s", "format_errors"]


class AgentSandbox(Protocol):
    """What an episode needs of the task's container. Raises SandboxError."""

    @property
    def workdir(self) -> str:
        """The directory that commands start in: the repository's root."""
        ...

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Run `command` in a new shell in the repository. After `timeout_s` it is killed, which is a result too."""
        ...

    async def diff(self) -> bytes:
        """All changes against the base commit, new files included, as a git patch."""
        ...


class Watcher(Protocol):
    """Is told of an episode as it happens."""

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
    """One episode's conversation. Its turns lack actions. Raises EngineError."""

    async def begin(self, opening: Sequence[ChatMessage]) -> Turn | None:
        """The first reply. None: the context has no room for one."""
        ...

    async def answer(self, messages: Sequence[ChatMessage], forget_reply: bool = False) -> Turn | None:
        """The next reply, after `messages`. None: the context has no room for one.

        `forget_reply`: the last reply is taken out of the context before the messages are put into it.
        """
        ...


async def play(
    request: RolloutRequest,
    *,
    policy: Policy,
    sandbox: AgentSandbox,
    turns: list[Turn],
    watcher: Watcher,
) -> Submitted | Exhausted:
    """Play `request` to its end. Appends to `turns`.

    Raises RequestError for an agent config that cannot be used, and what policy and sandbox raise.
    """
    episode = _Play(request, load_agent(request.agent_config), policy, sandbox, turns, watcher)
    ending = await episode.run()
    if isinstance(ending, Submitted):
        return ending
    return Exhausted(limit=ending, patch=await sandbox.diff())


@dataclass(slots=True)
class _Play:
    """One episode under way."""

    request: RolloutRequest
    config: AgentConfig
    policy: Policy
    sandbox: AgentSandbox
    turns: list[Turn]
    watcher: Watcher
    format_errors: int = 0  # consecutive
    started_at: float = field(default_factory=time.monotonic)

    async def run(self) -> Submitted | Limit:
        message = ""
        while len(self.turns) < self._max_turns:
            turn = await self._sample(message)
            if not isinstance(turn, Turn):
                return turn
            self.turns.append(turn)
            self.watcher.replied(turn)
            result = await self._act(turn)
            self.watcher.acted(self.turns[-1])
            if isinstance(result, Submitted):
                return result
            if self.format_errors >= self.request.limits.format_errors:
                return "format_errors"
            message = result
        return "turns"

    async def _sample(self, message: str) -> Turn | Literal["context", "wall_s"]:
        left_s = self._left_s
        if left_s <= 0:
            return "wall_s"
        deadline = asyncio.timeout(left_s)
        try:
            async with deadline:
                if self.turns:
                    messages = [ChatMessage("user", message)]
                    self.watcher.told(messages)
                    turn = await self.policy.answer(messages)
                else:
                    system, task = self.config.opening(self._live)
                    messages = [ChatMessage("system", system), ChatMessage("user", task)]
                    self.watcher.told(messages)
                    turn = await self.policy.begin(messages)
        except TimeoutError:
            if not deadline.expired():
                raise
            return "wall_s"
        return turn or "context"

    async def _act(self, turn: Turn) -> Submitted | str:
        """Run the turn's command; returns the next message to the policy, or the submission."""
        reply = await parse_reply(turn.text, self.config.action)
        if isinstance(reply, FormatError):
            self.format_errors += 1
            finish_reason = "stop" if turn.stop == "stop" else "length"
            return self.config.format_error(
                self._live, reason=reply.reason, actions=reply.actions, finish_reason=finish_reason
            )
        self.format_errors = 0
        self.turns[-1] = replace(turn, actions=(Action(command=reply.text),))
        # At the episode's deadline a command is killed, not cancelled: the sandbox is still needed for the diff.
        timeout_s = max(min(self._command_s, self._left_s), MIN_COMMAND_S)
        result = await self.sandbox.run(reply.text, timeout_s=timeout_s)
        patch = submission(result)
        if patch is not None:
            # The middle of a patch that is too long for the sandbox to keep is missing: take it from the repository.
            return Submitted(patch=await self.sandbox.diff() if result.dropped_bytes else patch)
        seen = observe(result, limit_chars=self.request.limits.observation_chars)
        self.turns[-1] = replace(turn, actions=(Action(command=reply.text, observation=seen),))
        output = seen.output if self._is_ours_to_cut else result.output.decode("utf-8", errors="replace")
        return self.config.observation(
            self._live, command=reply.text, exit_code=result.exit_code, output=output
        )

    @property
    def _is_ours_to_cut(self) -> bool:
        """False for a template that keeps to the request's limit by itself: cutting twice would misstate what is missing."""
        shows = self.config.shows_chars
        return shows is None or shows > self.request.limits.observation_chars

    @property
    def _max_turns(self) -> int:
        return min(self.request.limits.turns, self.config.step_limit or self.request.limits.turns)

    @property
    def _command_s(self) -> float:
        return min(self.request.limits.command_s, self.config.command_s or self.request.limits.command_s)

    @property
    def _left_s(self) -> float:
        return self.started_at + self.request.limits.wall_s - time.monotonic()

    @property
    def _live(self) -> dict[str, object]:
        """The variables of the templates at this moment, under mini-swe-agent's names."""
        return {
            "task": self.request.task.problem,
            "cwd": self.sandbox.workdir,
            "timeout": int(self._command_s) if self._command_s % 1 == 0 else self._command_s,
            "step_limit": self._max_turns,
            "n_model_calls": len(self.turns),
            "model_cost": 0.0,
            "elapsed_seconds": time.monotonic() - self.started_at,
            "image": self.request.task.image,
        }
