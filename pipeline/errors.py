"""The errors that can break a rollout, by the boundary that was crossed.

    RolloutError
    ├── SandboxError     the container or its Docker host              (ImageMissing: no other try helps;
    │                                                                   SandboxRuined: what ran in it ended it)
    ├── HarnessError     the agent program                             (HarnessMissing: no other try helps)
    ├── EngineError      sampling                                      (EngineRefused: no other try helps)
    ├── GraderError      the grading container, scripts or parser      (TaskBroken: no other try helps)
    ├── RequestError     the request itself cannot be carried out
    └── LeaseLost        another worker holds the request now; this try publishes nothing

A mistake of the policy is none of these: a command that fails or times out is an observation. A rollout error ends as
`Failed`; the request is tried again within the budget of the failure's class (`class_of`), and a failure is never a
reward of 0. Each adapter turns the exceptions of its library into these, with `from`.
"""

from typing import ClassVar, Literal, get_args

from pipeline.screen import visible_line

Boundary = Literal["sandbox", "engine", "harness", "grader", "request", "worker"]

FailureClass = Literal["policy", "environment", "infrastructure", "grader", "poison"]
FAILURE_CLASSES: tuple[FailureClass, ...] = get_args(FailureClass)


def class_of(boundary: Boundary, *, transient: bool) -> FailureClass:
    """The class of a failure, which says whose fault it is and which budget it counts against. No other function decides this.

    policy           the engine refuses the conversation as the policy has made it
    environment      the task itself: its image, its setup, its hidden tests
    infrastructure   Docker, the engine, the network, a bug in Swerve: another attempt may succeed
    grader           grading broke off: another attempt may give a verdict
    poison           no worker can carry the request out, or every worker that tries dies
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


# Boundaries whose failures may quote the output of hidden tests.
QUOTES_TESTS: frozenset[Boundary] = frozenset({"grader", "worker"})


def shown_message(boundary: Boundary, message: str) -> str:
    """The message of a failure without quotations of hidden tests: where a message may quote them, they come after its first colon."""
    summary, colon, _ = message.partition(":")
    return f"{summary}: (withheld)" if colon and boundary in QUOTES_TESTS else message


class RolloutError(Exception):
    """The rollout cannot continue."""

    boundary: ClassVar[Boundary] = "worker"
    transient: ClassVar[bool] = True
    # Whether it says nothing about other requests, so that it costs a try however many of them fail at the same boundary
    is_own: ClassVar[bool] = False


class SandboxError(RolloutError):
    """The agent's container could not be made, used or read."""

    boundary = "sandbox"


class ImageMissing(SandboxError):
    """The task's image is not on this host and cannot be pulled."""

    transient = False


class SandboxRuined(SandboxError):
    """The sandbox ended because a process in it used up its memory or too much disk space.

    The evidence comes from the Docker host, and the sandbox cannot influence it. If code of the policy has run there, this is the policy's
    mistake, and the reward of its episode or its patch is 0.
    """

    transient = False


class HarnessError(RolloutError):
    """The agent program could not be started, or ended before it asked the policy for anything."""

    boundary = "harness"


class HarnessMissing(HarnessError):
    """The Docker host does not have the agent program that the request names."""

    transient = False


class EngineError(RolloutError):
    """The sampling engine or its router did not answer as promised."""

    boundary = "engine"


class EngineRefused(EngineError):
    """The engine says that the request itself is wrong."""

    transient = False


class GraderError(RolloutError):
    """Grading did not finish: there is no verdict, so there is no reward."""

    boundary = "grader"


class TaskBroken(GraderError):
    """No worker can grade the task: its hidden tests do not apply, or its parser is unknown."""

    transient = False


class RequestError(RolloutError):
    """The request is malformed, or needs something that this fleet does not have."""

    boundary = "request"
    transient = False


class LeaseLost(RolloutError):
    """The request was withdrawn or another worker claimed it; whatever this worker finishes is refused."""


def describe_error(error: Exception) -> str:
    """The error as one line for the user of a command; for an error about a file, `PATH: No such file or directory`."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return visible_line(f"{error.filename}: {error.strerror}")
    return visible_line(str(error))
