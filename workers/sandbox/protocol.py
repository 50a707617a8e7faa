"""The interface of a sandbox for rollouts and graders, whatever its implementation.

Code outside workers/sandbox uses these Protocols as types. docker.py implements them; backend.py chooses the implementation.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pipeline.errors import SandboxError
from pipeline.request import Claim
from pipeline.task import File
from workers.sandbox.git import StartState

Role = Literal["agent", "grade"]
PatchCheck = Literal["", "moved", "unreadable"]
"""The result of `Sandbox.check`; "": nothing is wrong."""

# Factor on the wall limit of a grading, up to which it may continue while its tests get CPU time.
BUSY_FACTOR = 4.0
# If a command waited for a CPU for at least this share of its time, its duration says nothing about it.
STARVED_SHARE = 0.25
OUTPUT_KEEP_BYTES = 256 * 1024  # bytes kept of the head and of the tail of a command's output, by default


class Misconfigured(SandboxError):
    """A setting names something that the machine for sandboxes does not have. The message names the setting and the fix."""


class CannotWrite(SandboxError):
    """Files cannot be written although the sandbox is alive: other files block their paths, or its disk space is used up."""


class CannotServe(SandboxError):
    """Connections to that port cannot be served in the sandbox. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command. `output` is stdout and stderr in the order of arrival, as bytes: a policy may print anything."""

    exit_code: int | None  # None: killed at its deadline
    output: bytes
    dropped_bytes: int  # bytes of a longer output's middle, which was never kept in memory
    wall_s: float
    # The part of `wall_s` in which the machine had no CPU for processes that wanted to run. While a CPU is idle, nothing in the sandbox can
    # make it grow; while none is, code that sleeps can, if it wakes whenever the first process looks.
    starved_s: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True, slots=True)
class LastResult(CommandResult):
    """The result of the script that ended the sandbox."""

    notes: bytes  # what was written to the sandbox's side channel
    cpu_s: float  # CPU time that the sandbox had used by then


def is_starved(result: CommandResult) -> bool:
    """Whether the machine, rather than the command, is at fault for a command that took too long."""
    return result.starved_s >= STARVED_SHARE * result.wall_s


class Sandbox(Protocol):
    """A task's image, set up and running, in which commands run one at a time.

    Every method raises SandboxError if the sandbox is gone. If a process in it is at fault, the context that opened it turns that error
    into SandboxRuined.
    """

    start: StartState  # the repository as the sandbox's user found it
    user: str  # who runs commands of the agent and of the tests: ids of user and group

    @property
    def id(self) -> str:
        """The name by which people find it on its machine."""
        ...

    @property
    def image(self) -> str:
        """Name of the image that it was started from."""
        ...

    @property
    def workdir(self) -> str:
        """The absolute path of the directory in which commands start: the task's workdir, or its image's own WORKDIR."""
        ...

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        keep_bytes: int = OUTPUT_KEEP_BYTES,
        plain: bool = False,
        as_root: bool = False,
    ) -> CommandResult:
        """Run `bash -c command` as the task's user in the workdir, with stdin closed. Keep `keep_bytes` of each end of the output.

        Every process of the sandbox is killed at `timeout_s`, and `exit_code` is None. Background processes of a command keep running.
        Commands of ours are root's: `as_root`, or `plain`. A plain one, of less than 128 KiB, executes nothing from the workdir: it reads
        no environment file and finds no program there.
        """
        ...

    async def finish(self, script: str, *, timeout_s: float, keep_bytes: int) -> LastResult:
        """Run `bash script` as the task's user in the workdir, with stdin closed, and end the sandbox with its status.

        No code in the sandbox can forge that status. When this returns, nothing that the script started is running. Raises
        SandboxError if the sandbox was ended from outside.
        """
        ...

    async def interrupt(self) -> None:
        """Kills every process of the sandbox; a running command ends like a killed one. It may be called while a command runs."""
        ...

    def serve(
        self, port: int, protocol_factory: Callable[[], asyncio.Protocol]
    ) -> AbstractAsyncContextManager[None]:
        """Serve connections of the sandbox's processes to 127.0.0.1:`port`, inside the context, while commands run and between them.

        `protocol_factory` is asyncio's, as for `loop.create_server`; it makes a protocol for each connection. Nothing that a program
        sends, or does not read, delays a command or another connection: each connection has its own flow control, and 64 may be open
        at once. Killing all processes (a command's timeout, `interrupt`, `diff`) resets the connections and not the port; the end of
        the context, and `finish`, close both first. A sandbox serves one port at a time. Raises CannotServe.
        """
        ...

    async def diff(self) -> bytes:
        """The workdir's changes since the start as a git patch, untracked files included. It kills all running processes of the sandbox.

        Empty if the repository was damaged so that git refuses, or made so large or so slow that the patch cannot be kept, or git does not
        end in time.
        """
        ...

    async def check(self, printed: bytes) -> PatchCheck:
        """Whether git can apply `printed`, a patch that an agent printed, to the start. It kills all running processes of the sandbox.

        "moved": it is blank, and HEAD has moved from the start to other files. "unreadable": it is not blank, and git cannot apply it.
        """
        ...

    async def put(self, files: Sequence[File]) -> None:
        """Write `files` as root, and create their directories. Raises CannotWrite."""
        ...

    async def export(self, write: Callable[[bytes], bool]) -> None:
        """All files of the sandbox as a tar archive, without those of volumes: `write` gets piece after piece, in a thread, until it
        returns False.
        """
        ...

    async def cpu_s(self) -> float:
        """The CPU time that the sandbox has used; it may be called while a command runs."""
        ...


class Sandboxes(Protocol):
    """Opens sandboxes."""

    def open(self, claim: Claim, *, role: Role) -> AbstractAsyncContextManager[Sandbox]:
        """A new sandbox of the claim's task, set up; it is always removed on exit. The agent's sandbox does not reveal the answer.

        Raises ImageMissing, SandboxError, TaskBroken.
        """
        ...

    async def check(self) -> None:
        """Raises SandboxError unless sandboxes can be opened, Misconfigured if a setting prevents it."""
        ...

    async def close(self) -> None:
        """Waits for current removals and disconnects. Sandboxes that are still open are not removed."""
        ...
