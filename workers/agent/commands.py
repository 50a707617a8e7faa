"""Runs an agent's commands in its sandbox: by the interpreter and in the directory that its file names."""

import shlex
from dataclasses import dataclass
from typing import Protocol, Self

from pipeline.agent.config import OUR_INTERPRETER, AgentConfig
from workers.sandbox.protocol import OUTPUT_KEEP_BYTES, CommandResult

# Of each end of an output in exact mode: upstream keeps all of it.
EXACT_KEEP_BYTES = 16 * 1024 * 1024


class AgentSandbox(Protocol):
    """What an episode needs of the task's container. Raises SandboxError."""

    @property
    def workdir(self) -> str:
        """The directory that commands start in: the repository's root."""
        ...

    async def run(self, command: str, *, timeout_s: float, keep_bytes: int) -> CommandResult:
        """Run `bash -c command` in the repository. After `timeout_s` it is killed, which is a result too. Keep `keep_bytes` of each
        end of the output.
        """
        ...

    async def diff(self) -> bytes:
        """All changes against the base commit, new files included, as a git patch."""
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
        """Only an exact agent leaves the repository's directory for the one that its file names."""
        cwd = config.cwd if config.exact and config.cwd else ""
        return cls(
            sandbox=sandbox,
            interpreter=config.interpreter,
            cwd="" if cwd == sandbox.workdir else cwd,
            keep_bytes=EXACT_KEEP_BYTES if config.exact else OUTPUT_KEEP_BYTES,
        )

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Run one command; a new process of the interpreter for each."""
        return await self.sandbox.run(self._line(command), timeout_s=timeout_s, keep_bytes=self.keep_bytes)

    def _line(self, command: str) -> str:
        """What the sandbox's own bash is given."""
        if self.interpreter == OUR_INTERPRETER and not self.cwd:
            return command
        there = f"cd -- {shlex.quote(self.cwd)} && " if self.cwd else ""
        return f"{there}exec {shlex.join([*self.interpreter, command])}"
