"""What can break a rollout, by the boundary that was crossed.

    RolloutError
    ├── SandboxError     the container or the engine that runs it      (ImageMissing: no other try helps)
    ├── EngineError      sampling                                      (EngineRefused: no other try helps)
    ├── GraderError      the grading container, scripts or parser      (TaskBroken: no other try helps)
    ├── RequestError     the request itself cannot be carried out
    └── LeaseLost        another worker holds the request now; this try publishes nothing

A policy's mistake is none of these: a command that fails or times out is an observation. A rollout error ends
as `Failed`, is tried again as far as the budget of its class goes (`class_of`), and is never scored as zero.
Adapters raise these, with `from`, so that no library's exception passes for another's.
"""

from typing import ClassVar, Literal, get_args

Boundary = Literal["sandbox", "engine", "grader", "request", "worker"]

FailureClass = Literal["policy", "environment", "infrastructure", "grader", "poison"]
FAILURE_CLASSES: tuple[FailureClass, ...] = get_args(FailureClass)


def class_of(boundary: Boundary, *, transient: bool) -> FailureClass:
    """Whose doing a failure is, hence which budget it draws on. The one place that decides.

    policy           what the policy made of its conversation is refused by the engine
    environment      the task itself: its image, its setup, its hidden tests
    infrastructure   Docker, the engine, the network, a bug of ours: another try may well succeed
    grader           grading broke off: another try may give a verdict
    poison           nobody can carry the request out, or whoever tries dies of it
    """
    match boundary:
        case "request":
            return "poison"
        case "engine" if not transient:
            return "policy"
        case "grader" if transient:
            return "grader"
        case _:
            return "infrastructure" if transient else "environment"


class RolloutError(Exception):
    """The rollout cannot go on."""

    boundary: ClassVar[Boundary] = "worker"
    transient: ClassVar[bool] = True


class SandboxError(RolloutError):
    """The agent's container could not be made, used or read."""

    boundary = "sandbox"


class ImageMissing(SandboxError):
    """The task's image is not on this host and cannot be had."""

    transient = False


class EngineError(RolloutError):
    """The sampling engine or its router did not answer as promised."""

    boundary = "engine"


class EngineRefused(EngineError):
    """The engine says that the request itself is wrong."""

    transient = False


class GraderError(RolloutError):
    """Grading did not finish: no verdict, hence no reward."""

    boundary = "grader"


class TaskBroken(GraderError):
    """The task cannot be graded by anybody: its hidden tests do not apply, its parser is unknown."""

    transient = False


class RequestError(RolloutError):
    """The request is malformed or asks for something this fleet does not have."""

    boundary = "request"
    transient = False


class LeaseLost(RolloutError):
    """Another worker has taken the request over; whatever this one finishes is fenced off."""
