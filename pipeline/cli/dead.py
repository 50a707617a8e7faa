"""`dead`, `requeue` and `drop`: dead-lettered requests of every kind, alone, by class, or all of them."""

import argparse
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from arq.connections import ArqRedis
from msgspec import to_builtins

from pipeline import deadletters
from pipeline.cli import runs
from pipeline.cli.ink import Ink, age, count
from pipeline.cli.show_failure import failure_block
from pipeline.deadletters import DeadLetter
from pipeline.kinds import KINDS, AnyKind
from pipeline.visible import visible

Change = Callable[[ArqRedis, str, str, AnyKind], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class DeadRequest:
    """A dead letter, with the run and the kind of its request."""

    run_id: str
    kind: AnyKind
    letter: DeadLetter


async def dead_requests(redis: ArqRedis, arguments: argparse.Namespace) -> list[DeadRequest]:
    """The dead requests that a command line means, newest first. Raises LookupError for an id that is not among them."""
    ids, wanted = set[str](getattr(arguments, "ids", ())), arguments.failure_class
    found = [
        DeadRequest(run_id, kind, letter)
        for run_id in await runs.chosen(redis, arguments.run)
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
    """One dead request on each line; `full`: each with the evidence of every attempt."""
    if not found:
        return "nothing is dead"
    rows: list[str] = []
    for one in found:
        letter = one.letter
        last = (
            letter.failures[-1].message.replace("\n", " ") if letter.failures else "no failure was recorded"
        )
        tries = count(len(letter.failures), "failed try", "failed tries")
        rows.append(
            f"{ink.bold(letter.request_id)}  {ink.bad(f'{letter.kind:<14}')}  {letter.task_id}  run {one.run_id}, "
            f"{tries}, {age(now - letter.died_at)} ago: {visible(last)[:160]}"
        )
        if full:
            rows += [failure_block(failure, ink, full=True) for failure in letter.failures]
    return "\n".join(rows)


async def change_each(
    redis: ArqRedis, found: Sequence[DeadRequest], change: Change, done: str
) -> list[dict[str, str]]:
    """Change each of the dead requests. Returns a row for each: what was done, or why it was left as it was."""
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
