"""Forgetting a run: every key of it and of its requests is deleted.

What runs share stays: tokenizers (other runs may use the same), workers, the queue itself. A worker that still runs one
of the requests loses its lease at the next renewal and publishes nothing.
"""

from collections.abc import Sequence

from redis.asyncio import Redis

from pipeline import keys, stream
from pipeline.commands import chunks, command
from pipeline.kinds import KINDS, AnyKind
from pipeline.message import Message


class Forgotten(Message, frozen=True, kw_only=True):
    """What was deleted."""

    run_id: str
    num_requests: int
    num_keys: int


async def forget(redis: Redis, run_id: str, kinds: Sequence[AnyKind] = KINDS) -> Forgotten:
    """Delete the run. Its name goes last, so that an interrupted call can be repeated."""
    num_requests = num_keys = 0
    for kind in kinds:
        request_ids = sorted(await _request_ids(redis, run_id, kind))
        num_requests += len(request_ids)
        for some in chunks(request_ids):
            num_keys += await _delete_requests(redis, some, kind)
        num_keys += await redis.unlink(*_of_run(run_id, kind))
    num_keys += await redis.unlink(keys.weights(run_id), keys.served(run_id), keys.run_status(run_id))
    await command(redis, "SREM", keys.runs(), run_id)
    return Forgotten(run_id=run_id, num_requests=num_requests, num_keys=num_keys)


async def _request_ids(redis: Redis, run_id: str, kind: AnyKind) -> set[str]:
    """Every request of the run that any key names."""
    enqueued: list[bytes] = await command(redis, "ZRANGE", keys.requests(run_id, kind), 0, -1)
    outstanding: list[bytes] = await command(redis, "ZRANGE", keys.open_requests(run_id, kind), 0, -1)
    dead: list[bytes] = await command(redis, "HKEYS", keys.dead(run_id, kind))
    bodies: list[bytes] = await command(redis, "HKEYS", keys.unacknowledged_bytes(run_id, kind))
    kept: list[bytes] = await command(redis, "LRANGE", keys.kept(run_id, kind), 0, -1)
    names = {*enqueued, *outstanding, *dead, *bodies} - {b"", b"kept"}
    names |= {row.partition(b":")[2] for row in kept}
    heads = {delivery.head.request_id async for delivery in stream.heads_backwards(redis, run_id, kind)}
    return {name.decode(errors="replace") for name in names} | heads


async def _delete_requests(redis: Redis, request_ids: Sequence[str], kind: AnyKind) -> int:
    """Out of the queue first, so that no worker takes one of which half is gone."""
    await command(redis, "ZREM", keys.queue(kind), *request_ids)
    names = [name for one in request_ids for name in _of_request(one, kind)]
    return await redis.unlink(*names)


def _of_request(request_id: str, kind: AnyKind) -> tuple[str, ...]:
    of_kind = (
        *(keys.request, keys.image, keys.claims, keys.lease, keys.failures),
        *(keys.events, keys.published, keys.body),
    )
    return (
        *(key(request_id, kind) for key in of_kind),
        keys.arq_job(request_id),
        keys.arq_retry(request_id),
    )


def _of_run(run_id: str, kind: AnyKind) -> tuple[str, ...]:
    of_kind = (
        *(keys.requests, keys.open_requests, keys.dead, keys.unacknowledged_bytes),
        *(keys.kept, keys.malformed, keys.stream),
    )
    return tuple(key(run_id, kind) for key in of_kind)
