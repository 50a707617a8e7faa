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
