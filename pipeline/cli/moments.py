"""The events of a request, from Redis, or from the rollout in the run's directory where Redis has forgotten them."""

from collections.abc import Iterator
from dataclasses import dataclass

from redis.asyncio import Redis

from pipeline import events, keys, stream
from pipeline.cli.finding import FoundRollout
from pipeline.kinds import ROLLOUT, AnyKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An event of a request, of whichever kind."""

    at: float  # Unix seconds
    what: str
    attempt: int = 0
    worker: str = ""
    detail: str = ""
    kind: str = ROLLOUT.name


async def of_request(redis: Redis, run_id: str, request_id: str, kind: AnyKind) -> list[Moment]:
    """What Redis has recorded, in order. `run_id` is "" if it is not known."""
    found = [
        Moment(
            at=one.at,
            what=one.what,
            attempt=one.attempt,
            worker=one.worker,
            detail=one.detail,
            kind=kind.name,
        )
        for one in await events.events(redis, request_id, kind)
    ]
    return found + await _reading(redis, run_id, request_id, kind)


async def _reading(redis: Redis, run_id: str, request_id: str, kind: AnyKind) -> list[Moment]:
    """When it was delivered to the trainer. Redis knows this until it is acknowledged."""
    name = keys.stream(run_id, kind)
    entry = await redis.get(keys.published(request_id, kind))
    if entry is None or not run_id or not await redis.exists(name):
        return []
    if not await redis.xinfo_groups(name):
        return []
    at = await stream.delivered_at(redis, run_id, entry.decode(), kind)
    detail = f"entry {entry.decode()}"
    return [] if at is None else [Moment(at=at, what="read", detail=detail, kind=kind.name)]


def of_stored(found: FoundRollout) -> Iterator[Moment]:
    """What its head and its failures tell."""
    head = found.head
    assert head is not None, "what comes from a store has one"
    yield Moment(at=head.enqueued_at, what="enqueued")
    for failure in found.failures:
        yield Moment(
            at=failure.failed_at,
            what="failed",
            attempt=failure.attempt,
            worker=failure.worker,
            detail=f"{failure.boundary}: {failure.message}",
        )
    yield Moment(at=head.claimed_at, what="claimed", attempt=head.attempt, worker=head.worker)
    yield Moment(
        at=head.finished_at,
        what="dead-lettered" if found.state == "dead" else "published",
        attempt=head.attempt,
        worker=head.worker,
        detail=head.outcome,
    )
