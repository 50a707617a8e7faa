"""Runs an agent's commands as its file specifies; their outputs become observations, or the submission (submission.py)."""

import shlex
from dataclasses import dataclass
from typing import Protocol, Self

from pipeline.agent.config import OUR_INTERPRETER, AgentConfig
from pipeline.trajectory import Observation
from workers.sandbox.protocol import OUTPUT_KEEP_BYTES, CommandResult, PatchCheck

# Bytes kept of each end of an output in exact mode; upstream keeps all of it.
EXACT_KEEP_BYTES = 16 * 1024 * 1024


class AgentSandbox(Protocol):
    """The part of the task's container that an episode uses. Raises SandboxError."""

    @property
    def workdir(self) -> str:
        """The directory that commands start in: the repository's root."""
        ...

    async def run(self, command: str, *, timeout_s: float, keep_bytes: int) -> CommandResult:
        """Run `bash -c command` in the repository. After `timeout_s` it is killed, which also gives a result. The result has at most
        `keep_bytes` of each end of the output.
        """
        ...

    async def diff(self) -> bytes:
        """All changes against the base commit, new files included, as a git patch."""
        ...

    async def check(self, printed: bytes) -> PatchCheck:
        """Whether git can apply the printed patch to the base commit. It kills all running processes of the sandbox."""
        ...


@dataclass(frozen=True, slots=True)
class CommandRunner:
    """Runs the commands of one agent."""

    sandbox: AgentSandbox
    interpreter: tuple[str, ...]  # argv before the command
    cwd: str  # where commands start; "" is the sandbox's own directory
    keep_bytes: int

    @classmethod
    def of(cls, config: AgentConfig, sandbox: AgentSandbox) -> Self:
        """Makes the runner of an agent. Commands start in the repository, unless an exact agent's file names another directory."""
        cwd = config.cwd if config.exact and config.cwd else ""
        return cls(
            sandbox=sandbox,
            interpreter=config.interpreter,
            cwd="" if cwd == sandbox.workdir else cwd,
            keep_bytes=EXACT_KEEP_BYTES if config.exact else OUTPUT_KEEP_BYTES,
        )

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Run one command in a new process of the interpreter."""
        return await self.sandbox.run(self._line(command), timeout_s=timeout_s, keep_bytes=self.keep_bytes)

    def _line(self, command: str) -> str:
        """Returns the command line for the sandbox's own bash."""
        if self.interpreter == OUR_INTERPRETER and not self.cwd:
            return command
        there = f"cd -- {shlex.quote(self.cwd)} && " if self.cwd else ""
        return f"{there}exec {shlex.join([*self.interpreter, command])}"


class ElidedText(str):
    """A text without its middle. Its length is that of the whole text, so that templates print the right number of omitted characters."""

    dropped_chars: int

    def __new__(cls, kept: str, *, dropped_chars: int) -> Self:
        made = super().__new__(cls, kept)
        made.dropped_chars = dropped_chars
        return made

    def __len__(self) -> int:
        return super().__len__() + self.dropped_chars


def text_of(result: CommandResult, *, exact: bool) -> str:
    """The output as text, invalid UTF-8 replaced. `exact`: every line end becomes "\\n", as in Python's text mode."""
    text = result.output.decode("utf-8", errors="replace")
    if exact:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    # The number of dropped bytes counts as a number of characters.
    return ElidedText(text, dropped_chars=result.dropped_bytes) if result.dropped_bytes else text


def observe(result: CommandResult, *, limit_chars: int, exact: bool = False) -> Observation:
    """The output as text of at most `limit_chars` characters, including the note about the cut."""
    shown, dropped_chars = cut_middle(
        str(text_of(result, exact=exact)), limit_chars=limit_chars, already_dropped=result.dropped_bytes
    )
    return Observation(
        exit_code=result.exit_code, output=shown, dropped_chars=dropped_chars, wall_s=result.wall_s
    )


def cut_middle(text: str, *, limit_chars: int, already_dropped: int = 0) -> tuple[str, int]:
    """`text` within the limit, and the number of missing characters. The beginning and the end stay; a note contains the number.

    `already_dropped` is the number of bytes that the sandbox left out of the middle; they count as characters.
    """
    if len(text) <= limit_chars and not already_dropped:
        return text, 0
    longest_note = _elision(len(text) + already_dropped)
    half = min(max(limit_chars - len(longest_note), 0), len(text)) // 2
    dropped_chars = len(text) - 2 * half + already_dropped
    return text[:half] + _elision(dropped_chars) + text[len(text) - half :], dropped_chars


def _elision(num_chars: int) -> str:
    return f"\n[... {num_chars} characters elided ...]\n"
