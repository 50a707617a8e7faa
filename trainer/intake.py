"""Answers in: reads the stream, drops what came twice, loads bodies, and hands each trajectory to its group
or its evaluation.

First what was delivered before and never acknowledged, then what is new. Every entry ends settled in the
ledger, whatever it holds.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from redis.asyncio import Redis

from pipeline import keys, stream
from pipeline.message import MalformedMessage
from pipeline.stream import Delivery
from pipeline.trajectory import TrajectoryHead
from trainer.batch import Sample
from trainer.evaluation import evaluation_of
from trainer.groups import Group, GroupBook, Member, cursor_of
from trainer.ledger import Ledger
from trainer.samples import samples_of

log = logging.getLogger("swerve.trainer")

READ_AT_ONCE = 64


class Intake:
    """The learner's side of the stream. One at a time for a run."""

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        *,
        book: GroupBook,
        ledger: Ledger,
        vocab_size: int,
        max_tokens: int,
        evaluate: Callable[[Delivery], bool],
    ) -> None:
        """`evaluate` is offered every answer to an evaluation, and says whether one under way was waiting
        for it.
        """
        self._redis = redis
        self._run_id = run_id
        self._book = book
        self._ledger = ledger
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._evaluate = evaluate
        self._held_entries: set[str] = set()
        self.num_arrived = 0
        self.num_refused = 0
        self.last_failed = ""  # request id

    async def recover(self) -> int:
        """Take in what was delivered before and not acknowledged; returns how many entries. Entries already
        held are passed over.
        """
        await stream.open_reader(self._redis, self._run_id)
        deliveries = await stream.read_unacknowledged(self._redis, self._run_id)
        fresh = [delivery for delivery in deliveries if delivery.entry_id not in self._held_entries]
        for delivery in fresh:
            await self._accept(delivery)
        return len(fresh)

    async def read(self, *, block_ms: int) -> int:
        """Take in what is new, waiting up to `block_ms` for it; returns how many entries."""
        deliveries = await stream.read_new(self._redis, self._run_id, count=READ_AT_ONCE, block_ms=block_ms)
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
        if self._ledger.is_closed(cursor):
            await self._drop_late(delivery, cursor=cursor)
            return
        held = self._book.find(cursor, head.member)
        if held is not None and not _replaces(head, held.head):
            log.warning("%s came twice; the second copy is dropped", head.request_id)
            held.entries.append(delivery.entry_id)
            return
        if head.reward is None:
            self.last_failed = head.request_id
        samples, fault = await self._samples(head)
        entries = [*(held.entries if held else []), delivery.entry_id]
        group = self._book.hold(cursor, Member(head=head, samples=samples, entries=entries, fault=fault))
        self.num_arrived += 1
        if group is not None:
            self._close(group)

    async def _drop_late(self, delivery: Delivery, *, cursor: int = -1) -> None:
        """Nobody waits for it: its group is settled. A second copy of the one publication leaves no row."""
        head = delivery.head
        published = await self._redis.get(keys.published(head.request_id))
        if published is not None and published.decode() != delivery.entry_id:
            log.warning("%s came again as a copy; dropped", head.request_id)
            self._ledger.release(head, [delivery.entry_id])
        else:
            log.warning("%s arrived after its group was settled; dropped", head.request_id)
            name = evaluation_of(head.group_id) if head.purpose == "eval" else ""
            self._ledger.settle(head, [delivery.entry_id], "late", cursor=cursor, evaluation=name)

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

    def _close(self, group: Group) -> None:
        verdict = self._book.verdict(group)
        if verdict == "trained":
            self._ledger.note_signal()
        else:
            self._ledger.drop_group(group, verdict)


def _replaces(new: TrajectoryHead, old: TrajectoryHead) -> bool:
    """A dead request that a person requeued may still make its group whole."""
    return old.reward is None and new.reward is not None
