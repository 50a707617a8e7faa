"""Asking for something no longer: the request goes from Redis, a row in the journal says so.

What has been answered already is left alone: it is on the stream, and arrives when nobody waits for it any more.
"""

from pipeline import queue, request_store
from pipeline.message import MalformedMessage
from pipeline.request import RolloutRequest
from trainer.loop.parts import Parts
from trainer.records.journal import Asked
from trainer.rollouts.heldout import evaluation_of


async def withdraw_surplus(parts: Parts, run_id: str) -> None:
    """What groups that have left the book were still waiting for. One caller at a time; after a broken connection,
    the next call sees to it.
    """
    surplus = dict(parts.book.surplus)
    if not surplus:
        return
    parts.dispatcher.give_up(surplus)
    for request_id in await queue.withdraw(parts.redis, run_id, list(surplus)):
        parts.ledger.withdraw(surplus[request_id])
    for request_id in surplus:
        del parts.book.surplus[request_id]


async def withdraw_rest(parts: Parts, run_id: str) -> None:
    """Groups that no step will use, and everything else that is still asked for."""
    for group in parts.book.withdraw():
        parts.ledger.close_group(group, {number: "withdrawn" for number in group.members})
    await withdraw_surplus(parts, run_id)
    await _withdraw(parts, run_id, await owed_requests(parts, run_id))


async def withdraw_evaluations(parts: Parts, run_id: str) -> None:
    """An evaluation that a crash cut short starts over: no version is judged by a mix of two tries."""
    owed = await owed_requests(parts, run_id)
    await _withdraw(parts, run_id, [request for request in owed if request.purpose == "eval"])


async def owed_requests(parts: Parts, run_id: str) -> list[RolloutRequest]:
    """Requests that are owed, whether answered or not, and not settled, in the order they were asked for; without
    those that nobody can read, which no worker can either.
    """
    settled = parts.ledger.pending_ids
    found: list[RolloutRequest] = []
    for request_id in await queue.open_ids(parts.redis, run_id):
        if request_id in settled:
            continue
        try:
            request = await request_store.read(parts.redis, request_id)
        except MalformedMessage:
            continue
        found += [request] if request is not None else []
    return found


async def _withdraw(parts: Parts, run_id: str, requests: list[RolloutRequest]) -> None:
    by_id = {request.id: request for request in requests}
    for request_id in await queue.withdraw(parts.redis, run_id, list(by_id)):
        request = by_id[request_id]
        name = evaluation_of(request.group_id) if request.purpose == "eval" else ""
        parts.ledger.withdraw(Asked.of(request), evaluation=name)
