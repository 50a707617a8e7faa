"""The open requests of a run, which the trainer changes one at a time, and reconciles with Redis.

The order matters: a sweep in the middle of an enqueue would mistake the half-enqueued request for a lost one. A request that was
answered already is never withdrawn: its trajectory is on the stream, and arrives as late.

Recovery comes at the start of a run, whether new or resumed, and after Redis lost something. At a start, in order: acknowledge
what the checkpoint holds, expect what is open, take in what was delivered and not settled, enqueue what is missing. A new run
goes through the same steps, with nothing to do in them.
"""

import asyncio
from collections.abc import Iterable, Sequence

from arq.connections import ArqRedis

from pipeline import deadletters, queue, request_store, stream
from pipeline.message import MalformedMessage
from pipeline.request import RolloutRequest
from pipeline.tokenizer import put_tokenizer
from trainer.inputs import Inputs
from trainer.records.journal_writer import OutstandingRequest, failed_head
from trainer.rollouts.books import Books
from trainer.rollouts.heldout import evaluation_of
from trainer.rollouts.intake import RunStreams
from trainer.rollouts.ledger import LedgerState


class OpenRequests:
    """The open requests of one run. Every method may be called again after Redis was unavailable."""

    def __init__(self, books: Books) -> None:
        self._redis = books.redis
        self._run_id = books.run_id
        self._book = books.groups
        self._ledger = books.ledger
        self._dispatcher = books.dispatcher
        self._heldout = books.heldout
        self._turn = asyncio.Lock()

    async def enqueue_groups(self, num_groups: int, *, version: int) -> None:
        """Enqueue replacements for members that groups lack, then the next `num_groups` groups of the task order."""
        async with self._turn:
            await self._dispatcher.open_groups(num_groups, version=version)

    async def enqueue_evaluation(self) -> None:
        async with self._turn:
            await self._heldout.send()

    async def replace_forgotten_evaluation(self) -> int:
        """Enqueue again the requests that the current evaluation waits for and that Redis has lost; returns how many."""
        async with self._turn:
            if not self._heldout.outstanding:
                return 0
            num_forgotten = self._heldout.replace(set(await queue.open_ids(self._redis, self._run_id)))
            await self._heldout.send()
            return num_forgotten

    async def sweep(self) -> int:
        """Enqueues lost requests again; returns their number."""
        async with self._turn:
            outstanding = (*self._book.outstanding, *self._heldout.outstanding)
            return len(await sweep(self._redis, self._run_id, outstanding))

    async def withdraw_surplus(self) -> None:
        """Withdraws the outstanding requests of groups that have left the book."""
        async with self._turn:
            surplus = dict(self._book.surplus)
            if not surplus:
                return
            self._dispatcher.give_up(surplus)
            for request_id in await queue.withdraw(self._redis, self._run_id, list(surplus)):
                self._ledger.withdraw(surplus[request_id])
            for request_id in surplus:
                del self._book.surplus[request_id]

    async def withdraw_training(self) -> None:
        """Settles groups that no step will use, and withdraws every open request of training. An evaluation may still be running."""
        for group in self._book.withdraw():
            self._ledger.close_group(group, {number: "withdrawn" for number in group.members})
        await self.withdraw_surplus()
        async with self._turn:
            await self._withdraw(
                [request for request in await self.unsettled() if request.purpose == "train"]
            )

    async def withdraw_evaluations(self) -> None:
        """Withdraws the requests of an evaluation that a crash interrupted: it starts over as a whole."""
        async with self._turn:
            await self._withdraw([request for request in await self.unsettled() if request.purpose == "eval"])

    async def unsettled(self) -> list[RolloutRequest]:
        """Open requests that are not settled, answered ones included, oldest first. Unreadable ones are left out."""
        settled = self._ledger.pending_ids
        found: list[RolloutRequest] = []
        for request_id in await queue.open_ids(self._redis, self._run_id):
            if request_id in settled:
                continue
            try:
                request = await request_store.read(self._redis, request_id)
            except MalformedMessage:
                continue
            found += [request] if request is not None else []
        return found

    async def _withdraw(self, requests: Sequence[RolloutRequest]) -> None:
        by_id = {request.id: request for request in requests}
        for request_id in await queue.withdraw(self._redis, self._run_id, list(by_id)):
            request = by_id[request_id]
            name = evaluation_of(request.group_id) if request.purpose == "eval" else ""
            self._ledger.withdraw(OutstandingRequest.of(request), evaluation=name)


class RunRecovery:
    """The recovery of one run. Every method may be called again after Redis was unavailable."""

    def __init__(self, books: Books, streams: RunStreams, requests: OpenRequests) -> None:
        self._books = books
        self._streams = streams
        self._requests = requests

    async def restore(self, state: LedgerState) -> None:
        """Restores the books to the state `state`, then accepts what was delivered since. Call this before publishing."""
        await self._streams.open()
        await self._streams.acknowledge(state)
        await self._requests.withdraw_evaluations()
        self._books.dispatcher.cursor = state.cursor
        await self._expect_open_groups()
        await self._streams.recover()
        await self._books.judging.requests.withdraw_strangers()
        await self._books.judging.requests.send()

    async def enqueue_missing(self, *, version: int) -> None:
        """Re-enqueue missing members of open groups that have no outstanding request."""
        dispatcher = self._books.dispatcher
        self._books.closer.drop_quarantined()
        dispatcher.cursor = max(dispatcher.cursor, self._books.groups.end, self._books.ledger.end)
        for cursor in self._books.ledger.open_cursors(dispatcher.cursor):
            for member in self._books.groups.missing(cursor):
                dispatcher.refill(cursor, member)
        await self._requests.enqueue_groups(0, version=version)

    async def reopen(self) -> bool:
        """Creates again what every request of the run needs in a Redis that has lost the run; returns False if it has not lost it."""
        await announce(self._books.redis, self._books.inputs)
        return await self._streams.open()

    async def replace_forgotten(self) -> int:
        """Enqueues requests again that Redis has lost; returns their number. A Redis that was killed loses its last second or two, which
        had not reached its disk; one without an append-only file loses everything.
        """
        # The look-up comes first: requests enqueued during it are then not forgotten.
        sent = [
            one
            for one in self._books.groups.outstanding
            if not self._books.dispatcher.has_yet_to_send(one.request_id)
        ]
        known = set(await queue.open_ids(self._books.redis, self._books.run_id))
        waiting = {one.request_id for one in self._books.groups.outstanding}
        forgotten = [one for one in sent if one.request_id in waiting and one.request_id not in known]
        for outstanding in forgotten:
            self._books.ledger.withdraw(outstanding)
            self._books.groups.forget(outstanding.cursor, outstanding.member)
            self._books.dispatcher.refill(outstanding.cursor, outstanding.member)
        num_heldout = await self._requests.replace_forgotten_evaluation()
        return len(forgotten) + num_heldout + await self._books.judging.requests.replace_forgotten()

    async def _expect_open_groups(self) -> None:
        """Expects every group that has an open request. If there are two requests for one member, the later one counts."""
        for request in await self._requests.unsettled():
            if request.purpose != "train":
                continue
            outstanding = OutstandingRequest.of(request)
            if self._books.ledger.is_closed(request.cursor):
                self._books.groups.surplus[request.id] = outstanding
                continue
            group = self._books.groups.expect(
                request.cursor,
                size=request.group_size,
                version=request.version_at_enqueue,
                task_id=request.task.id,
            )
            group.enqueued_at = request.group_asked_at or request.enqueued_at
            self._books.groups.expect_request(outstanding)


async def announce(redis: ArqRedis, inputs: Inputs) -> None:
    """Stores in Redis what all requests of the run refer to: the tokenizers of policy and judge."""
    await put_tokenizer(redis, inputs.tokenizer)
    if inputs.judge is not None:
        await inputs.judge.announced(redis)


async def sweep(redis: ArqRedis, run_id: str, outstanding: Iterable[OutstandingRequest]) -> list[str]:
    """Enqueue lost requests again; returns their ids. Publishes failures for those of `outstanding` that were dead-lettered as unreadable.

    Nothing may be enqueued at the same time: a half-enqueued request looks like a lost one.
    """
    requeued = await queue.sweep(redis, run_id)
    await fail_unreadable(redis, run_id, outstanding)
    return requeued


async def fail_unreadable(redis: ArqRedis, run_id: str, outstanding: Iterable[OutstandingRequest]) -> None:
    """Publishes a failed trajectory for each request that no worker can read, so that nothing waits for it."""
    dead = set(await deadletters.unanswered(redis, run_id))
    for request in outstanding:
        if request.request_id in dead:
            await stream.publish_unreadable(redis, failed_head(run_id, request))
