"""An ask for one rollout, and a worker's try at it."""

from typing import Annotated, Literal

import msgspec

from pipeline.errors import FailureClass
from pipeline.message import Count, Message, Seconds, UnixSeconds
from pipeline.task import Task

Purpose = Literal["train", "eval"]


class Sampling(Message, frozen=True, kw_only=True):
    """How the policy draws.

    For training, top_p and top_k must stay open: log-probs are of the distribution drawn from.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int | None = None  # None: all
    max_new_tokens: int = 4096  # per turn


class Budget(Message, frozen=True, kw_only=True):
    """How often failures of one class are put up with, and how long to wait after each."""

    tries: Count  # failures of this class before the request is dead
    first_s: Seconds = 1.0  # wait after the first of them; doubles with each
    longest_s: Seconds = 60.0

    def wait_s(self, num_failures: int) -> float:
        """After so many failures of the class, before jitter."""
        return min(self.first_s * 2.0 ** min(num_failures - 1, 60), self.longest_s)


class Retries(Message, frozen=True, kw_only=True):
    """What each class of failures may cost a request before it is dead. See `errors.class_of`."""

    policy: Budget = Budget(tries=1)
    environment: Budget = Budget(tries=1)  # 2 or more where hosts hold different images
    infrastructure: Budget = Budget(tries=5)
    grader: Budget = Budget(tries=3, first_s=2.0)
    poison: Budget = Budget(tries=1)
    unended_claims: int = (
        8  # claims that ended without a word (their workers died) before it counts as poison
    )

    def of(self, kind: FailureClass) -> Budget:
        found: Budget = getattr(self, kind)
        return found


class Limits(Message, frozen=True, kw_only=True):
    """Where an episode ends. Deadlines start at the claim, never in the queue.

    An absent limit is None, never 0.
    """

    turns: int = 50
    context_tokens: int = 32768
    wall_s: float = 1800.0  # agent loop
    command_s: float = 180.0  # one command
    grade_cpu_s: float = 1800.0  # CPU time after which a test run counts as unresolved
    grade_wall_s: float = (
        7200.0  # wall time after which, CPU time left, grading counts as an infrastructure failure
    )
    observation_chars: int = 10_000  # longer output keeps its first and last half
    format_errors: int = 3  # consecutive replies without exactly one command before the episode ends
    retries: Retries = Retries()


class RolloutRequest(Message, frozen=True, kw_only=True):
    """All that an interchangeable worker needs.

    `id` is also the arq job id; member counts from 0 within the group.
    """

    id: str
    run_id: str
    purpose: Purpose
    task: Task
    group_id: str
    member: Count
    group_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    version_at_enqueue: int
    sampling: Sampling
    limits: Limits
    agent_config: (
        str  # the agent's YAML, verbatim: prompts travel with the request, so workers need no recipe
    )
    tokenizer: str  # content hash of the tokenizer directory announced with the run
    enqueued_at: UnixSeconds
    group_asked_at: UnixSeconds = (
        0.0  # when its group was first asked for: its place in the queue; 0: enqueued_at
    )
    cursor: Count = 0  # position of the group's task in the run's task order
    traceparent: str = ""  # W3C trace context of the enqueue span


class Claim(Message, frozen=True, kw_only=True):
    """One worker's try.

    Its lease says that it still breathes; `attempt` counts claims of this request from 1 and fences late
    results.
    """

    request: RolloutRequest
    attempt: Count
    worker: str  # "host/pid"
    claimed_at: UnixSeconds
    num_unended: int = 0  # claims before this one whose workers fell silent: neither answered nor handed back
