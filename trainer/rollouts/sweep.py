"""Finding open requests that Redis has lost or that no worker can read: the same for a run and a standalone evaluation."""

from collections.abc import Iterable

from arq.connections import ArqRedis

from pipeline import deadletters, queue, stream
from trainer.records.episodes import OutstandingRequest, failed_head


async def sweep(redis: ArqRedis, run_id: str, outstanding: Iterable[OutstandingRequest]) -> list[str]:
    """Enqueue lost requests again; returns their ids. Fail those of `outstanding` that were dead-lettered as unreadable.

    Nothing may be enqueued meanwhile: a half-enqueued request looks like a lost one.
    """
    requeued = await queue.sweep(redis, run_id)
    await fail_unreadable(redis, run_id, outstanding)
    return requeued


async def fail_unreadable(redis: ArqRedis, run_id: str, outstanding: Iterable[OutstandingRequest]) -> None:
    """Publish a failed trajectory for each request that no worker can read, so that nobody waits for it."""
    dead = set(await deadletters.unanswered(redis, run_id))
    for request in outstanding:
        if request.request_id in dead:
            await stream.publish_unreadable(redis, failed_head(run_id, request))
