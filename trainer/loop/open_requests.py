"""Every change that the trainer makes to the open requests of its run, one at a time.

The order matters: a sweep in the middle of an enqueue would take the half-enqueued request for a lost one.
A request that was answered already is never withdrawn: its trajectory is on the stream, and arrives as late.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from arq.connections import ArqRedis

from pipeline import queue, request_store
from pipeline.message import MalformedMessage
from pipeline.request import RolloutRequest
from trainer.records.episodes import OutstandingRequest
from trainer.rollouts.dispatch import Dispatcher
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.heldout import evaluation_of
from trainer.rollouts.ledger import Ledger
from trainer.rollouts.sweep import sweep


class HeldOutRequests(Protocol):
    """The requests of the held-out evaluation that may be under way."""

    @property
    def outstanding(self) -> Sequence[OutstandingRequest]: ...

    async def send(self) -> None: ...


class OpenRequests:
    """The open requests of one run. Every method may be called again after Redis was away."""

    def __init__(
        self,
        redis: ArqRedis,
        run_id: str,
        *,
        book: GroupBook,
        ledger: Ledger,
        dispatcher: Dispatcher,
        heldout: HeldOutRequests,
    ) -> None:
        self._redis = redis
        self._run_id = run_id
        self._book = book
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._heldout = heldout
        self._turn = asyncio.Lock()

    async def enqueue_groups(self, num_groups: int, *, version: int) -> None:
        """Enqueue what is to be refilled, then the next `num_groups` groups of the task order."""
        async with self._turn:
            await self._dispatcher.open_groups(num_groups, version=version)

    async def enqueue_evaluation(self) -> None:
        async with self._turn:
            await self._heldout.send()

    async def sweep(self) -> int:
        """Enqueue lost requests again; returns how many."""
        async with self._turn:
            outstanding = (*self._book.outstanding, *self._heldout.outstanding)
            return len(await sweep(self._redis, self._run_id, outstanding))

    async def withdraw_surplus(self) -> None:
        """Withdraw what groups that have left the book still waited for."""
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
        """Settle groups that no step will use, and withdraw every open request of training. An evaluation may still be under way."""
        for group in self._book.withdraw():
            self._ledger.close_group(group, {number: "withdrawn" for number in group.members})
        await self.withdraw_surplus()
        async with self._turn:
            await self._withdraw(
                [request for request in await self.unsettled() if request.purpose == "train"]
            )

    async def withdraw_evaluations(self) -> None:
        """Withdraw what an evaluation that a crash interrupted had enqueued: it starts over as a whole."""
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
