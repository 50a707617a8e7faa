"""Groups from their first request to the step that trains them. Pure bookkeeping: no Redis, and no clock of its own. Numbers that every
trajectory needs are kept as counts, so the cost of a trajectory does not grow with the number of groups.

A group closes when every member has arrived; a failed one counts, without a reward. It also closes when its deadline has passed and enough
members are valid: those with a reward and sound samples. With too few of them, or all with the same reward, the group is dropped. Otherwise
it is ready, and the oldest ready group goes first; one that waits for judgements is skipped, unless it would then be trained too late.
Requests still outstanding when their group leaves the book are surplus, to be withdrawn.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.journal.rows import NO_STAMPS, EpisodeStamps, Fate, JudgedTurn, JudgementFate, JudgementRow
from pipeline.message import Message
from pipeline.trajectory import TrajectoryHead
from trainer.batching.batch import Sample
from trainer.batching.credit import has_signal
from trainer.recipe import Stragglers
from trainer.records.journal_writer import OutstandingRequest
from trainer.rollouts.admission import Admission

LOGPROB_BYTES = 4
"""The memory of one log-prob of a teacher."""


@dataclass(slots=True)
class MemberJudgement:
    """The fate of the request to judge a member. A judgement joins at most once, and never changes a member that a step has taken."""

    fate: JudgementFate
    turns: tuple[JudgedTurn, ...] = ()
    # A teacher's log-probs of the sampled tokens, in nats, by turn; None where no teacher judges.
    logprobs: Mapping[int, npt.NDArray[np.float32]] | None = None
    # The sum over the rollout's tokens of log p - log p_teacher, in nats, and their number; 0 tokens where no teacher judges.
    reverse_kl: tuple[float, int] = (0.0, 0)
    judge: str = ""  # model and weights that judged, or the rule
    error: str = ""  # why the judge failed
    waited_s: float = 0.0  # time from its enqueueing until it arrived or was withdrawn
    # Its stream entries: none if the request was withdrawn, more than one only if it was delivered twice.
    entries: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Member:
    """A trajectory in its group. `entries` are its stream entries: more than one only if it was delivered twice."""

    head: TrajectoryHead
    samples: tuple[Sample, ...]
    entries: list[str]
    fault: str = ""  # the reason why its tokens must not reach the learner
    is_altered: bool = False  # whether the fault is that its tokens are not those that the engine sampled
    judgement: MemberJudgement | None = None
    awaits_judgement: bool = False  # whether a request to judge it is outstanding
    stamps: EpisodeStamps = NO_STAMPS  # times of the stages until it joined its group
    taught_bytes: int = 0  # memory of a teacher's log-probs, counted from when it joins, before they arrive

    @property
    def is_valid(self) -> bool:
        return self.head.reward is not None and not self.fault

    @property
    def scores(self) -> Mapping[int, float] | None:
        """The scores that a judge gave in time, by turn; None without a judgement."""
        if self.judgement is None or self.judgement.fate != "joined":
            return None
        return {one.turn: one.score for one in self.judgement.turns if one.score is not None}

    @property
    def logprobs(self) -> Mapping[int, npt.NDArray[np.float32]] | None:
        """The log-probs that a teacher gave in time, by turn; None without them."""
        return self.judgement.logprobs if self.judgement and self.judgement.fate == "joined" else None

    @property
    def num_bytes(self) -> int:
        """The memory of its samples, and of a teacher's log-probs."""
        return sum(sample.num_bytes for sample in self.samples) + self.taught_bytes

    @property
    def lag_from(self) -> int:
        """The oldest weight version that sampled one of its tokens; without a sampled token, the version of its request."""
        return self.head.version_at_enqueue if self.head.version_first is None else self.head.version_first


_PREFIX = "g"

Lag = Callable[[int], int]
"""The lag of a weight version, as computed by `Timeline.lag`."""


def group_id_of(cursor: int) -> str:
    """The id of the run's group at `cursor`. The ids sort in the order of the cursors."""
    return f"{_PREFIX}{cursor:08d}"


def cursor_of(group_id: str) -> int:
    """Returns the cursor of a group id; the inverse of `group_id_of`. Raises ValueError for any other text."""
    if not group_id.startswith(_PREFIX) or not group_id[1:].isdigit():
        raise ValueError(f"{group_id!r} is not a group of a training run")
    return int(group_id[1:])


@dataclass(slots=True)
class Group:
    cursor: int
    size: int
    enqueued_version: int
    task_id: str
    members: dict[int, Member] = field(default_factory=dict[int, Member])
    # The request that currently counts for each member, by member.
    requests: dict[int, OutstandingRequest] = field(default_factory=dict[int, OutstandingRequest])
    enqueued_at: float = 0.0  # when it was first enqueued, Unix seconds
    started_at: float | None = None  # time of a member's first claim, on the caller's clock
    closed_at: float = 0.0  # Unix seconds, when it ceased to be open
    # When it stopped waiting for judgements, in Unix seconds; 0.0 if it has not.
    released_at: float = 0.0

    @property
    def is_complete(self) -> bool:
        return len(self.members) == self.size

    @property
    def num_missing(self) -> int:
        return self.size - len(self.members)

    @property
    def num_bytes(self) -> int:
        return sum(member.num_bytes for member in self.members.values())

    @property
    def outstanding(self) -> list[OutstandingRequest]:
        """Requests whose trajectories have not arrived."""
        held = {number: member.head.request_id for number, member in self.members.items()}
        return [
            request for number, request in self.requests.items() if held.get(number) != request.request_id
        ]

    def is_overdue(self, now: float, deadline_s: float) -> bool:
        return self.started_at is not None and now >= self.started_at + deadline_s

    @property
    def rewards(self) -> dict[int, float]:
        """Rewards of the valid members, by number."""
        found = {
            number: member.head.reward for number, member in sorted(self.members.items()) if member.is_valid
        }
        return {number: reward for number, reward in found.items() if reward is not None}

    def fates(self, valid: Fate) -> dict[int, Fate]:
        """The fate of each member if the fate of the valid ones is `valid`."""
        return {number: _fate(member, valid) for number, member in self.members.items()}


class OpenGroup(Message, frozen=True):
    """The part of a group that was enqueued which it keeps over a resume."""

    task_id: str
    size: int


class GroupBook:
    """All groups that were enqueued and are neither taken nor dropped."""

    def __init__(
        self,
        admission: Admission,
        *,
        min_valid_of: Callable[[int], int],
        stragglers: Stragglers,
        train_without_signal: bool = False,
        requires_judgements: bool = False,
        has_teacher: bool = False,
    ) -> None:
        """`min_valid_of` gives the number of valid members that a group of a size needs. `requires_judgements`: a group that waits for
        judgements is never taken without them, however late it becomes. `has_teacher`: a teacher gives a log-prob of each trained token.
        """
        self._has_teacher = has_teacher
        self._admission = admission
        self._min_valid_of = min_valid_of
        self._stragglers = stragglers
        self._train_without_signal = train_without_signal
        self._requires_judgements = requires_judgements
        self._open: dict[int, Group] = {}
        self._ready: dict[int, Group] = {}
        self._unjudged: set[int] = set()  # ready groups that wait for judgements
        self._taken: set[int] = set()
        # Tasks of the groups that a step has taken, until they are settled, by cursor
        self._unsettled: dict[int, str] = {}
        # Requests that were still outstanding when their groups left the book, by request id.
        self.surplus: dict[str, OutstandingRequest] = {}
        # Number of groups in the book, by the version of the weights that they were enqueued with.
        self._live_by_version: Counter[int] = Counter()
        self.num_awaited = 0  # members whose trajectories have not arrived
        self.held_bytes = 0  # memory that the samples of all groups in the book take
        self.largest_bytes = 0  # size of the largest samples of one member so far
        self.largest_body_bytes = 0  # size of the largest body of one member in Redis so far

    @property
    def num_live(self) -> int:
        return len(self._open) + len(self._ready)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_unjudged(self) -> int:
        """The number of ready groups that wait for judgements."""
        return len(self._unjudged)

    @property
    def needed(self) -> int:
        """The smallest number of trajectories that could complete the next step's groups, if none is dropped."""
        short = self._admission.groups_per_step - len(self._ready)
        return sum(sorted(group.num_missing for group in self._open.values())[: max(0, short)])

    @property
    def outstanding(self) -> list[OutstandingRequest]:
        """Outstanding requests of the open groups."""
        return [request for group in self._open.values() for request in group.outstanding]

    @property
    def end(self) -> int:
        """The cursor after the last one in the book."""
        return max([*self._open, *self._ready], default=-1) + 1

    def withdraw(self) -> list[Group]:
        """Removes every group from the book, because the run ends."""
        return [self._leave(cursor) for cursor in sorted({**self._open, **self._ready})]

    def withdraw_task(self, task_id: str) -> list[Group]:
        """Removes every group of this task from the book."""
        live = {**self._open, **self._ready}
        return [self._leave(cursor) for cursor, group in sorted(live.items()) if group.task_id == task_id]

    def expect(self, cursor: int, *, size: int, version: int, task_id: str) -> Group:
        """Returns the group at `cursor`. If the book does not know it, it is added to the open groups."""
        known = self._open.get(cursor) or self._ready.get(cursor)
        if known is not None:
            return known
        group = self._open[cursor] = Group(cursor, size, version, task_id)
        self._live_by_version[version] += 1
        self.num_awaited += size
        return group

    def expect_request(self, request: OutstandingRequest) -> None:
        """Makes this request of an expected group the one that counts for its member, replacing an earlier request."""
        group = self._open.get(request.cursor)
        if group is not None:
            group.requests[request.member] = request

    def task_at(self, cursor: int) -> str:
        """The id of the group's task; empty if the book does not know the group."""
        group = self._open.get(cursor) or self._ready.get(cursor)
        return group.task_id if group else ""

    @property
    def open_groups(self) -> dict[int, OpenGroup]:
        """Task and size of all groups in the book, by cursor."""
        live = {**self._open, **self._ready}
        return {cursor: OpenGroup(group.task_id, group.size) for cursor, group in live.items()}

    def live_tasks(self, is_settled: Callable[[int], bool]) -> set[str]:
        """Ids of the tasks of all groups that are not settled. `is_settled` says that of a group's cursor."""
        self._unsettled = {cursor: task for cursor, task in self._unsettled.items() if not is_settled(cursor)}
        live = (*self._open.values(), *self._ready.values())
        return {*self._unsettled.values(), *(group.task_id for group in live)}

    def find(self, cursor: int, member: int) -> Member | None:
        group = self._open.get(cursor) or self._ready.get(cursor)
        return group.members.get(member) if group else None

    def find_rollout(self, cursor: int, rollout_id: str) -> Member | None:
        """The member with this trajectory."""
        group = self._open.get(cursor) or self._ready.get(cursor)
        members = group.members.values() if group else ()
        return next((member for member in members if member.head.request_id == rollout_id), None)

    def enqueued_at(self, cursor: int) -> float:
        """The time when the group was first enqueued (Unix seconds); 0 if the book does not know it."""
        group = self._open.get(cursor) or self._ready.get(cursor)
        return group.enqueued_at if group else 0.0

    def awaits(self, cursor: int, head: TrajectoryHead) -> bool:
        """Whether this request is the one that counts for its member; it is if the book does not know the group."""
        group = self._open.get(cursor) or self._ready.get(cursor)
        request = group.requests.get(head.member) if group else None
        return group is None or (request is not None and request.request_id == head.request_id)

    def has_taken(self, cursor: int) -> bool:
        """Whether a step has taken the group, so that a trajectory that arrives now is too late."""
        return cursor in self._taken

    def missing(self, cursor: int) -> list[int] | list[None]:
        """Members without a trajectory and without an outstanding request. If the book does not know the group, only None, for all."""
        if cursor in self._ready:
            return []
        group = self._open.get(cursor)
        if group is None:
            return [None]
        known = {*group.members, *group.requests}
        return [number for number in range(group.size) if number not in known]

    def forget(self, cursor: int, member: int) -> None:
        """Removes the request that counted for this member, because it failed or was lost. The group stays open."""
        group = self._open.get(cursor)
        if group is not None:
            group.requests.pop(member, None)

    # Deadlines

    @property
    def unclaimed(self) -> list[str]:
        """Ids of the requests of open groups for which no claim of any request is known yet."""
        fresh = (group for group in self._open.values() if group.started_at is None)
        return [request.request_id for group in fresh for request in group.requests.values()]

    def note_claims(self, ages_s: Mapping[str, float], now: float) -> None:
        """Starts the deadline of each group at its first claim. `ages_s` is the time since the first claim of each request."""
        for group in (group for group in self._open.values() if group.started_at is None):
            ages = [ages_s[one.request_id] for one in group.requests.values() if one.request_id in ages_s]
            if ages:
                group.started_at = now - max(ages)

    def overdue(self, now: float, deadline_s: Callable[[int], float]) -> list[Group]:
        """Open groups whose deadline has passed and that have enough valid members, oldest first. `deadline_s` depends on the cursor.

        A group with too few valid members continues to wait: a late group is better than none.
        """
        return [
            group
            for _, group in sorted(self._open.items())
            if group.is_overdue(now, deadline_s(group.cursor)) and self._is_enough(group)
        ]

    def unclaimed_since(self, now: float, queue_s: float) -> list[Group]:
        """Open groups that were enqueued at least `queue_s` before `now` (Unix s), and of which no member has been claimed."""
        return [
            group
            for _, group in sorted(self._open.items())
            if group.started_at is None and not group.members and now >= group.enqueued_at + queue_s
        ]

    def hold(self, cursor: int, member: Member) -> Group | None:
        """Puts a trajectory into its group. Returns the group if that completed it; `verdict` then decides its fate."""
        head = member.head
        group = self.expect(
            cursor, size=head.group_size, version=head.version_at_enqueue, task_id=head.task_id
        )
        replaced = group.members.get(head.member)
        if self._has_teacher:
            member.taught_bytes = LOGPROB_BYTES * sum(one.num_trained_tokens for one in member.samples)
        group.members[head.member] = member
        self.num_awaited -= replaced is None and cursor in self._open
        self.held_bytes += member.num_bytes - (replaced.num_bytes if replaced else 0)
        self.largest_bytes = max(self.largest_bytes, member.num_bytes)
        self.largest_body_bytes = max(self.largest_body_bytes, head.body_bytes)
        return group if group.is_complete else None

    def verdict(self, group: Group) -> Fate:
        """The fate of a group that closes: "trained", or the reason why not. Moves the group to the ready ones, or out of the book."""
        self._leave(group.cursor)
        if not self._is_enough(group):
            return "too_few_valid"
        if not has_signal(list(group.rewards.values())) and not self._train_without_signal:
            return "zero_variance"
        self._ready[group.cursor] = group
        self._live_by_version[group.enqueued_version] += 1
        self.held_bytes += group.num_bytes
        return "trained"

    def _is_enough(self, group: Group) -> bool:
        """Whether the group has as many valid members as it needs."""
        return len(group.rewards) >= self._min_valid_of(group.size)

    def take(self, lag_of: Lag) -> list[Group] | None:
        """The groups of the next step, oldest first; None if there are too few, or if the step must wait for one."""
        chosen = self._choose(self._admission.groups_per_step, lag_of)
        return None if chosen is None else self._take(chosen)

    def take_some(self, lag_of: Lag, *, num_taken: int) -> list[Group] | None:
        """Groups that a step which has taken `num_taken` can train already, oldest first; None if there is none.

        The step keeps room for the groups that would otherwise be trained too late.
        """
        free = self._admission.groups_per_step - num_taken
        for number in range(min(free, len(self._ready)), 0, -1):
            chosen = self._choose(number, lag_of, num_free=free - number)
            if chosen is not None:
                return self._take(chosen)
        return None

    # Judgements

    def hold_back(self, cursor: int) -> None:
        """Makes a ready group wait for judgements."""
        assert cursor in self._ready, "only a ready group can wait for judgements"
        self._unjudged.add(cursor)

    def release(self, cursor: int) -> None:
        """Ends the group's wait for judgements."""
        self._unjudged.discard(cursor)

    @property
    def unjudged(self) -> list[Group]:
        """Ready groups that wait for judgements, oldest first."""
        return [self._ready[cursor] for cursor in sorted(self._unjudged)]

    def put_back(self, groups: Iterable[Group]) -> None:
        """Return groups that a step had taken and did not train to the ready groups."""
        for group in groups:
            self._taken.discard(group.cursor)
            self._unsettled.pop(group.cursor, None)
            self._ready[group.cursor] = group
            self._live_by_version[group.enqueued_version] += 1
            self.held_bytes += group.num_bytes

    def _choose(self, number: int, lag_of: Lag, *, num_free: int = 0) -> list[int] | None:
        """`number` ready groups, oldest first; None if there are too few, or if the step must wait for one.

        Groups that wait for judgements are skipped. A group that would become too late by waiting is chosen without its judgements.
        """
        judged = sorted(self._ready.keys() - self._unjudged)[:number]
        if len(judged) < number:
            return None
        if not self._leaves_late(judged, lag_of, num_free=num_free):
            return judged
        if not self._unjudged or self._requires_judgements:
            return None
        oldest = sorted(self._ready)[:number]
        return None if self._leaves_late(oldest, lag_of, num_free=num_free) else oldest

    def _take(self, chosen: Sequence[int]) -> list[Group]:
        self._taken.update(chosen)
        self._unsettled |= {cursor: self._ready[cursor].task_id for cursor in chosen}
        self._unjudged.difference_update(chosen)
        return [self._uncounted(self._ready.pop(cursor)) for cursor in chosen]

    def _leave(self, cursor: int) -> Group:
        self._unjudged.discard(cursor)
        group = self._open.pop(cursor, None)
        if group is not None:
            self.num_awaited -= group.num_missing
        group = self._uncounted(group or self._ready.pop(cursor))
        self.surplus |= {request.request_id: request for request in group.outstanding}
        group.requests.clear()
        return group

    def _uncounted(self, group: Group) -> Group:
        self._live_by_version -= Counter((group.enqueued_version,))
        self.held_bytes -= group.num_bytes
        return group

    def _leaves_late(self, chosen: list[int], lag_of: Lag, *, num_free: int = 0) -> bool:
        """Whether taking `chosen` would postpone an older group for longer than the lag allows, although the step has room
        for `num_free` more groups. Open groups count only if the step waits for stragglers.
        """
        waits = self._stragglers == "wait"
        passed_over = {*(self._open if waits else ()), *self._unjudged.difference(chosen)}
        if not any(cursor < chosen[-1] for cursor in passed_over):
            return False
        live = (
            self._live_by_version
            if waits
            else Counter(group.enqueued_version for group in self._ready.values())
        )
        rest = live - Counter(self._ready[cursor].enqueued_version for cursor in chosen)
        left_out: list[tuple[int, int]] = []
        for lag, number in sorted(
            ((lag_of(version), number) for version, number in rest.items()), reverse=True
        ):
            joining = min(number, num_free)
            num_free -= joining
            if number > joining:
                left_out.append((lag, number - joining))
        return not self._admission.punctual(left_out)


def _fate(member: Member, valid: Fate) -> Fate:
    if member.head.reward is None:
        return "failed"
    if member.is_altered:
        return "altered"
    return "refused" if member.fault else valid


def judgement_row(head: TrajectoryHead, judgement: MemberJudgement, *, cursor: int) -> JudgementRow:
    """The row of a judgement, for the rollout with this head."""
    return JudgementRow(
        rollout_id=head.request_id,
        group_id=head.group_id,
        task_id=head.task_id,
        cursor=cursor,
        fate=judgement.fate,
        turns=judgement.turns,
        version_first=head.version_first,
        num_turns=head.num_turns,
        judge=judgement.judge,
        error=judgement.error,
        waited_s=judgement.waited_s,
        reverse_kl_sum=judgement.reverse_kl[0],
        num_taught_tokens=judgement.reverse_kl[1],
    )
