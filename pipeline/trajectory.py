"""A finished episode as a message: its turns with their exact tokens, how it ended, and its reward.

The invariant: for each turn, `kept + fed + sampled` is exactly the token sequence that the engine held, with ids and
log-probs as the engine reported them. Nothing is ever tokenised again. `JobResult` and `JobHead` are what the stream reads
of a result of any kind; `Trajectory` and `TrajectoryHead` are the kind there is (`kinds.py`).
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Generic, Literal

import msgspec
from msgspec.structs import replace

from pipeline.chat import ChatMessage
from pipeline.message import Count, Float32s, Int32s, Message, UnixSeconds
from pipeline.request import Claim, Purpose, R, RolloutRequest

SCHEMA = 1  # of Trajectory; raised when a field changes its meaning

Stop = Literal["stop", "length", "context"]


class VersionSpan(Message, frozen=True):
    """Weights `version` drew sampled tokens start (inclusive) to end (exclusive) of a turn."""

    version: int
    start: int
    end: int


class Observation(Message, frozen=True, kw_only=True):
    """The result of a command as the policy was shown it, after truncation."""

    exit_code: int | None  # None: killed at its deadline
    output: str  # stdout and stderr as they came, invalid UTF-8 replaced
    dropped_chars: int  # cut out of the middle
    wall_s: float


class Action(Message, frozen=True, kw_only=True):
    """A command that a reply asked for, and what came of it."""

    command: str
    observation: Observation | None = None  # None: it submitted, was not run, or the episode broke
    tool_call_id: str = ""  # of the tool call that asked for it; "" where commands are text


class Cut(Message, frozen=True, kw_only=True):
    """What was taken out of the context before a turn. Everything else stands in it with the ids that it had."""

    num_omitted: Count = 0  # turns that the policy no longer sees, all cuts of the episode together
    marker: str = ""  # the text that stands in their place; "" if none is omitted
    num_thoughts: Count = 0  # earlier replies that lost their thoughts with this cut
    dropped_chars: Count = 0  # of the newest messages, which did not fit either; `told` is without them
    forgot_reply: bool = False  # the reply before this turn was taken out as well


class Usage(Message, frozen=True, kw_only=True):
    """Tokens of one reply as a foreign endpoint counts them."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class Turn(Message, frozen=True, kw_only=True):
    """One reply of the policy, and the commands that it led to.

    In Turn(kept_tokens=5, fed=<observation>, sampled=<reply>, ...) the prompt was the first 5 tokens of the previous
    sequence followed by `fed`, and the policy drew `sampled`. A foreign endpoint tells no token ids: `fed`, `sampled`,
    `logprobs` and `versions` of its turns are empty.
    """

    kept_tokens: int  # leading tokens of the previous sequence seen again unchanged; fewer than all: a cut
    fed: Int32s  # tokens put after them; never trained
    sampled: Int32s  # tokens the policy drew; trained
    logprobs: Float32s  # one per sampled token (nats), under the distribution it was drawn from
    versions: tuple[VersionSpan, ...]  # cover 0..len(sampled) without a gap
    stop: Stop
    text: str  # sampled, decoded, thoughts and all; for people
    reply: ChatMessage | None = None  # `text` taken apart; None: all of it is content
    # Messages since the last reply, as the policy was shown them; before the first reply the opening.
    told: tuple[ChatMessage, ...] = ()
    cut: Cut | None = None  # None: everything before it was still in the context
    actions: tuple[Action, ...] = ()  # in order; none: a format error
    usage: Usage | None = None
    engine: str = ""
    generate_s: float = 0.0
    # Of `fed`: tokens that had been in the context before. A cut has put them after other tokens, so they are computed again.
    repeated_tokens: Count = 0
    finish_reason: str = ""  # why the reply ended, in the words of a foreign endpoint
    # Of prompt, ids and log-probs as the engine was sent and reported them: reply_digest.py. b"" of a foreign endpoint.
    digest: bytes = b""
    # One byte per expert that the engine routed an input token to, layer by layer: of the last kept token, then of all after it but
    # the last, which was not an input yet. b"" where the request did not ask for it.
    routing: bytes = b""
    # Of `generate_s`: until an engine worked on the reply, i.e. in the router, for a slot, for new weights, for another try.
    engine_wait_s: float = 0.0
    asked_at: UnixSeconds = 0.0  # when the policy was asked for it

    @property
    def said(self) -> ChatMessage:
        """The reply as a message."""
        return self.reply or ChatMessage("assistant", self.text)


class Submitted(Message, frozen=True, kw_only=True, tag="submitted"):
    """The policy said it was done; the patch is what its submission printed."""

    patch: bytes


class Exhausted(Message, frozen=True, kw_only=True, tag="exhausted"):
    """A limit of the episode was reached; the patch is the repository's diff at that moment.

    "sandbox": the policy's commands used up the memory or disk space of its sandbox, so that nothing is left to submit.
    """

    limit: Literal["turns", "context", "wall_s", "format_errors", "sandbox"]
    patch: bytes


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """Something of ours broke. Never has a reward."""

    boundary: Literal["sandbox", "engine", "grader", "request", "worker"]
    message: str
    transient: bool


Outcome = Submitted | Exhausted | Failed


class Tally(Message, frozen=True, kw_only=True):
    passed: int
    total: int


# What the control said of a pass: every controlled test failed, as it must (confirmed); one passed all the same, so the value
# is 0 (refuted); each control ran into its time limit (undecided); no test has a control (none); the recipe wanted none (off).
# "": the patch did not pass, so no control was run.
Control = Literal["", "confirmed", "refuted", "undecided", "none", "off"]


class Reward(Message, frozen=True, kw_only=True):
    """A grader's finished verdict. Exists only if a grader finished."""

    value: Annotated[float, msgspec.Meta(ge=0, le=1)]
    resolved: bool
    decided_by: str  # e.g. "exit_code 0", "empty patch", "swebench: RESOLVED_NO", "cpu time used up"
    fail_to_pass: Tally | None = None
    pass_to_pass: Tally | None = None
    # Outcome of each test that decides the verdict, by name; "" if the log does not mention it.
    tests: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    applied_by: str = ""  # rung of the patch ladder: "git apply", "git apply --3way", "patch --fuzz"
    # The end of the grader's log, 4,000 characters at most. It may quote hidden tests: for people, never for a prompt.
    log_tail: str = ""  # the end of the log of grading
    grade_s: float = 0.0
    grade_cpu_s: float = 0.0
    control: Control = ""
    num_controlled: Count = 0  # tests that had to fail in the control run


class EpisodeSeconds(Message, frozen=True, kw_only=True):
    """Where the time of a rollout went on its worker. The fields sum up to the time that the stage took."""

    open_s: float = 0.0  # until the agent's container was ready
    # That the policy was asked without an engine working on the reply, as in `Turn`.
    engine_wait_s: float = 0.0
    generate_s: float = 0.0  # that engines worked on the replies
    command_s: float = 0.0
    close_s: float = 0.0  # until the agent's container was removed
    grade_s: float = 0.0  # with the grader's containers
    other_s: float = 0.0


class JobResult(Message, Generic[R], frozen=True, kw_only=True):
    """What a worker publishes for a claim, whatever its kind: at most one for each request."""

    claim: Claim[R]
    traceparent: str = ""  # of the span of its stage


class JobHead(Message, frozen=True, kw_only=True):
    """What the stream holds of a result, whatever its kind; the whole result, its body, lies under its own key."""

    request_id: str
    run_id: str
    outcome: str  # for people, in a word or two


class Trajectory(JobResult[RolloutRequest], frozen=True, kw_only=True):
    """A finished episode, the result of a rollout. Its claim is without the task's calibration."""

    turns: tuple[Turn, ...]
    outcome: Outcome
    reward: Reward | None
    started_at: UnixSeconds
    finished_at: UnixSeconds
    schema: int = SCHEMA
    seconds: EpisodeSeconds | None = None  # None: no agent ran, or its worker was older than the field


class TrajectoryHead(JobHead, frozen=True, kw_only=True):
    """All that listing and admission need, without the body. About 600 bytes.

    `outcome` is as `outcome_tag` gives it: "submitted", "exhausted:turns", "failed:sandbox".
    """

    purpose: Purpose
    group_id: str
    member: Count
    group_size: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    task_id: str
    reward: Annotated[float, msgspec.Meta(ge=0, le=1)] | None
    num_turns: Count
    sampled_tokens: Count
    body_bytes: Count
    version_at_enqueue: int
    version_first: int | None  # None: nothing was sampled
    version_last: int | None
    attempt: Count
    worker: str
    enqueued_at: UnixSeconds
    claimed_at: UnixSeconds
    finished_at: UnixSeconds
    traceparent: str = ""  # of the rollout span, parent of the learner's step span
    patch: str = ""  # fingerprint of the patch that was graded; "" of a blank one, or none
    control: Control = ""  # of its reward
    num_cuts: Count = 0  # turns before which something was taken out of the context
    repeated_tokens: Count = 0  # of all turns
    num_tokens: Count = 0  # told and sampled, each counted once
    seconds: EpisodeSeconds | None = None  # of its trajectory


def head_of(trajectory: Trajectory, body_bytes: int) -> TrajectoryHead:
    """The head that announces `trajectory` on the stream."""
    request = trajectory.claim.request
    turns = trajectory.turns
    versions = [span.version for turn in turns for span in turn.versions]
    sampled_tokens = sum(len(turn.sampled) // 4 for turn in turns)
    repeated_tokens = sum(turn.repeated_tokens for turn in turns)
    return TrajectoryHead(
        request_id=request.id,
        run_id=request.run_id,
        purpose=request.purpose,
        group_id=request.group_id,
        member=request.member,
        group_size=request.group_size,
        task_id=request.task.id,
        outcome=outcome_tag(trajectory.outcome),
        reward=None if trajectory.reward is None else trajectory.reward.value,
        num_turns=len(turns),
        sampled_tokens=sampled_tokens,
        body_bytes=body_bytes,
        version_at_enqueue=request.version_at_enqueue,
        version_first=min(versions, default=None),
        version_last=max(versions, default=None),
        attempt=trajectory.claim.attempt,
        worker=trajectory.claim.worker,
        enqueued_at=request.enqueued_at,
        claimed_at=trajectory.claim.claimed_at,
        finished_at=trajectory.finished_at,
        traceparent=trajectory.traceparent,
        patch=_fingerprint(trajectory.outcome),
        control="" if trajectory.reward is None else trajectory.reward.control,
        num_cuts=sum(turn.cut is not None for turn in turns),
        repeated_tokens=repeated_tokens,
        num_tokens=sum(len(turn.fed) // 4 for turn in turns) + sampled_tokens - repeated_tokens,
        seconds=trajectory.seconds,
    )


def failed_trajectory(claim: Claim, failed: Failed, started_at: float) -> Trajectory:
    """The trajectory of a claim that has none of its own, because no agent ran or a bug of ours ended it."""
    return Trajectory(
        claim=replace(claim, request=claim.request.without_calibration()),
        turns=(),
        outcome=failed,
        reward=None,
        started_at=started_at,
        finished_at=time.time(),
    )


def failure_of(trajectory: Trajectory) -> Failed | None:
    """What broke, if something of ours did."""
    return trajectory.outcome if isinstance(trajectory.outcome, Failed) else None


def tag_of(trajectory: Trajectory) -> str:
    """Its `outcome_tag`."""
    return outcome_tag(trajectory.outcome)


def outcome_tag(outcome: Outcome) -> str:
    """One word for a table: the ending, and which limit or boundary."""
    match outcome:
        case Submitted():
            return "submitted"
        case Exhausted(limit=limit):
            return f"exhausted:{limit}"
        case Failed(boundary=boundary):
            return f"failed:{boundary}"


def _fingerprint(outcome: Outcome) -> str:
    patch = b"" if isinstance(outcome, Failed) else outcome.patch
    return hashlib.blake2b(patch, digest_size=16).hexdigest() if patch.strip() else ""


def version_at(spans: Iterable[VersionSpan], num_sampled: int) -> Sequence[int]:
    """The weight version of each sampled token. Raises ValueError if the spans leave a gap."""
    versions = [-1] * num_sampled
    for span in spans:
        for index in range(max(span.start, 0), min(span.end, num_sampled)):
            versions[index] = span.version
    if -1 in versions:
        raise ValueError(
            f"version spans {list(spans)} do not cover token {versions.index(-1)} of {num_sampled}"
        )
    return versions
