"""What tests of an episode are built from: a claim with limits as given, replies, a shell on this machine."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pipeline import artefacts
from pipeline.chat import ChatMessage
from pipeline.request import Claim, Limits, RolloutRequest, Sampling
from pipeline.task import ExitCode, Task
from pipeline.trajectory import Exhausted, Turn
from workers.agent.commands import AgentSandbox, Submission
from workers.agent.loop import play
from workers.policy.replies import Replay, given_replies
from workers.sandbox.first_process import Capped
from workers.sandbox.protocol import OUTPUT_KEEP_BYTES, CommandResult, PatchCheck

AGENT = """
agent:
  system_template: You fix code.
  instance_template: "Fix this: {{task}}"
  action_observation_template: |-
    <returncode>{{output.returncode}}</returncode>
    <output>
    {{output.output}}</output>
  format_error_template: "REFUSED: {{error}}"
  timeout_template: "STOPPED after {{timeout}} s: {{action.action}} {{output}}"
"""
HANGING_S = Limits().command_s
"""What a command of a test may take at most, whatever limit the episode has: none takes a second on an idle machine. Not longer than the
limit that an episode has by default, or a command that hangs would only reach that.
"""

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git add -A && git diff --cached"


def claim(
    *,
    agent: str = AGENT,
    tokenizer: str = "",
    image: str = "none",
    sampling: dict[str, Any] | None = None,
    **limits: Any,
) -> Claim:
    """A claim of a request whose limits and sampling are the defaults with these changes."""
    task = Task(
        id="test:1",
        repo="acme/calc",
        base_commit="",
        image=image,
        workdir="/workspace",
        problem="add() subtracts {{really}}",
        verdict=ExitCode(eval_script="true"),
    )
    request = RolloutRequest(
        id="run-1.0.0",
        run_id="run-1",
        purpose="train",
        task=task,
        group_id="run-1.0",
        member=0,
        group_size=1,
        version_at_enqueue=0,
        sampling=Sampling(**(sampling or {})),
        limits=replace(Limits(), **limits),
        agent_config=agent,
        tokenizer=tokenizer,
        enqueued_at=0.0,
    )
    return Claim(request=request, attempt=1, worker="test/1", claimed_at=0.0)


def opening(system: str, task: str) -> list[ChatMessage]:
    return [ChatMessage("system", system), ChatMessage("user", task)]


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage("user", text)]


def bash(command: str) -> str:
    """A reply that asks for `command`."""
    return f"THOUGHT: let us see.\n\n```bash\n{command}\n```"


def own_environment() -> dict[str, str]:
    """What commands of an episode see of this machine: its programs, and no home. A login shell would read the profile of whoever runs
    the tests, which may do anything, such as waiting for a lock.
    """
    return {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LANG": "C.UTF-8"}


@dataclass(slots=True)
class LocalShell:
    """A shell in a git repository on this machine, with the promises of a sandbox. A command that hangs fails the test."""

    repository: Path
    shell: str = "bash"
    env: dict[str, str] = field(default_factory=dict[str, str])
    lines: list[str] = field(default_factory=list[str])  # that it was given

    @property
    def workdir(self) -> str:
        return str(self.repository)

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int = OUTPUT_KEEP_BYTES
    ) -> CommandResult:
        self.lines.append(command)
        started_at = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            self.shell,
            "-c",
            command,
            cwd=self.repository,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=own_environment() | self.env,
        )
        reading = asyncio.create_task(process.communicate())
        done, _ = await asyncio.wait({reading}, timeout=min(timeout_s, HANGING_S))
        if not done:
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = await reading
        assert done or timeout_s < HANGING_S, f"hung for {HANGING_S:.0f} s: {command}"
        kept = Capped(keep_bytes)
        kept.write(output)
        exit_code = process.returncode if done else None
        return CommandResult(exit_code, *kept.kept(), time.monotonic() - started_at)

    async def diff(self) -> bytes:
        return (await self.run("git add -A && git diff --cached HEAD", timeout_s=240)).output

    async def check(self, printed: bytes) -> PatchCheck:
        return ""


@dataclass(slots=True)
class Recorder:
    """A policy that notes what it is sent with each query."""

    replay: Replay
    messages: list[ChatMessage] = field(default_factory=list[ChatMessage])
    sent: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])

    async def begin(self, opening: Sequence[ChatMessage]) -> Turn:
        self._note(opening)
        return self._heard(await self.replay.begin(opening))

    async def answer(self, messages: Sequence[ChatMessage], forget_reply: bool = False) -> Turn:
        if forget_reply:
            self.messages.pop()
        self._note(messages)
        return self._heard(await self.replay.answer(messages, forget_reply))

    def _note(self, messages: Sequence[ChatMessage]) -> None:
        self.messages += messages
        self.sent.append([artefacts.chat_message(message) for message in self.messages])

    def _heard(self, turn: Turn) -> Turn:
        self.messages.append(turn.said)
        return turn


class Silent:
    """A watcher that does nothing."""

    def told(self, messages: Sequence[ChatMessage]) -> None: ...
    def replied(self, turn: Turn) -> None: ...
    def acted(self, turn: Turn) -> None: ...


@dataclass(slots=True)
class Played:
    """An episode of given replies."""

    outcome: Submission | Exhausted
    turns: list[Turn]
    sent: list[list[dict[str, Any]]]  # messages of each query

    @property
    def told(self) -> list[list[str]]:
        """What each query adds to the one before, without the policy's own words."""
        return [[message.content for message in turn.told] for turn in self.turns]


async def played(shell: AgentSandbox, agent: str, *replies: Any, **limits: Any) -> Played:
    """Play `replies`, texts or messages, with `agent`."""
    recorder = Recorder(Replay(given_replies(json.dumps(replies).encode(), where="replies")))
    turns: list[Turn] = []
    outcome = await play(
        claim(agent=agent, **limits).request, policy=recorder, sandbox=shell, turns=turns, watcher=Silent()
    )
    return Played(outcome, turns, recorder.sent)
