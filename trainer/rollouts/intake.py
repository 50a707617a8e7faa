"""What becomes of each trajectory that arrives. Three stages: look up what Redis knows of it, decide, apply the decision.

There are five decisions. A trajectory belongs to the evaluation under way; or it joins its group; or it failed through no fault
of policy or task, and its member is enqueued again; or it repeats one that its group holds; or nobody waits for it, and it is
dropped. Whatever the decision, its stream entry ends up settled in the ledger.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, assert_never

from arq.connections import ArqRedis
from msgspec import structs

from pipeline import deadletters, keys, stream
from pipeline.errors import FailureClass
from pipeline.message import MalformedMessage
from pipeline.stream import Delivery
from pipeline.trajectory import Trajectory, TrajectoryHead
from trainer.batching.batch import Sample
from trainer.batching.provenance import AlteredReply
from trainer.records.journal import Fate
from trainer.records.stamps import EpisodeStamps
from trainer.rollouts.closing import GroupCloser
from trainer.rollouts.groups import GroupBook, cursor_of
from trainer.rollouts.heldout import evaluation_of
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.members import Member
from trainer.rollouts.quarantine import Quarantine

log = logging.getLogger("swerve.trainer")

REFILLED: tuple[FailureClass, ...] = ("infrastructure", "grader")
"""Failures that say nothing about the policy or the task: the member is enqueued once more."""


class HeldOutEpisodes(Protocol):
    """The held-out evaluation that may be under way."""

    def awaits(self, request_id: str) -> bool: ...

    def accept(self, delivery: Delivery) -> None: ...


@dataclass(frozen=True, slots=True)
class Findings:
    """What Redis knows of a trajectory beside its head, as far as the decision needs it."""

    samples: tuple[Sample, ...] = ()
    fault: str = ""  # why its tokens must not reach the learner
    is_altered: bool = False  # the fault: they are not what the engine sampled
    letter: deadletters.DeadLetter | None = None  # of a failed one
    is_copy: bool = False  # a second copy of a publication, under another entry


@dataclass(frozen=True, slots=True)
class Evaluate:
    """It belongs to the evaluation under way."""


@dataclass(frozen=True, slots=True)
class Join:
    """It joins its group as this member."""

    cursor: int
    member: Member


@dataclass(frozen=True, slots=True)
class Refill:
    """It failed through no fault of policy or task: its member is enqueued again."""

    cursor: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """It is a second copy of what its group holds: its entry is acknowledged with the first."""

    of: Member


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody waits for it. Settled with `fate`; without one, only acknowledged: it is a copy of what was settled."""

    why: str
    fate: Fate | None
    cursor: int = -1
    evaluation: str = ""


Decision = Evaluate | Join | Refill | Repeat | Drop


class Intake:
    """Of one run."""

    def __init__(
        self,
        redis: ArqRedis,
        *,
        book: GroupBook,
        ledger: Ledger,
        quarantine: Quarantine,
        closer: GroupCloser,
        heldout: HeldOutEpisodes,
        refill: Callable[[int, int], None],
        judge: Callable[[int, Member], None],
        samples_of: Callable[[Trajectory], tuple[Sample, ...]],
        max_refills: int,
    ) -> None:
        """`refill` has a member of the group at a cursor enqueued again, which happens to at most `max_refills` members of a
        group. `judge` is given each member that has joined the group at a cursor. `samples_of` raises ValueError for a trajectory
        whose tokens must not reach the learner.
        """
        self._redis = redis
        self._book = book
        self._ledger = ledger
        self._quarantine = quarantine
        self._closer = closer
        self._heldout = heldout
        self._refill = refill
        self._judge = judge
        self._samples_of = samples_of
        self._max_refills = max_refills
        self.num_arrived = 0
        self.num_refused = 0
        self.last_failed = ""  # request id

    async def accept(self, delivery: Delivery) -> None:
        """Decide what becomes of a trajectory, and do it. May be called again if Redis went away during the look-up."""
        findings = await self._look_up(delivery)
        self._apply(delivery, self._decide(delivery.head, findings))

    async def _look_up(self, delivery: Delivery) -> Findings:
        head = delivery.head
        cursor = _cursor(head)
        if not self._is_wanted(cursor, head):
            published: bytes | None = await self._redis.get(keys.published(head.request_id))
            return Findings(is_copy=published is not None and published.decode() != delivery.entry_id)
        if head.purpose == "eval" or self._is_held(cursor, head):
            return Findings()
        if head.reward is None:
            return Findings(letter=await deadletters.find(self._redis, head.run_id, head.request_id))
        return await self._load(head)

    async def _load(self, head: TrajectoryHead) -> Findings:
        """The samples of a graded trajectory, or what is wrong with it."""
        try:
            trajectory = await stream.read_body(self._redis, head.request_id)
            if trajectory is None:
                raise ValueError("its body is not in Redis")
            samples = await asyncio.to_thread(self._samples_of, trajectory)
        except (MalformedMessage, ValueError) as error:
            self.num_refused += 1
            log.error("%s rejected: invalid samples: %s", head.request_id, error)
            return Findings(fault=str(error), is_altered=isinstance(error, AlteredReply))
        return Findings(samples)

    def _decide(self, head: TrajectoryHead, findings: Findings) -> Decision:
        """From the books as they are now: while it looked them up, a step may have taken the group."""
        cursor = _cursor(head)
        if not self._is_wanted(cursor, head):
            return self._drop(cursor, head, findings)
        if head.purpose == "eval":
            return Evaluate()
        assert cursor is not None, "a head without a group is not wanted"
        held = self._book.find(cursor, head.member)
        if held is not None and self._is_held(cursor, head):
            return Repeat(held)
        self._quarantine.observe(head, findings.letter)
        if self._may_refill(cursor, head, findings):
            return Refill(cursor)
        member = Member(
            head, findings.samples, entries=[], fault=findings.fault, is_altered=findings.is_altered
        )
        return Join(cursor, member)

    def _drop(self, cursor: int | None, head: TrajectoryHead, findings: Findings) -> Drop:
        if findings.is_copy:
            return Drop("is a second copy", fate=None)
        fate: Fate = "failed" if head.reward is None else "late"
        if head.purpose == "eval":
            return Drop("arrived after its evaluation", fate, evaluation=evaluation_of(head.group_id))
        if cursor is None:
            return Drop(f"belongs to {head.group_id!r}, which is no group of a training run", "refused")
        return Drop("arrived when its group no longer waited for it", fate, cursor)

    def _apply(self, delivery: Delivery, decision: Decision) -> None:
        """The one place where a trajectory changes the books."""
        head, entries = delivery.head, [delivery.entry_id]
        stamps = EpisodeStamps(published_at=delivery.published_at, read_at=delivery.read_at)
        match decision:
            case Evaluate():
                self._heldout.accept(delivery)
            case Join(cursor, member):
                member.entries += entries
                member.stamps = structs.replace(stamps, joined_at=time.time())
                self._join(cursor, member)
            case Refill(cursor):
                self.last_failed = head.request_id
                self._book.forget(cursor, head.member)
                self._ledger.refill(head, entries, cursor=cursor, stamps=stamps)
                self._refill(cursor, head.member)
            case Repeat(member):
                log.warning("%s came twice; the second copy is dropped", head.request_id)
                member.entries += entries
            case Drop():
                log.warning("%s %s; dropped", head.request_id, decision.why)
                if decision.fate is None:
                    self._ledger.release(head, entries)
                else:
                    self._ledger.settle(
                        head,
                        entries,
                        decision.fate,
                        cursor=decision.cursor,
                        evaluation=decision.evaluation,
                        stamps=stamps,
                    )
            case _:
                assert_never(decision)

    def _join(self, cursor: int, member: Member) -> None:
        """Put the member into its group, in place of a failed one, and close the group if that completes it."""
        head = member.head
        if head.reward is None:
            self.last_failed = head.request_id
        replaced = self._book.find(cursor, head.member)
        if replaced is not None and replaced.head.request_id == head.request_id:
            member.entries[:0] = replaced.entries
        elif replaced is not None:
            self._ledger.settle(
                replaced.head, replaced.entries, "failed", cursor=cursor, stamps=replaced.stamps
            )
        group = self._book.hold(cursor, member)
        self.num_arrived += 1
        self._judge(cursor, member)
        if head.task_id in self._quarantine:
            self._closer.drop_quarantined()
        elif group is not None:
            self._closer.close(group)

    def _is_wanted(self, cursor: int | None, head: TrajectoryHead) -> bool:
        """Whether somebody waits for it, or holds the same trajectory already."""
        if head.purpose == "eval":
            return self._heldout.awaits(head.request_id)
        if cursor is None or self._ledger.is_closed(cursor) or self._book.has_taken(cursor):
            return False
        held = self._book.find(cursor, head.member)
        if held is None:
            return head.reward is not None or self._book.awaits(cursor, head)
        return held.head.request_id == head.request_id or _replaces(head, held.head)

    def _is_held(self, cursor: int | None, head: TrajectoryHead) -> bool:
        """Whether its group holds the very same trajectory."""
        held = None if cursor is None else self._book.find(cursor, head.member)
        return held is not None and held.head.request_id == head.request_id and not _replaces(head, held.head)

    def _may_refill(self, cursor: int, head: TrajectoryHead, findings: Findings) -> bool:
        """Whether it failed through no fault of policy or task, and its group has refills left."""
        return (
            head.reward is None
            and head.task_id not in self._quarantine
            and self._ledger.num_refills(cursor) < self._max_refills
            and findings.letter is not None
            and findings.letter.kind in REFILLED
        )


def _cursor(head: TrajectoryHead) -> int | None:
    """The place of its group in the task order; None of what is no training group."""
    try:
        return cursor_of(head.group_id)
    except ValueError:
        return None


def _replaces(new: TrajectoryHead, old: TrajectoryHead) -> bool:
    """A dead request that a person requeued may still complete its group."""
    return old.reward is None and new.reward is not None
