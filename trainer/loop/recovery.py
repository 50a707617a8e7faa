"""Taking a run up where its checkpoint left it, or where it never got to one: the same for a new run, which
owes nothing.

In order: what the checkpoint holds is acknowledged, what is owed is expected, what was delivered and not settled is
taken in again, and what a crash kept from being asked for, or Redis has lost, is asked for.
"""

from collections.abc import Iterable

from arq.connections import ArqRedis

from pipeline import deadletters, queue, stream
from trainer.loop.parts import Parts
from trainer.loop.withdrawal import owed_requests, withdraw_evaluations
from trainer.records.journal import Asked, failed_head
from trainer.rollouts.ledger import LedgerState


async def recover(parts: Parts, run_id: str, state: LedgerState) -> None:
    """Bring the books to where `state` left them, and take in what was delivered since. Before anything is
    published.
    """
    await stream.open_reader(parts.redis, run_id)
    await stream.acknowledge(parts.redis, run_id, list(state.pending))
    await withdraw_evaluations(parts, run_id)
    parts.dispatcher.cursor = state.cursor
    await _expect(parts, run_id)
    await parts.intake.recover()


async def adopt(parts: Parts, group_size: int, *, version: int) -> None:
    """Ask for the members of unsettled groups that nobody owes us."""
    dispatcher = parts.dispatcher
    parts.intake.drop_quarantined()
    dispatcher.cursor = max(dispatcher.cursor, parts.book.end, parts.ledger.end)
    for cursor in parts.ledger.open_cursors(dispatcher.cursor):
        for member in parts.book.missing(cursor, size=group_size):
            dispatcher.refill(cursor, member)
    await dispatcher.open_groups(0, version=version)


async def ask_again(parts: Parts, run_id: str) -> int:
    """Have requests asked for anew that a Redis which was killed has forgotten: its last second or two may not have
    reached its disk. Returns how many. With nothing being asked for meanwhile.
    """
    owed = set(await queue.open_ids(parts.redis, run_id))
    forgotten = [
        asked
        for asked in parts.book.outstanding
        if asked.request_id not in owed and not parts.dispatcher.has_yet_to_send(asked.request_id)
    ]
    for asked in forgotten:
        parts.ledger.withdraw(asked)
        parts.book.forget(asked.cursor, asked.member)
        parts.dispatcher.refill(asked.cursor, asked.member)
    return len(forgotten)


async def answer_unreadable(redis: ArqRedis, run_id: str, outstanding: Iterable[Asked]) -> None:
    """Have those that died because no worker can read them answered as failed, so that nobody waits for them."""
    dead = set(await deadletters.unanswered(redis, run_id))
    for asked in outstanding:
        if asked.request_id in dead:
            await stream.publish_unreadable(redis, failed_head(run_id, asked))


async def _expect(parts: Parts, run_id: str) -> None:
    """Every group of which something is owed. Of two requests for one member, the later is the one that counts."""
    for request in await owed_requests(parts, run_id):
        if request.purpose != "train":
            continue
        asked = Asked.of(request)
        if parts.ledger.is_closed(request.cursor):
            parts.book.surplus[request.id] = asked
            continue
        group = parts.book.expect(
            request.cursor,
            size=request.group_size,
            version=request.version_at_enqueue,
            task_id=request.task.id,
        )
        group.asked_at = request.group_asked_at or request.enqueued_at
        parts.book.ask(asked)
