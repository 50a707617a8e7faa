"""What a rollout and a grader need of a sandbox, whatever it runs on.

Everything outside workers/sandbox is typed by these Protocols. docker.py implements them; backend.py chooses the implementation.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipeline.errors import SandboxError
from pipeline.request import Claim
from pipeline.task import File

Role = Literal["agent", "grade"]

STARVED_SHARE = 0.25  # of a command's time without a CPU: from there on, its time says nothing about it
OUTPUT_KEEP_BYTES = 256 * 1024  # of each end of a command's output, unless the caller says otherwise


class Misconfigured(SandboxError):
    """A setting names something that the machine for sandboxes does not have. The text names the setting and the fix."""


class CannotWrite(SandboxError):
    """Files cannot be written although the sandbox is alive: something is in their way, or its disk space is used up."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended. `output` is stdout and stderr in the order of arrival, as bytes: a policy may emit anything."""

    exit_code: int | None  # None: killed at its deadline
    output: bytes
    dropped_bytes: int  # of a longer output's middle, which was never kept in memory
    wall_s: float
    # Of `wall_s`: how long the machine had no CPU for processes that wanted to run. Nothing in the sandbox can make it grow.
    starved_s: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True, slots=True)
class LastResult(CommandResult):
    """How the script ended that ended the sandbox."""

    notes: bytes  # what was written to the sandbox's side channel
    cpu_s: float  # CPU time that the sandbox had used by then


def is_starved(result: CommandResult) -> bool:
    """Whether the machine, rather than the command, is to blame for a command that took too long."""
    return result.starved_s >= STARVED_SHARE * result.wall_s


class Sandbox(Protocol):
    """A task's image, set up and running, in which commands run one at a time.

    Every method raises SandboxError if the sandbox is gone. If what ran in it is to blame, the context that opened it turns that
    error into SandboxRuined.
    """

    head: str  # commit that HEAD was at the start; "" outside a repository

    @property
    def id(self) -> str:
        """Name under which people find it on its machine."""
        ...

    @property
    def image(self) -> str:
        """Name of the image that it was started from."""
        ...

    @property
    def workdir(self) -> str:
        """Absolute path of the directory that commands start in: the task's workdir, or its image's own WORKDIR."""
        ...

    async def run(
        self, command: str, *, timeout_s: float, keep_bytes: int = OUTPUT_KEEP_BYTES, plain: bool = False
    ) -> CommandResult:
        """Run `bash -c command` in the workdir, with stdin closed. Keep `keep_bytes` of each end of the output.

        At `timeout_s` every process of the sandbox is killed, and `exit_code` is None. What a command leaves in the background
        goes on running. A `plain` command, of less than 128 KiB, executes nothing that somebody may have put into the workdir: it
        reads no environment file and finds no program there.
        """
        ...

    async def finish(self, script: str, *, timeout_s: float, keep_bytes: int) -> LastResult:
        """Run `bash script` in the workdir, with stdin closed, and end the sandbox with its status.

        No code in the sandbox can forge that status. When this returns, nothing that the script started is running. Raises
        SandboxError if the sandbox was ended from outside.
        """
        ...

    async def diff(self) -> bytes:
        """The workdir's changes since `head` as a git patch, untracked files included. Kills what still runs in the sandbox.

        Empty if the repository was damaged so that git refuses, or made so large or so slow that git does not end in time.
        """
        ...

    async def put(self, files: Sequence[File]) -> None:
        """Write `files` as root, and create their directories. Raises CannotWrite."""
        ...

    async def cpu_s(self) -> float:
        """CPU time that the sandbox has used; may be called while a command runs."""
        ...


class Sandboxes(Protocol):
    """Opens sandboxes."""

    def open(self, claim: Claim, *, role: Role) -> AbstractAsyncContextManager[Sandbox]:
        """A new sandbox of the claim's task, set up; removed on exit, whatever happens. The agent's gives no answer away.

        Raises ImageMissing, SandboxError, TaskBroken.
        """
        ...

    async def check(self) -> None:
        """Raises SandboxError unless sandboxes can be opened, Misconfigured if a setting prevents it."""
        ...

    async def close(self) -> None:
        """Wait for removals under way and disconnect. Sandboxes that are still open are not removed."""
        ...
