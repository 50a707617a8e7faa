"""Taking a run up where its checkpoint left it, or where it never got to one: the same for a new run, which
owes nothing.

In order: what the checkpoint holds is acknowledged, what was delivered and not settled is taken in again,
what is owed is expected, and what a crash kept from being asked for, or Redis has lost, is asked for.
"""

from pipeline import queue, stream
from trainer.evaluation import evaluation_of
from trainer.journal import withdrawn_row
from trainer.ledger import LedgerState
from trainer.parts import Parts


async def recover(parts: Parts, run_id: str, state: LedgerState) -> None:
    """Bring the books to where `state` left them, and take in what was delivered since. Before anything is
    published.
    """
    await stream.open_reader(parts.redis, run_id)
    await stream.acknowledge(parts.redis, run_id, list(state.pending))
    await _withdraw_evaluations(parts, run_id)
    parts.dispatcher.cursor = state.cursor
    await parts.intake.recover()


async def adopt(parts: Parts, run_id: str, group_size: int, *, version: int) -> None:
    """Expect every group asked for and not settled; ask for its members that nobody owes us."""
    owed: dict[int, set[int]] = {}
    for request_id in await queue.open_ids(parts.redis, run_id):
        request = await queue.stored_request(parts.redis, request_id)
        if request is not None and not parts.ledger.is_closed(request.cursor):
            parts.book.expect(request.cursor, size=request.group_size, version=request.version_at_enqueue)
            owed.setdefault(request.cursor, set()).add(request.member)
    dispatcher = parts.dispatcher
    dispatcher.cursor = max(dispatcher.cursor, parts.book.end, parts.ledger.end)
    for cursor in parts.ledger.open_cursors(dispatcher.cursor):
        known = owed.get(cursor, set())
        missing = [m for m in range(group_size) if m not in known and parts.book.find(cursor, m) is None]
        if missing:
            await dispatcher.complete_group(cursor, missing, version=version)


async def _withdraw_evaluations(parts: Parts, run_id: str) -> None:
    """An evaluation that a crash cut short starts over: no version is judged by a mix of two tries."""
    for request_id in await queue.open_ids(parts.redis, run_id):
        request = await queue.stored_request(parts.redis, request_id)
        if request is not None and request.purpose == "eval":
            await queue.withdraw(parts.redis, run_id, [request_id])
            parts.journal.append(withdrawn_row(request, evaluation=evaluation_of(request.group_id)))
