"""What a command in a container came to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`output` is stdout and stderr as they came, as bytes: a policy may emit anything. `exit_code` None:
    killed at its deadline.
    """

    exit_code: int | None
    output: bytes
    dropped_bytes: int  # of a longer output's middle, never kept in memory
    wall_s: float


@dataclass(frozen=True, slots=True)
class LastResult(CommandResult):
    """Of the script that a container ended with."""

    notes: bytes  # what was written to the container's side channel
    cpu_s: float  # that the container had used by then
