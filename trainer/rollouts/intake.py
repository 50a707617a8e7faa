"""Answers in: reads the stream, drops what came twice, loads bodies, and hands each trajectory to its group
or its evaluation.

First what was delivered before and never acknowledged, then what is new. Every entry ends settled in the
ledger, whatever it holds.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from redis.asyncio import Redis

from pipeline import deadletters, keys, stream
from pipeline.errors import FailureClass
from pipeline.message import MalformedMessage
from pipeline.stream import Delivery
from pipeline.trajectory import Failed, TrajectoryHead
from trainer.batching.batch import Sample
from trainer.batching.samples import samples_of
from trainer.rollouts.groups import Group, GroupBook, Member, cursor_of
from trainer.rollouts.heldout import evaluation_of
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.quarantine import GRADER_FAILED, Quarantine

log = logging.getLogger("swerve.trainer")

READ_AT_ONCE = 64
REFILLED: tuple[FailureClass, ...] = ("infrastructure", "grader")
"""Failures that say nothing about the policy or the task: the member is asked for once more."""


class Intake:
    """The learner's side of the stream. One at a time for a run."""

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        *,
        book: GroupBook,
        ledger: Ledger,
        quarantine: Quarantine,
        vocab_size: int,
        max_tokens: int,
        max_refills: int,
        refill: Callable[[int, int], None],
        evaluate: Callable[[Delivery], bool],
    ) -> None:
        """`evaluate` is offered every answer to an evaluation, and says whether one under way was waiting
        for it. `refill` is to ask for a member of the group at a cursor once more, which happens to at most
        `max_refills` members of a group.
        """
        self._redis = redis
        self._run_id = run_id
        self._book = book
        self._ledger = ledger
        self._quarantine = quarantine
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._max_refills = max_refills
        self._refill = refill
        self._evaluate = evaluate
        self._turn = asyncio.Lock()
        self._held_entries: set[str] = set()
        self.num_arrived = 0
        self.num_refused = 0
        self.last_failed = ""  # request id

    async def recover(self) -> int:
        """Take in what was delivered before and not acknowledged; returns how many entries. Entries already
        held are passed over.
        """
        async with self._turn:
            await stream.open_reader(self._redis, self._run_id)
            deliveries = await stream.read_unacknowledged(self._redis, self._run_id)
            fresh = [delivery for delivery in deliveries if delivery.entry_id not in self._held_entries]
            for delivery in fresh:
                await self._accept(delivery)
            return len(fresh)

    async def read(self, *, block_ms: int) -> int:
        """Take in what is new, waiting up to `block_ms` for it; returns how many entries."""
        async with self._turn:
            deliveries = await stream.read_new(
                self._redis, self._run_id, count=READ_AT_ONCE, block_ms=block_ms
            )
            for delivery in deliveries:
                await self._accept(delivery)
            return len(deliveries)

    async def _accept(self, delivery: Delivery) -> None:
        head = delivery.head
        if head.purpose == "eval":
            self._held_entries.add(delivery.entry_id)
            if not self._evaluate(delivery):
                await self._drop_late(delivery)
            return
        try:
            cursor = cursor_of(head.group_id)
        except ValueError as error:
            log.error("%s refused: %s", head.request_id, error)
            self._held_entries.add(delivery.entry_id)
            self._ledger.settle(head, [delivery.entry_id], "refused")
            return
        await self._accept_member(cursor, delivery)
        self._held_entries.add(delivery.entry_id)

    async def _accept_member(self, cursor: int, delivery: Delivery) -> None:
        head = delivery.head
        held = self._book.find(cursor, head.member)
        if held is not None and held.head.request_id == head.request_id and not _replaces(head, held.head):
            log.warning("%s came twice; the second copy is dropped", head.request_id)
            held.entries.append(delivery.entry_id)
            return
        if self._has_no_use(cursor, head):
            await self._drop_late(delivery, cursor=cursor)
            return
        await self._judge_grader(head)
        if head.reward is None:
            self.last_failed = head.request_id
            if await self._may_refill(cursor, head):
                self._book.forget(cursor, head.member)
                self._ledger.refill(head, [delivery.entry_id], cursor=cursor)
                self._refill(cursor, head.member)
                return
        samples, fault = await self._samples(head)
        if self._has_no_use(cursor, head):
            await self._drop_late(delivery, cursor=cursor)
            return
        self._hold(cursor, Member(head=head, samples=samples, entries=[delivery.entry_id], fault=fault))

    def _has_no_use(self, cursor: int, head: TrajectoryHead) -> bool:
        """Whether its group went on without it, or another request has taken its place."""
        if self._ledger.is_closed(cursor) or self._book.has_taken(cursor):
            return True
        held = self._book.find(cursor, head.member)
        if held is not None:
            return not _replaces(head, held.head)
        return head.reward is None and not self._book.awaits(cursor, head)

    def _hold(self, cursor: int, member: Member) -> None:
        held = self._book.find(cursor, member.head.member)
        if held is not None and held.head.request_id == member.head.request_id:
            member.entries[:0] = held.entries
        elif held is not None:
            self._ledger.settle(held.head, held.entries, "failed", cursor=cursor)
        group = self._book.hold(cursor, member)
        self.num_arrived += 1
        if member.head.task_id in self._quarantine:
            self.drop_quarantined()
        elif group is not None:
            self.close(group)

    async def _may_refill(self, cursor: int, head: TrajectoryHead) -> bool:
        """Whether to ask once more for a member that came to nothing through no fault of policy or task."""
        if self._ledger.num_refills(cursor) >= self._max_refills or head.task_id in self._quarantine:
            return False
        letter = await deadletters.find(self._redis, self._run_id, head.request_id)
        return letter is not None and letter.kind in REFILLED

    def drop_quarantined(self) -> None:
        """Settle every live group of a task in quarantine, untrained."""
        for task_id in self._quarantine:
            for group in self._book.withdraw_task(task_id):
                self._ledger.close_group(group, group.fates("quarantined"))

    async def _judge_grader(self, head: TrajectoryHead) -> None:
        reason = self._quarantine.notice(head)
        if not reason:
            return
        if head.outcome == GRADER_FAILED:
            reason += await self._last_words(head)
        self._quarantine.put(head.task_id, reason, request_id=head.request_id)

    async def _last_words(self, head: TrajectoryHead) -> str:
        try:
            trajectory = await stream.read_body(self._redis, head.request_id)
        except MalformedMessage:
            return ""
        outcome = trajectory.outcome if trajectory else None
        return f", the last time with: {outcome.message}" if isinstance(outcome, Failed) else ""

    async def _drop_late(self, delivery: Delivery, *, cursor: int = -1) -> None:
        """Nobody waits for it any more. A second copy of the one publication leaves no row."""
        head = delivery.head
        published = await self._redis.get(keys.published(head.request_id))
        if published is not None and published.decode() != delivery.entry_id:
            log.warning("%s came again as a copy; dropped", head.request_id)
            self._ledger.release(head, [delivery.entry_id])
        else:
            log.warning("%s arrived when nobody waited for it any more; dropped", head.request_id)
            name = evaluation_of(head.group_id) if head.purpose == "eval" else ""
            fate = "failed" if head.reward is None else "late"
            self._ledger.settle(head, [delivery.entry_id], fate, cursor=cursor, evaluation=name)

    def forget(self, acknowledged: Iterable[tuple[str, str]]) -> None:
        """These (stream entry, request id) pairs will not be delivered again."""
        self._held_entries.difference_update(entry for entry, _ in acknowledged)

    async def _samples(self, head: TrajectoryHead) -> tuple[tuple[Sample, ...], str]:
        """The samples, or why there are none. Without a reward nothing is trained, so nothing is loaded."""
        if head.reward is None:
            return (), ""
        try:
            trajectory = await stream.read_body(self._redis, head.request_id)
            if trajectory is None:
                raise ValueError("its body is not in Redis")
            made = await asyncio.to_thread(
                samples_of, trajectory, vocab_size=self._vocab_size, max_tokens=self._max_tokens
            )
        except (MalformedMessage, ValueError) as error:
            self.num_refused += 1
            log.error("%s refused at the learner's door: %s", head.request_id, error)
            return (), str(error)
        return made, ""

    def close(self, group: Group) -> None:
        """Judge a group that is complete, or whose time is up: it becomes ready, or is settled untrained."""
        verdict = self._book.verdict(group)
        if verdict == "trained":
            self._ledger.note_signal()
        else:
            self._ledger.drop_group(group, verdict)


def _replaces(new: TrajectoryHead, old: TrajectoryHead) -> bool:
    """A dead request that a person requeued may still make its group whole."""
    return old.reward is None and new.reward is not None
