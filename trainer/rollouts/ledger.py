"""The settled trajectories, and those of them that a checkpoint contains. The ledger ensures that nothing is trained twice and nothing is
forgotten.

Settling a trajectory writes its row to the journal and remembers its stream entry; its judgement is settled with it. Only when a checkpoint
that contains the settlement is complete on disk are the entries acknowledged. A trainer that dies before that reads them again and has no
trace of using them, because its weights and journal return to the same checkpoint; one that dies between checkpoint and acknowledgement
finds the entries listed in `LedgerState` and acknowledges them without training.

Settled groups are stored by cursor, their position in the run's task order: all below a watermark, and a few above it.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from msgspec import field, structs

from pipeline.journal.rows import NO_STAMPS, EpisodeRow, EpisodeStamps, Fate, JudgementRow, Row, SkippedRow
from pipeline.judge import judge_request_id
from pipeline.message import Message, decode, encode
from pipeline.trajectory import TrajectoryHead
from trainer.records.journal_writer import OutstandingRequest, episode_row, withdrawn_row
from trainer.rollouts.admission import Brake
from trainer.rollouts.groups import Group, OpenGroup, judgement_row


class Rows(Protocol):
    """The run's journal, or an object that forwards rows to it."""

    def append(self, row: Row) -> object: ...

    def checkpoint(self) -> dict[str, int]:
        """Force all rows to disk; returns each file's length in bytes."""
        ...


class SinceStep(Message, frozen=True, kw_only=True):
    """The counts of what was settled since the last optimizer step, for the next step's row."""

    zero_variance: int = 0  # number of dropped groups
    invalid: int = 0  # number of groups dropped for too few graded members
    reward_sum: float = 0.0  # sum over graded members of all closed groups, dropped ones included
    num_rewards: int = 0
    refilled: int = 0  # members that failed and were enqueued again
    withdrawn: int = 0  # members whose groups closed without them


class LedgerState(Message, frozen=True, kw_only=True):
    """The trainer's state in a checkpoint, besides weights and optimizer."""

    step: int = 0
    version: int = -1  # newest published version when it was written
    cursor: int = 0  # task-order position of the next group to enqueue
    closed_below: int = 0
    closed_above: tuple[int, ...] = ()
    # (stream entry, request id) pairs that are settled in this checkpoint and not yet acknowledged:
    pending: tuple[tuple[str, str], ...] = ()
    journal: dict[str, int] = field(default_factory=dict)  # size of each file in bytes
    evaluations: tuple[str, ...] = ()  # names of finished evaluations
    groups_without_signal: int = 0  # number in a row
    since_step: SinceStep = SinceStep()
    # Number of members enqueued again in each open group, by cursor
    refills: dict[int, int] = field(default_factory=dict)
    # The pairs of `pending`, for the stream of judgements.
    pending_judgements: tuple[tuple[str, str], ...] = ()
    # Groups that were enqueued and not taken by a step, by cursor
    open_groups: dict[int, OpenGroup] = field(default_factory=dict)


class Ledger:
    """The settlements of one run. Only the event loop may use it."""

    def __init__(
        self,
        rows: Rows,
        state: LedgerState | None = None,
        *,
        observe: Callable[[EpisodeRow], None] = lambda row: None,
        source_at: Callable[[int], str] = lambda cursor: "",
    ) -> None:
        """Each row of a trajectory that arrived is passed to `observe`, in the order of the journal. `source_at` names the source of the
        group at a cursor.
        """
        state = state or LedgerState()
        self._rows = rows
        self._observe = observe
        self._source_at = source_at
        self._closed_below = state.closed_below
        self._closed_above = set(state.closed_above)
        self._pending: list[tuple[str, str]] = []
        self._pending_judgements: list[tuple[str, str]] = []
        self.evaluations = list(state.evaluations)
        self.groups_without_signal = state.groups_without_signal
        self.since_step = state.since_step
        self._refills = dict(state.refills)
        self.brake = Brake(failed_groups=0, last_failed_at=0.0)

    @property
    def end(self) -> int:
        """The cursor after the last settled group."""
        return max(self._closed_above, default=self._closed_below - 1) + 1

    @property
    def pending_ids(self) -> set[str]:
        """Request ids of rollouts settled and not yet acknowledged."""
        return {request_id for _, request_id in self._pending}

    @property
    def pending_judgement_ids(self) -> set[str]:
        """Ids of judge requests settled and not yet acknowledged."""
        return {request_id for _, request_id in self._pending_judgements}

    def is_closed(self, cursor: int) -> bool:
        return cursor < self._closed_below or cursor in self._closed_above

    def open_cursors(self, end: int) -> list[int]:
        """Cursors below `end` whose groups are not settled: enqueued, or lost before they could be."""
        return [cursor for cursor in range(self._closed_below, end) if cursor not in self._closed_above]

    def close(self, cursor: int) -> None:
        """Settles the group at `cursor`; later arrivals for it are late."""
        self._closed_above.add(cursor)
        self._refills.pop(cursor, None)
        while self._closed_below in self._closed_above:
            self._closed_above.remove(self._closed_below)
            self._closed_below += 1

    def skip(self, cursor: int, task_id: str) -> None:
        """Skips the position `cursor`, because its task is in quarantine."""
        self._rows.append(SkippedRow(cursor=cursor, task_id=task_id))
        self.close(cursor)

    def close_group(self, group: Group, fates: Mapping[int, Fate]) -> None:
        """Settle every member of a group by its number, and the group with them."""
        for number, member in sorted(group.members.items()):
            stamps = structs.replace(member.stamps, closed_at=group.closed_at, released_at=group.released_at)
            self.settle(member.head, member.entries, fates[number], cursor=group.cursor, stamps=stamps)
            if member.judgement is not None:
                row = judgement_row(member.head, member.judgement, cursor=group.cursor)
                self.settle_judgement(row, member.judgement.entries)
        self.close(group.cursor)

    def num_refills(self, cursor: int) -> int:
        """The number of members of the open group that have been enqueued again."""
        return self._refills.get(cursor, 0)

    def refill(
        self, head: TrajectoryHead, entries: Iterable[str], *, cursor: int, stamps: EpisodeStamps
    ) -> None:
        """Settles a failed member whose group stays open, because another request replaces it."""
        self._refills[cursor] = self.num_refills(cursor) + 1
        self.since_step = structs.replace(self.since_step, refilled=self.since_step.refilled + 1)
        self.settle(head, entries, "failed", cursor=cursor, stamps=stamps)

    def withdraw(self, request: OutstandingRequest, *, evaluation: str = "") -> None:
        """Settle a withdrawn request; it has no stream entry to acknowledge."""
        row = withdrawn_row(request, evaluation=evaluation)
        self._rows.append(structs.replace(row, source=self._source_at(request.cursor)))
        since = self.since_step
        self.since_step = structs.replace(since, withdrawn=since.withdrawn + (request.purpose == "train"))

    def note_signal(self) -> None:
        """Records that a group with a signal was found, which ends the streaks of groups without signal and of failures."""
        self.groups_without_signal = 0
        self.brake = Brake(failed_groups=0, last_failed_at=0.0)

    def drop_group(self, group: Group, verdict: Fate) -> None:
        """Settle a group that is not trained; its rewards still count in the next step's row."""
        since = self.since_step
        self.since_step = structs.replace(
            since,
            zero_variance=since.zero_variance + (verdict == "zero_variance"),
            invalid=since.invalid + (verdict == "too_few_valid"),
            reward_sum=since.reward_sum + sum(group.rewards.values()),
            num_rewards=since.num_rewards + len(group.rewards),
        )
        if verdict == "too_few_valid":
            self.brake = Brake(failed_groups=self.brake.failed_groups + 1, last_failed_at=time.monotonic())
        else:
            self.brake = Brake(failed_groups=0, last_failed_at=0.0)
        self.groups_without_signal += verdict == "zero_variance"
        self.close_group(group, group.fates(verdict))

    def settle(
        self,
        head: TrajectoryHead,
        entries: Iterable[str],
        fate: Fate,
        *,
        cursor: int = -1,
        evaluation: str = "",
        stamps: EpisodeStamps = NO_STAMPS,
    ) -> None:
        """Writes the row of a trajectory's fate; its stream entries are acknowledged after the next checkpoint."""
        row = episode_row(head, fate, cursor=cursor, evaluation=evaluation, stamps=stamps)
        row = structs.replace(row, source=self._source_at(cursor))
        self._rows.append(row)
        self._observe(row)
        self.release(head, entries)

    def release(self, head: TrajectoryHead, entries: Iterable[str]) -> None:
        """Has these entries acknowledged after the next checkpoint, without a row: they are second copies of a settled trajectory."""
        self._pending += [(entry, head.request_id) for entry in entries]

    def settle_judgement(self, row: JudgementRow, entries: Iterable[str]) -> None:
        """Writes the row of a judge request's fate; its stream entries are acknowledged after the next checkpoint."""
        self._rows.append(row)
        self.release_judgement(row.rollout_id, entries)

    def release_judgement(self, rollout_id: str, entries: Iterable[str]) -> None:
        """Has these entries of a judgement acknowledged after the next checkpoint, without a row."""
        request_id = judge_request_id(rollout_id)
        self._pending_judgements += [(entry, request_id) for entry in entries]

    def state(
        self,
        *,
        step: int,
        version: int,
        cursor: int,
        open_groups: Mapping[int, OpenGroup] | None = None,
    ) -> LedgerState:
        """Everything settled up to now, with the journal's rows forced to disk. The weights must not change between this call
        and the checkpoint that it goes into.
        """
        return LedgerState(
            step=step,
            version=version,
            cursor=cursor,
            closed_below=self._closed_below,
            closed_above=tuple(sorted(self._closed_above)),
            pending=tuple(self._pending),
            journal=self._rows.checkpoint(),
            evaluations=tuple(self.evaluations),
            groups_without_signal=self.groups_without_signal,
            since_step=self.since_step,
            refills=dict(self._refills),
            pending_judgements=tuple(self._pending_judgements),
            open_groups=dict(open_groups or {}),
        )

    def acknowledged(self, state: LedgerState) -> None:
        """Records that the pending entries in `state` have been acknowledged; entries settled since then still wait."""
        settled = {*state.pending, *state.pending_judgements}
        self._pending = [pair for pair in self._pending if pair not in settled]
        self._pending_judgements = [pair for pair in self._pending_judgements if pair not in settled]


def encode_state(state: LedgerState) -> bytes:
    return encode(state)


def decode_state(extra: bytes) -> LedgerState:
    """Inverse of `encode_state`. Raises MalformedMessage."""
    return decode(extra, LedgerState)
