"""The numbers of a run by step, its evaluations, and marks for what happened in between."""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infra.web.journal_files import JsonRow, RunJournal
from infra.web.step_facts import facts_of_steps

_NOT_NUMBERS = ("request_ids", "baseline_ids", "judging")


def series(journal: RunJournal, *, after: int | None = None) -> JsonRow:
    """Everything that the curves of a run are drawn from; with `after` only what belongs to later steps."""

    def later(rows: list[JsonRow]) -> list[JsonRow]:
        return [row for row in rows if after is None or _step(row) > after]

    return {
        "steps": later(list(_steps(journal))),
        "evaluations": later(journal.evaluations.rows),
        "publications": later(journal.publications.rows),
        "deliveries": later(journal.deliveries.rows),
        "marks": later(marks(journal)),
    }


def marks(journal: RunJournal) -> list[JsonRow]:
    """What happened to the run, oldest first. A row without a step belongs to the last one before it."""
    found = sorted(_marks(journal), key=lambda mark: mark["at"])
    times = [float(row.get("at") or 0.0) for row in journal.steps.rows]
    for mark in found:
        if mark["step"] is None:
            num_before = bisect.bisect_right(times, mark["at"])
            mark["step"] = _step(journal.steps.rows[num_before - 1]) if num_before else 0
    return found


def _steps(journal: RunJournal) -> Iterator[JsonRow]:
    """Each step's numbers, with what the rest of the journal says of it."""
    for row, facts in zip(journal.steps.rows, facts_of_steps(journal), strict=True):
        numbers = {name: value for name, value in row.items() if name not in _NOT_NUMBERS}
        judging: Mapping[str, Any] = row.get("judging") or {}
        yield numbers | {f"judging_{name}": value for name, value in judging.items()} | facts


def _marks(journal: RunJournal) -> Iterator[JsonRow]:
    for row in journal.publications.rows:
        yield _mark(row, "published", f"weight version {row.get('version')}")
    for row in journal.starts.rows[1:]:
        yield _mark(row, "resumed", f"a new process goes on from step {row.get('step')}")
    yield from _engines_out(journal.deliveries.rows)
    for row in journal.quarantines.rows:
        yield _mark(row, "quarantined", f"{row.get('task_id')}: {row.get('reason')}")
    for row in journal.staleness.rows:
        text = f"admission may run {row.get('ahead_versions')} versions ahead: {row.get('reason')}"
        yield _mark(row, "staleness", text)
    for row in journal.skipped_batches.rows:
        yield _mark(row, "skipped batch", f"the {row.get('what')} was not finite")
    for row in journal.endings.rows:
        yield _mark(row, "ended", str(row.get("detail") or row.get("reason")))
    for row in journal.alarms.rows:
        text = f"{row.get('kind')}: {row.get('text')}"
        yield _mark(row, "alarm", f"over: {text}" if row.get("is_over") else text)


def _engines_out(deliveries: Sequence[JsonRow]) -> Iterator[JsonRow]:
    """When the engines out of routing became others."""
    before: set[str] = set()
    for row in deliveries:
        out = {str(url) for url in row.get("quarantined") or ()}
        if out - before:
            yield _mark(row, "outage", f"out of routing: {', '.join(sorted(out - before))}")
        before = out


def _mark(row: JsonRow, kind: str, text: str) -> JsonRow:
    return {"at": float(row.get("at") or 0.0), "step": row.get("step"), "kind": kind, "text": text}


def _step(row: JsonRow) -> int:
    return int(row.get("step") or 0)
