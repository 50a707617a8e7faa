"""A request for one rollout, and a worker's claim on it.

`JobRequest` is what the queue reads of a request of any kind; `RolloutRequest` is the request of a rollout (`kinds.py`).
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, Self

import msgspec
from msgspec.structs import replace
from typing_extensions import TypeVar

from pipeline.errors import FailureClass
from pipeline.harness import Harness
from pipeline.message import (
    Amount,
    Count,
    Message,
    PositiveCount,
    PositiveSeconds,
    Seconds,
    Share,
    UnixSeconds,
)
from pipeline.task import Task

Purpose = Literal["train", "eval"]


class Sampling(Message, frozen=True, kw_only=True):
    """The parameters with which tokens are sampled from the policy.

    Training needs the default top_p and top_k, because log-probs are those of the full distribution.
    """

    temperature: Amount = 1.0  # temperature of sampling; 0 is greedy
    # Probability that the likeliest tokens make up together, among which one is sampled; 1 takes all tokens.
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    # Number of the likeliest tokens among which one is sampled; all by default.
    top_k: PositiveCount | None = None
    max_new_tokens: PositiveCount = 4096  # largest number of tokens that one turn may sample


class Budget(Message, frozen=True, kw_only=True):
    """The number of failures of one class that a request may have, and the wait after each."""

    tries: PositiveCount  # number of failures of the class after which the request is dead-lettered
    first_s: Seconds = 1.0  # wait after the first failure of the class; it doubles with each further one
    longest_s: Seconds = 60.0  # longest wait after a failure of the class

    def wait_s(self, num_failures: int) -> float:
        """The wait after `num_failures` of the class, before jitter."""
        return min(self.first_s * 2.0 ** min(num_failures - 1, 60), self.longest_s)


class Retries(Message, frozen=True, kw_only=True):
    """The budget of each class of failures. See `errors.class_of`."""

    policy: Budget = Budget(tries=1)
    environment: Budget = Budget(tries=1)  # Two or more tries make sense where hosts hold different images.
    infrastructure: Budget = Budget(tries=5)
    grader: Budget = Budget(tries=3, first_s=2.0)
    poison: Budget = Budget(tries=1)
    # Number of claims whose lease expired, because the worker died, after which the request counts as poison.
    unended_claims: PositiveCount = 8

    def of(self, kind: FailureClass) -> Budget:
        found: Budget = getattr(self, kind)
        return found


class JobRequest(Message, frozen=True, kw_only=True):
    """The fields that the queue reads of a request, whatever its kind.

    `id` is also the arq job id, so it is unique among requests of all kinds.
    """

    id: str
    run_id: str
    purpose: Purpose
    group_id: str
    enqueued_at: UnixSeconds
    # When its group was first enqueued, which decides its position in the queue. 0 means enqueued_at.
    group_asked_at: UnixSeconds = 0.0
    traceparent: str = ""  # W3C trace context of the enqueue span

    @property
    def task_id(self) -> str:
        """The id of its task, for display; empty if it has no task."""
        return ""

    @property
    def image(self) -> str:
        """The image that workers pull ahead for it; empty if it needs none."""
        return ""

    @property
    def max_turns(self) -> int:
        """Its limit of turns, for display; 0 if its stage has no turns."""
        return 0

    @property
    def retries(self) -> Retries:
        return Retries()

    @property
    def blames_engine(self) -> bool:
        """Whether a failure at the boundary "engine" is evidence about the engines that its worker uses for other requests as well."""
        return True


class Limits(Message, frozen=True, kw_only=True):
    """Where an episode ends. Deadlines start at the claim, never in the queue.

    An absent limit is None, never 0.
    """

    turns: PositiveCount = 50  # largest number of replies of the policy
    # Largest length of what the policy sees at one time: prompt, replies and observations.
    context_tokens: PositiveCount = 32768
    wall_s: PositiveSeconds = 1800.0  # wall time after which the agent loop ends
    command_s: PositiveSeconds = 180.0  # wall time after which one command is ended
    grade_cpu_s: PositiveSeconds = 1800.0  # CPU time after which a test run counts as unresolved
    # Wall time after which a test run that has CPU time left is ended, unless it still gets some; it ends after four times that in any
    # case. The rollout counts as unresolved if the machine had CPU time to give, and otherwise as an infrastructure failure.
    grade_wall_s: PositiveSeconds = 7200.0
    # Length to which a command's output is cut in its middle, so that its beginning and its end stay.
    observation_chars: PositiveCount = 10_000
    # Number of consecutive replies in a wrong format, such as a text without exactly one command, after which the episode ends. Agent
    # programs have no such limit.
    format_errors: PositiveCount = 3
    retries: Retries = Retries()


class Context(Message, frozen=True, kw_only=True):
    """What happens when the next reply may not fit into `Limits.context_tokens`.

    "stop": the episode ends. "head_tail": turns are taken out of the middle; the first and the newest stay.
    """

    policy: Literal["stop", "head_tail"] = "stop"
    # Share of the kept turns' room that goes to the first turns of the episode; the newest get the rest.
    head_share: Share = 0.3
    # Share of the room that a cut leaves in use, so that not every turn is a cut.
    refill_to: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.7
    # Place of the note about omitted turns: "append" puts it at the end of the message before them, which every chat template allows,
    # "message" makes it a message of its own.
    marker: Literal["append", "message"] = "append"
    # Train each turn as a sample of its own. The gradient is the same, but tokens that turns have in common are computed again for each.
    every_step: bool = False
    # Treatment of the thoughts of earlier replies: "keep" keeps them, "strip_on_cut" takes them out when the context is cut, "strip" as
    # soon as the next turn begins. The last makes each turn with a thought a cut, so the learner's work grows with the square of the turns.
    thinking: Literal["keep", "strip_on_cut", "strip"] = "keep"


class Endpoint(Message, frozen=True, kw_only=True):
    """An OpenAI-compatible server that replies in place of the fleet's engines. Its key never travels."""

    api_base: str  # e.g. http://host:30000/v1
    model: str
    key_env: str = ""  # environment variable of the worker that holds the key; "" and no file: none is sent
    key_file: str = ""  # file on the worker's host that holds the key
    # Fields of each request's body beside model, messages and tools. No other fields are sent.
    options: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class RolloutRequest(JobRequest, frozen=True, kw_only=True):
    """Everything that a worker needs to run one rollout: workers are interchangeable and need no recipe."""

    task: Task
    member: Count  # counts from 0 within the group
    group_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    version_at_enqueue: int
    sampling: Sampling
    limits: Limits
    agent_config: str  # the agent's YAML files merged into one, see agent/config.py
    tokenizer: str  # content hash under which the tokenizer is stored
    cursor: Count = 0  # position of the group's task in the run's task order
    # The share of gradings, drawn by chance, that have control runs: runs of the tests in which an expectation is contradicted.
    control_share: Share = 1.0
    num_controls: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1  # control runs of such a grading
    context: Context = Context()
    endpoint: Endpoint | None = None  # None: the fleet's engines, through its router
    # Engines report to which experts they routed each token, and turns carry it: Turn.routing.
    report_routing: bool = False
    harness: Harness | None = None  # the agent program that plays; None: the built-in loop
    asides_are_trained: bool = False  # train an agent program's asides as well
    # Each turn names the adapter that engines sample with: the version that they serve then.
    names_adapter: bool = False

    def without_calibration(self) -> Self:
        """The request as it is shown and as trajectories contain it: only the grader gets the calibration, which describes the hidden
        tests.
        """
        return replace(self, task=replace(self.task, calibration=b""))

    @property
    def task_id(self) -> str:
        return self.task.id

    @property
    def image(self) -> str:
        return self.task.image

    @property
    def max_turns(self) -> int:
        return self.limits.turns

    @property
    def blames_engine(self) -> bool:
        """False if the request names its own server, which is not an engine of the fleet."""
        return self.endpoint is None

    @property
    def retries(self) -> Retries:
        return self.limits.retries


R = TypeVar("R", bound=JobRequest, default=RolloutRequest)


class Claim(Message, Generic[R], frozen=True, kw_only=True):
    """A worker's hold on a request, for one attempt. It lasts as long as the worker renews its lease.

    `attempt` counts the claims of this request from 1; a worker whose attempt is no longer the newest can neither
    renew nor publish.
    """

    request: R
    attempt: Count
    worker: str  # "host/pid"
    claimed_at: UnixSeconds
    num_unended: int = 0  # earlier claims whose lease expired: neither published nor returned to the queue


PHASES = ("opening", "pulling", "agent", "grading", "judging", "publishing")


@dataclass(slots=True)
class EpisodeStatus:
    """`phase` is one of PHASES; `turn` counts finished turns: played, or judged."""

    phase: str = "opening"
    turn: int = 0
    turns: list[Any] = field(default_factory=list[Any])  # the played ones, of `pipeline.trajectory.Turn`
