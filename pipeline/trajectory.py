"""A finished episode as a message: its turns with their exact tokens, how it ended, and its reward.

The invariant: for each turn, `kept + fed + sampled` is exactly the token sequence that the engine held, with ids and
log-probs as the engine reported them. Nothing is ever tokenised again. `JobResult` and `JobHead` are what the stream reads
of a result of any kind; `Trajectory` and `TrajectoryHead` are those of a rollout (`kinds.py`).

The digest of a reply is evidence that what is trained is what the engine sampled, after the prompt that the engine was sent. The worker
computes it from what goes to the engine and what comes back, before anything of ours touches either. It travels with the turn, and the
trainer computes it again from the arrays that the learner is given. It guards against mistakes, not against a worker that forges.
"""

import hashlib
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Annotated, Generic, Literal, Protocol, Self, TypeVar

import msgspec
from msgspec.structs import replace

from pipeline.chat import ChatMessage
from pipeline.errors import Boundary, RolloutError
from pipeline.message import Count, Float32s, Int32s, Message, UnixSeconds
from pipeline.request import Claim, Purpose, R, RolloutRequest

DIGEST_BYTES = 16

_LENGTHS = struct.Struct("<QQ")


class ReplyDigester:
    """Digests of the replies in one unbroken run of tokens, each after all the tokens before it.

    A digest is the BLAKE2b of the prompt's ids, the reply's ids, its log-probs as float32, and the bytes of the first two.
    Several replies after one growing prompt cost one pass over it.
    """

    def __init__(self) -> None:
        self._prompt = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._prompt_bytes = 0

    def extend(self, tokens: Int32s) -> None:
        """Add tokens to the end of the prompt."""
        self._prompt.update(tokens)
        self._prompt_bytes += len(tokens)

    def digest(self, sampled: Int32s, logprobs: Float32s) -> bytes:
        """The digest of the reply `sampled` to the prompt so far."""
        whole = self._prompt.copy()
        whole.update(sampled)
        whole.update(logprobs)
        whole.update(_LENGTHS.pack(self._prompt_bytes, len(sampled)))
        return whole.digest()


def reply_digest(prompt: Int32s, sampled: Int32s, logprobs: Float32s) -> bytes:
    """The digest of one reply."""
    digester = ReplyDigester()
    digester.extend(prompt)
    return digester.digest(sampled, logprobs)


SCHEMA = 2  # the version of Trajectory; raised when a field changes its meaning
FIRST_IN_CONTEXT = -1  # `Turn.after` of a turn that follows no other

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
    """A command that a reply contained, and its result."""

    command: str
    observation: Observation | None = None  # None: it submitted, was not run, or the episode broke
    tool_call_id: str = ""  # the id of the tool call that asked for it; "" where commands are text


class Cut(Message, frozen=True, kw_only=True):
    """The parts that were removed from the context before a turn. Everything else stays in it with the ids that it had."""

    num_omitted: Count = 0  # turns that the policy no longer sees, all cuts of the episode together
    marker: str = ""  # the text that replaces them; "" if none is omitted
    num_thoughts: Count = 0  # earlier replies that lost their thoughts with this cut
    dropped_chars: Count = 0  # what did not fit of the newest messages either; `told` is without it
    forgot_reply: bool = False  # the reply before this turn was taken out as well


class Usage(Message, frozen=True, kw_only=True):
    """Tokens of one reply as a foreign endpoint counts them."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0


class Turn(Message, frozen=True, kw_only=True):
    """One reply of the policy, and the commands that it led to.

    In Turn(kept_tokens=5, fed=<observation>, sampled=<reply>, ...) the prompt was the first 5 tokens of the sequence of the
    turn that it follows, then `fed`, and the policy drew `sampled`. A foreign endpoint returns no token ids: `fed`, `sampled`,
    `logprobs` and `versions` of its turns are empty.
    """

    kept_tokens: int  # leading tokens of the sequence of `after` seen again unchanged; fewer than all: a cut
    fed: Int32s  # tokens put after them; never trained
    sampled: Int32s  # tokens the policy drew; trained
    logprobs: Float32s  # one per sampled token (nats), under the distribution it was drawn from
    versions: tuple[VersionSpan, ...]  # cover 0..len(sampled) without a gap
    stop: Stop
    text: str  # the sampled text, decoded, thoughts included; for display
    reply: ChatMessage | None = None  # `text` taken apart; None: all of it is content
    # Messages since the last reply, as the policy was shown them; before the first reply the opening.
    told: tuple[ChatMessage, ...] = ()
    cut: Cut | None = None  # None: everything before it was still in the context
    actions: tuple[Action, ...] = ()  # the commands in order; none: a format error
    usage: Usage | None = None
    engine: str = ""
    generate_s: float = 0.0
    # Tokens of `fed` that had been in the context before. A cut has put them after other tokens, so they are computed again.
    repeated_tokens: Count = 0
    finish_reason: str = ""  # the reason why the reply ended, as a foreign endpoint reports it
    # The digest of prompt, ids and log-probs as the engine was sent and reported them (`ReplyDigester`); b"" for a foreign endpoint.
    digest: bytes = b""
    # One byte per expert that the engine routed an input token to, layer by layer: of the last kept token, then of all after it but
    # the last, which was not an input yet. b"" where the request did not ask for it.
    routing: bytes = b""
    # The part of `generate_s` until an engine worked on the reply: in the router, for a slot, for new weights, for another try.
    engine_wait_s: float = 0.0
    asked_at: UnixSeconds = 0.0  # when the policy was asked for it
    # The number of the turn that it follows; None: the turn before it. An agent program may hold several conversations at once.
    after: Annotated[int, msgspec.Meta(ge=FIRST_IN_CONTEXT)] | None = None
    thread: str = ""  # the agent program's name for the conversation, for display
    aside: bool = False  # recorded and never trained: nothing that followed depends on it

    @property
    def said(self) -> ChatMessage:
        """The reply as a message."""
        return self.reply or ChatMessage("assistant", self.text)


class Submitted(Message, frozen=True, kw_only=True, tag="submitted"):
    """The policy said it was done. The patch is what was graded: what its submission printed, or the tree's own difference."""

    patch: bytes
    # Why the tree's difference to the start was graded in place of what was printed; "": it was not.
    from_tree: str = ""


class Exhausted(Message, frozen=True, kw_only=True, tag="exhausted"):
    """A limit of the episode was reached; the patch is the repository's diff at that moment.

    "sandbox": the policy's commands used up the memory or disk space of its sandbox, so that there is no patch to submit.
    """

    limit: Literal["turns", "context", "wall_s", "format_errors", "sandbox"]
    patch: bytes


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """An infrastructure failure ended the episode. It never has a reward."""

    boundary: Boundary
    message: str
    transient: bool
    is_own: bool = False  # whether it says nothing about other requests, which fail at the same boundary

    @classmethod
    def of(cls, error: RolloutError) -> Self:
        return cls(
            boundary=error.boundary, message=str(error), transient=error.transient, is_own=error.is_own
        )


Outcome = Submitted | Exhausted | Failed


class Tally(Message, frozen=True, kw_only=True):
    passed: int
    total: int


# The result of the control runs of a pass. confirmed: in each the contradicted test failed, as it must, and every test that needs the fix
# can be contradicted. partial: the same, but some of these tests cannot. refuted: a contradicted test passed, or another that needs
# the fix failed, or the run did not finish; the value is 0. undecided: the machine was too busy for one. none: no test has a
# contradiction. off: the grading has no control runs. "": the patch did not pass.
Control = Literal["", "confirmed", "partial", "refuted", "undecided", "none", "off"]


class Reward(Message, frozen=True, kw_only=True):
    """A grader's finished verdict. It exists only if a grader finished."""

    value: Annotated[float, msgspec.Meta(ge=0, le=1)]
    resolved: bool
    decided_by: str  # e.g. "exit_code 0", "empty patch", "swebench: RESOLVED_NO", "cpu time used up"
    fail_to_pass: Tally | None = None
    pass_to_pass: Tally | None = None
    # Outcome of each test that decides the verdict, by name; "" if the log does not mention it.
    tests: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    applied_by: str = ""  # rung of the patch ladder: "git apply", "git apply --3way", "patch --fuzz"
    # The end of the grader's log, 4,000 characters at most. It may quote hidden tests: it is for display and must never be part of a
    # prompt.
    log_tail: str = ""
    grade_s: float = 0.0
    grade_cpu_s: float = 0.0
    control: Control = ""
    num_controlled: Count = 0  # tests that had to fail in the control runs


class ProgramEnd(Message, frozen=True, kw_only=True):
    """The end of an agent program, and events of its episode besides its turns. None of these decides a reward."""

    name: str
    version: str
    exit_code: int | None  # None: it was killed
    output_tail: str = ""  # the end of what it printed, 4,000 characters at most
    requests: Count = 0  # requests of all kinds
    refused: dict[str, int] = msgspec.field(default_factory=dict[str, int])  # refused requests by reason
    given_again: Count = 0  # replies given to it again, because it had not taken them
    not_taken: Count = 0  # replies that it never took, which are not turns
    roots: Count = 0  # conversations
    branches: Count = 0  # turns that follow a turn which another one follows too
    asides: Count = 0
    # Number of replies by the fate of their copies.
    copies: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    quoted_calls: Count = 0  # calls of the policy that it sent in other conversations


class EpisodeSeconds(Message, frozen=True, kw_only=True):
    """The time of a rollout on its worker, by use. The fields sum up to the time that the stage took."""

    open_s: float = 0.0  # time until the agent's container was ready
    engine_wait_s: float = 0.0  # time for which a reply was awaited and no engine worked on it, as in `Turn`
    generate_s: float = 0.0  # time for which engines worked on the replies
    command_s: float = 0.0
    close_s: float = 0.0  # time until the agent's container was removed
    grade_s: float = 0.0  # time with the grader's containers
    other_s: float = 0.0


class JobResult(Message, Generic[R], frozen=True, kw_only=True):
    """The result that a worker publishes for a claim of any kind: at most one for each request."""

    claim: Claim[R]
    traceparent: str = ""  # the id of the span of its stage


class JobHead(Message, frozen=True, kw_only=True):
    """The stream's entry for a result of any kind; the whole result, its body, has its own key."""

    request_id: str
    run_id: str
    outcome: str  # a word or two for display


class Trajectory(JobResult[RolloutRequest], frozen=True, kw_only=True):
    """A finished episode, the result of a rollout. Its claim is without the task's calibration."""

    turns: tuple[Turn, ...]
    outcome: Outcome
    reward: Reward | None
    started_at: UnixSeconds
    finished_at: UnixSeconds
    schema: int = SCHEMA
    seconds: EpisodeSeconds | None = None  # None: no agent ran, or its worker was older than the field
    program: ProgramEnd | None = None  # None: the built-in loop played


class TrajectoryHead(JobHead, frozen=True, kw_only=True):
    """The fields that listing and admission need, without the body: about 600 bytes.

    `outcome` is as `outcome_tag` gives it: "submitted", "submitted:tree", "exhausted:turns", "failed:sandbox".
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
    traceparent: str = ""  # the id of the rollout span, parent of the learner's step span
    patch: str = ""  # fingerprint of the patch that was graded; "" of a blank one, or none
    control: Control = ""  # `Reward.control` of its reward; "" without one
    num_cuts: Count = 0  # turns before which something was taken out of the context
    repeated_tokens: Count = 0  # all turns together
    num_tokens: Count = 0  # fed and sampled, each counted once
    aside_tokens: Count = 0  # number of `sampled_tokens` that belong to asides, which are never trained
    num_not_taken: Count = 0  # replies that an agent program never took
    seconds: EpisodeSeconds | None = None  # `seconds` of its trajectory
    engines: tuple[str, ...] = ()  # URLs of the engines that sampled it, in the order of its turns, each once
    num_failed_commands: Count = 0  # commands that ended with another exit status than 0, or were stopped


def head_of(trajectory: Trajectory, body_bytes: int) -> TrajectoryHead:
    """The head that announces `trajectory` on the stream."""
    request = trajectory.claim.request
    turns = trajectory.turns
    versions = [span.version for turn in turns for span in turn.versions]
    observations = [action.observation for turn in turns for action in turn.actions if action.observation]
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
        aside_tokens=sum(len(turn.sampled) // 4 for turn in turns if turn.aside),
        num_not_taken=trajectory.program.not_taken if trajectory.program else 0,
        seconds=trajectory.seconds,
        engines=tuple(dict.fromkeys(turn.engine for turn in turns if turn.engine)),
        num_failed_commands=sum(one.exit_code != 0 for one in observations),
    )


def failed_trajectory(claim: Claim, failed: Failed, started_at: float) -> Trajectory:
    """The trajectory of a claim that has none of its own, because no agent ran or a bug in Swerve ended it."""
    return Trajectory(
        claim=replace(claim, request=claim.request.without_calibration()),
        turns=(),
        outcome=failed,
        reward=None,
        started_at=started_at,
        finished_at=time.time(),
    )


def parents_of(turns: Sequence[Turn]) -> tuple[int, ...]:
    """The number of the turn that each turn follows, FIRST_IN_CONTEXT where it follows none.

    Raises ValueError for a turn that follows itself or a later one.
    """
    parents = tuple(number - 1 if turn.after is None else turn.after for number, turn in enumerate(turns))
    for number, parent in enumerate(parents):
        if not FIRST_IN_CONTEXT <= parent < number:
            raise ValueError(f"turn {number} follows turn {parent}, which is not before it")
    return parents


class TokenRun(Protocol):
    """An unbroken run of tokens that an engine held, under construction: each turn's prompt repeats all that came before it."""

    @property
    def num_tokens(self) -> int: ...

    def prefix(self, num_tokens: int) -> Self:
        """A run that begins with this one's first tokens, which the policy sees again and which belong to no reply of the new run."""
        ...

    def extend(self, number: int, turn: Turn) -> None:
        """Adds what turn `number` was fed and what it sampled."""
        ...


Run = TypeVar("Run", bound=TokenRun)


def runs_of(turns: Sequence[Turn], begin: Callable[[], Run], *, every_step: bool = False) -> list[Run]:
    """The unbroken runs of a trajectory in the order of their first turns, each made by `begin`; with `every_step` one for each turn.

    A turn continues the run of the turn that it follows if that run ends there and all of it was kept. Any other turn starts a run with the
    tokens that it kept. Raises ValueError for a turn that kept more tokens than there were.
    """
    runs, ends = list[Run](), list[tuple[Run, int]]()
    for number, (turn, parent) in enumerate(zip(turns, parents_of(turns), strict=True)):
        run, end = ends[parent] if parent != FIRST_IN_CONTEXT else (None, 0)
        if not 0 <= turn.kept_tokens <= end:
            raise ValueError(f"turn {number} kept {turn.kept_tokens} of {end} tokens")
        if run is None:
            run = begin()
            runs.append(run)
        elif every_step or turn.kept_tokens < run.num_tokens:
            run = run.prefix(turn.kept_tokens)
            runs.append(run)
        run.extend(number, turn)
        ends.append((run, run.num_tokens))
    return runs


LOGPROB_SLACK = 1e-3
"""Nats above 0 that a log-prob may have because of rounding in an engine."""


def logprob_fault(logprobs: Sequence[float], num_tokens: int) -> str:
    """The reason why these are not the log-probs, in nats, of a reply of `num_tokens` tokens; "" if they can be."""
    if len(logprobs) != num_tokens:
        return f"{len(logprobs)} log-probs for {num_tokens} sampled tokens"
    if not all(map(isfinite, logprobs)):
        return "a log-prob that is not finite"
    highest = max(logprobs, default=0.0)
    return f"a log-prob of {highest:.4f}, above 0" if highest > LOGPROB_SLACK else ""


def conversations_of(turns: Sequence[Turn]) -> tuple[tuple[int, ...], ...]:
    """The numbers of the turns of each conversation from its first turn on, one for each turn that no other follows."""
    parents = parents_of(turns)
    found = list[tuple[int, ...]]()
    for last in sorted(set(range(len(turns))) - set(parents)):
        path = list[int]()
        while last != FIRST_IN_CONTEXT:
            path.append(last)
            last = parents[last]
        found.append(tuple(reversed(path)))
    return tuple(found)


def failure_of(trajectory: Trajectory) -> Failed | None:
    """The failure, if the trajectory has one."""
    return trajectory.outcome if isinstance(trajectory.outcome, Failed) else None


def tag_of(trajectory: Trajectory) -> str:
    """Its `outcome_tag`."""
    return outcome_tag(trajectory.outcome)


def outcome_tag(outcome: Outcome) -> str:
    """One word for a table: the ending, and which limit or boundary."""
    match outcome:
        case Submitted(from_tree=from_tree):
            return "submitted:tree" if from_tree else "submitted"
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
