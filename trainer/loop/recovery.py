"""Bringing the books of a run in line with Redis: at its start, whether new or resumed, and after Redis lost something.

At a start, in order: acknowledge what the checkpoint holds, expect what is open, take in what was delivered and not settled,
enqueue what is missing. A new run goes through the same steps, with nothing to do in them.
"""

from arq.connections import ArqRedis

from pipeline import queue
from trainer.loop.open_requests import OpenRequests
from trainer.records.episodes import OutstandingRequest
from trainer.rollouts.closing import GroupCloser
from trainer.rollouts.dispatch import Dispatcher
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.judge_requests import JudgeRequests
from trainer.rollouts.ledger import Ledger, LedgerState
from trainer.rollouts.run_streams import RunStreams


class RunRecovery:
    """Of one run. Every method may be called again after Redis was away."""

    def __init__(
        self,
        redis: ArqRedis,
        run_id: str,
        *,
        book: GroupBook,
        ledger: Ledger,
        dispatcher: Dispatcher,
        streams: RunStreams,
        closer: GroupCloser,
        requests: OpenRequests,
        judging: JudgeRequests,
    ) -> None:
        self._redis = redis
        self._run_id = run_id
        self._book = book
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._streams = streams
        self._closer = closer
        self._requests = requests
        self._judging = judging

    async def restore(self, state: LedgerState) -> None:
        """Bring the books to where `state` left them, then take in what was delivered since. Call before publishing."""
        await self._streams.open()
        await self._streams.acknowledge(state)
        await self._requests.withdraw_evaluations()
        self._dispatcher.cursor = state.cursor
        await self._expect_open_groups()
        await self._streams.recover()
        await self._judging.withdraw_strangers()
        await self._judging.send()

    async def enqueue_missing(self, group_size: int, *, version: int) -> None:
        """Re-enqueue missing members of open groups that have no outstanding request."""
        dispatcher = self._dispatcher
        self._closer.drop_quarantined()
        dispatcher.cursor = max(dispatcher.cursor, self._book.end, self._ledger.end)
        for cursor in self._ledger.open_cursors(dispatcher.cursor):
            for member in self._book.missing(cursor, size=group_size):
                dispatcher.refill(cursor, member)
        await self._requests.enqueue_groups(0, version=version)

    async def replace_forgotten(self) -> int:
        """Have requests enqueued anew that Redis has forgotten; returns how many. A Redis that was killed may lose its
        last second or two, which had not reached its disk.
        """
        known = set(await queue.open_ids(self._redis, self._run_id))
        forgotten = [
            outstanding
            for outstanding in self._book.outstanding
            if outstanding.request_id not in known
            and not self._dispatcher.has_yet_to_send(outstanding.request_id)
        ]
        for outstanding in forgotten:
            self._ledger.withdraw(outstanding)
            self._book.forget(outstanding.cursor, outstanding.member)
            self._dispatcher.refill(outstanding.cursor, outstanding.member)
        return len(forgotten) + await self._judging.replace_forgotten()

    async def _expect_open_groups(self) -> None:
        """Expect every group that has an open request. Of two requests for one member, the later counts."""
        for request in await self._requests.unsettled():
            if request.purpose != "train":
                continue
            outstanding = OutstandingRequest.of(request)
            if self._ledger.is_closed(request.cursor):
                self._book.surplus[request.id] = outstanding
                continue
            group = self._book.expect(
                request.cursor,
                size=request.group_size,
                version=request.version_at_enqueue,
                task_id=request.task.id,
            )
            group.enqueued_at = request.group_asked_at or request.enqueued_at
            self._book.expect_request(outstanding)
