"""`dead`, `requeue` and `drop`: dead-lettered requests, alone, by class, or all of them."""

import argparse
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from arq.connections import ArqRedis
from msgspec import to_builtins

from pipeline import deadletters
from pipeline.cli import listing, runs
from pipeline.cli.ink import Ink, age, count
from pipeline.cli.show import failure_block
from pipeline.deadletters import DeadLetter
from pipeline.visible import visible

Change = Callable[[ArqRedis, str, str], Awaitable[None]]
Letters = Sequence[tuple[str, DeadLetter]]
"""With the run of each."""


async def letters(redis: ArqRedis, arguments: argparse.Namespace) -> Letters:
    """The dead letters that a command line means, newest first. Raises LookupError for an id that is not among them."""
    ids, kind = set[str](getattr(arguments, "ids", ())), arguments.kind
    found = [
        (run_id, letter)
        for run_id in await runs.chosen(redis, arguments.run)
        for letter in await listing.dead_letters(redis, run_id)
        if (not ids or letter.request_id in ids) and (kind is None or letter.kind == kind)
    ]
    missing = ids - {letter.request_id for _, letter in found}
    if missing:
        raise LookupError(f"{', '.join(sorted(missing))} not among the dead; `dead` lists them")
    return sorted(found, key=lambda pair: -pair[1].died_at)


def as_json(run_id: str, letter: DeadLetter) -> dict[str, Any]:
    plain: dict[str, Any] = to_builtins(letter)
    for failure, row in zip(letter.failures, plain["failures"], strict=True):
        row["class"] = failure.kind
    return {"run_id": run_id, "class": letter.kind, **plain}


def text(letters: Letters, now: float, ink: Ink, *, full: bool) -> str:
    """One dead request on each line; `full`: each with the evidence of every attempt."""
    if not letters:
        return "nothing is dead"
    rows: list[str] = []
    for run_id, letter in letters:
        last = (
            letter.failures[-1].message.replace("\n", " ") if letter.failures else "no failure was recorded"
        )
        tries = count(len(letter.failures), "failed try", "failed tries")
        rows.append(
            f"{ink.bold(letter.request_id)}  {ink.bad(f'{letter.kind:<14}')}  {letter.task_id}  run {run_id}, "
            f"{tries}, {age(now - letter.died_at)} ago: {visible(last)[:160]}"
        )
        if full:
            rows += [failure_block(failure, ink, full=True) for failure in letter.failures]
    return "\n".join(rows)


async def change_each(redis: ArqRedis, dead: Letters, change: Change, done: str) -> list[dict[str, str]]:
    """Change each of the dead requests. Returns a row for each: what was done, or why it was left as it was."""
    told: list[dict[str, str]] = []
    for run_id, letter in dead:
        outcome, reason = done, ""
        try:
            await change(redis, run_id, letter.request_id)
        except KeyError:
            outcome, reason = "left as it was", "it is no longer among the dead"
        except ValueError as error:
            outcome, reason = "left as it was", str(error)
        told.append({"request_id": letter.request_id, "run_id": run_id, "outcome": outcome, "reason": reason})
    return told


CHANGES: dict[str, tuple[Change, str]] = {
    "requeue": (deadletters.requeue, "requeued"),
    "drop": (deadletters.drop, "dropped"),
}
