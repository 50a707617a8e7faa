"""A request for one rollout, and a worker's claim on it.

`JobRequest` is what the queue reads of a request of any kind; `RolloutRequest` is the kind there is (`kinds.py`).
"""

from typing import Annotated, Generic, Literal, Self

import msgspec
from msgspec.structs import replace
from typing_extensions import TypeVar

from pipeline.errors import FailureClass
from pipeline.message import Count, Message, Seconds, UnixSeconds
from pipeline.task import Task

Purpose = Literal["train", "eval"]


class Sampling(Message, frozen=True, kw_only=True):
    """How the policy draws.

    For training, top_p and top_k must stay open: log-probs are of the distribution drawn from.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # sample only from the likeliest tokens that make up this share; 1: from all
    top_k: int | None = None  # sample only from so many of the likeliest tokens; by default from all
    max_new_tokens: int = 4096  # that one turn may sample


class Budget(Message, frozen=True, kw_only=True):
    """How many failures of one class a request may have, and how long it waits after each."""

    tries: Count  # with this many failures of the class the request is dead-lettered
    first_s: Seconds = 1.0  # wait after the first failure; doubles with each
    longest_s: Seconds = 60.0  # no wait is longer

    def wait_s(self, num_failures: int) -> float:
        """The wait after `num_failures` of the class, before jitter."""
        return min(self.first_s * 2.0 ** min(num_failures - 1, 60), self.longest_s)


class Retries(Message, frozen=True, kw_only=True):
    """The budget of each class of failures. See `errors.class_of`."""

    policy: Budget = Budget(tries=1)
    environment: Budget = Budget(tries=1)  # 2 or more where hosts hold different images
    infrastructure: Budget = Budget(tries=5)
    grader: Budget = Budget(tries=3, first_s=2.0)
    poison: Budget = Budget(tries=1)
    # Claims whose lease expired because the worker died; with this many the request counts as poison.
    unended_claims: int = 8

    def of(self, kind: FailureClass) -> Budget:
        found: Budget = getattr(self, kind)
        return found


class JobRequest(Message, frozen=True, kw_only=True):
    """What the queue reads of a request, whatever its kind.

    `id` is also the arq job id, so it is unique among requests of all kinds.
    """

    id: str
    run_id: str
    purpose: Purpose
    group_id: str
    enqueued_at: UnixSeconds
    # When its group was first enqueued: its place in the queue. 0 stands for enqueued_at.
    group_asked_at: UnixSeconds = 0.0
    traceparent: str = ""  # W3C trace context of the enqueue span

    @property
    def task_id(self) -> str:
        """The task it is about, for people; empty if it is about none."""
        return ""

    @property
    def image(self) -> str:
        """The image that workers fetch ahead for it; empty if it needs none."""
        return ""

    @property
    def max_turns(self) -> int:
        """Its limit of turns, for people; 0 if its stage has no turns."""
        return 0

    @property
    def retries(self) -> Retries:
        return Retries()


class Limits(Message, frozen=True, kw_only=True):
    """Where an episode ends. Deadlines start at the claim, never in the queue.

    An absent limit is None, never 0.
    """

    turns: int = 50  # replies of the policy
    context_tokens: int = 32768  # prompt, replies and observations that the policy has before it at one time
    wall_s: float = 1800.0  # wall time of the agent loop
    command_s: float = 180.0  # wall time of one command
    grade_cpu_s: float = 1800.0  # CPU time after which a test run counts as unresolved
    # Wall time after which a test run ends that has CPU time left: unresolved if the machine had CPU time to give, else an
    # infrastructure failure.
    grade_wall_s: float = 7200.0
    observation_chars: int = 10_000  # longer output keeps its first and last half
    format_errors: int = 3  # consecutive replies without exactly one command before the episode ends
    retries: Retries = Retries()


class Context(Message, frozen=True, kw_only=True):
    """What happens when the next reply may not fit into `Limits.context_tokens`.

    "stop": the episode ends. "head_tail": turns are taken out of the middle; the first and the newest stay.
    """

    policy: Literal["stop", "head_tail"] = "stop"
    # The share of the kept turns' room that goes to the first turns of the episode; the newest get the rest.
    head_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.3
    # A cut leaves this share of the room in use, so that not every turn is a cut.
    refill_to: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.7
    # Where the note about omitted turns stands: at the end of the message before them, which every chat template allows, or as a
    # message of its own.
    marker: Literal["append", "message"] = "append"
    # Train each turn as a sample of its own. The gradient is the same; what turns have in common is computed once for each.
    every_step: bool = False
    # What becomes of the thoughts of earlier replies: they are kept, taken out when the context is cut, or taken out as soon as the
    # next turn begins. The last makes each turn with a thought a cut, so the learner's work grows with the square of the turns.
    thinking: Literal["keep", "strip_on_cut", "strip"] = "keep"


class Endpoint(Message, frozen=True, kw_only=True):
    """An OpenAI-compatible server that replies in place of the fleet's engines. Its key never travels."""

    api_base: str  # e.g. http://host:30000/v1
    model: str
    key_env: str = ""  # environment variable of the worker that holds the key; "" and no file: none is sent
    key_file: str = ""  # file on the worker's host that holds it
    # Further fields of the request's body.
    options: dict[str, str | int | float | bool] = msgspec.field(
        default_factory=dict[str, str | int | float | bool]
    )


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
    # The share of passes, drawn by chance, whose tests are run once more with contradicted expectations.
    control_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    context: Context = Context()
    endpoint: Endpoint | None = None  # None: the fleet's engines, through its router
    # Engines report to which experts they routed each token, and turns carry it: Turn.routing.
    report_routing: bool = False

    def without_calibration(self) -> Self:
        """The request as people and trajectories get it: what the grader knows of the hidden tests stays with the grader."""
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
