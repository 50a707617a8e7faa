"""The verbs that change something. `dead`, `requeue` and `drop` are about dead-lettered requests of every kind, alone, by class, or all of
them. `forget` deletes every key of a run and of its requests.

Data that runs share stays: tokenizers (other runs may use the same), workers, the queue itself. A worker that still runs one
of the requests loses its lease at the next renewal and publishes nothing.
"""

import argparse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arq.connections import ArqRedis
from msgspec import to_builtins
from redis.asyncio import Redis

from pipeline import deadletters, keys, stream
from pipeline.cli.listing import chosen_runs
from pipeline.cli.show import failure_block
from pipeline.deadletters import DeadLetter
from pipeline.kinds import KINDS, AnyKind
from pipeline.message import Message
from pipeline.redis_calls import chunks, command
from pipeline.screen import Ink, age, count, one_line

Change = Callable[[ArqRedis, str, str, AnyKind], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class DeadRequest:
    """A dead letter, with the run and the kind of its request."""

    run_id: str
    kind: AnyKind
    letter: DeadLetter


async def dead_requests(redis: ArqRedis, arguments: argparse.Namespace) -> list[DeadRequest]:
    """The dead requests that a command line selects, newest first. Raises LookupError for an id that is not among them."""
    ids, wanted = set[str](getattr(arguments, "ids", ())), arguments.failure_class
    found = [
        DeadRequest(run_id, kind, letter)
        for run_id in await chosen_runs(redis, arguments.run)
        for kind in KINDS
        if arguments.kind in (None, kind.name)
        for letter in (await deadletters.listed(redis, run_id, kind)).values()
        if (not ids or letter.request_id in ids) and wanted in (None, letter.kind)
    ]
    missing = ids - {one.letter.request_id for one in found}
    if missing:
        raise LookupError(f"{', '.join(sorted(missing))} not among the dead; `dead` lists them")
    return sorted(found, key=lambda one: -one.letter.died_at)


def as_json(dead: DeadRequest) -> dict[str, Any]:
    letter = dead.letter
    plain: dict[str, Any] = to_builtins(letter)
    for failure, row in zip(letter.failures, plain["failures"], strict=True):
        row["class"] = failure.kind
    return {"run_id": dead.run_id, "kind": dead.kind.name, "class": letter.kind, **plain}


def text(found: Sequence[DeadRequest], now: float, ink: Ink, *, full: bool) -> str:
    """One dead request on each line; `full`: with the evidence of every attempt."""
    if not found:
        return "nothing is dead"
    rows: list[str] = []
    for one in found:
        letter = one.letter
        last = (
            letter.failures[-1].message.replace("\n", " ") if letter.failures else "no failure was recorded"
        )
        tries = count(len(letter.failures), "failed try", "failed tries")
        head = (
            f"{ink.bold(letter.request_id)}  {ink.bad(f'{letter.kind:<14}')}  {letter.task_id}  run {one.run_id}, "
            f"{tries}, {age(now - letter.died_at)} ago: {last[:160]}"
        )
        rows.append(one_line(head))
        if full:
            rows += [failure_block(failure, ink, full=True) for failure in letter.failures]
    return "\n".join(rows)


async def change_each(
    redis: ArqRedis, found: Sequence[DeadRequest], change: Change, done: str
) -> list[dict[str, str]]:
    """Changes each of the dead requests. Returns a row for each: what was done, or why it was not changed."""
    told: list[dict[str, str]] = []
    for one in found:
        outcome, reason, request_id = done, "", one.letter.request_id
        try:
            await change(redis, one.run_id, request_id, one.kind)
        except KeyError:
            outcome, reason = "left as it was", "it is no longer among the dead"
        except ValueError as error:
            outcome, reason = "left as it was", str(error)
        told.append({"request_id": request_id, "run_id": one.run_id, "outcome": outcome, "reason": reason})
    return told


CHANGES: dict[str, tuple[Change, str]] = {
    "requeue": (deadletters.requeue, "requeued"),
    "drop": (deadletters.drop, "dropped"),
}


class Forgotten(Message, frozen=True, kw_only=True):
    """The numbers of deleted items."""

    run_id: str
    num_requests: int
    num_keys: int


async def forget(redis: Redis, run_id: str, kinds: Sequence[AnyKind] = KINDS) -> Forgotten:
    """Deletes the run. Its name is deleted last, so that an interrupted call can be repeated."""
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
    """The ids of all requests of the run that are in one of its keys."""
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
    """Deletes the keys of these requests. They leave the queue first, so that no worker claims a half-deleted request."""
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
