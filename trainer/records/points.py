"""The numbers of a row, under the names that every sink shows them by: `train/loss`, `heldout/sampled/success`, `judge/score_mean`.

`heldout/` is followed by the name of the held-out set, if it has one, and by how its episodes were sampled.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from trainer.records.audit_row import AuditRow
from trainer.records.journal import EvaluationRow, StepRow
from trainer.records.row import Row

_NOT_SHOWN = {"step", "at", "greedy", "began_at", "trained_at"}  # they are the point's place, time and name
_GAP = {"logprob_gap_max", "logprob_gap_mean"}


@dataclass(frozen=True, slots=True)
class Point:
    """Finite numbers by name, all of one optimizer step."""

    step: int
    at: float  # Unix seconds
    values: Mapping[str, float]


def points(row: Row) -> Iterator[Point]:
    """Every number of a step, an audit or an evaluation; nothing of other rows."""
    match row:
        case StepRow():
            yield _point(row, "train", _fields(row, without=set() if row.is_gap_measured else _GAP))
            if row.judging:
                yield _point(row, "judge", msgspec.structs.asdict(row.judging))
        case EvaluationRow():
            yield _evaluation(row)
        case AuditRow():
            means = {f"mean_{kind}": drift.mean for kind, drift in row.by_kind.items()}
            yield _point(row, "audit", _fields(row) | means)
        case _:
            pass


def _evaluation(row: EvaluationRow) -> Point:
    """The numbers, and the share of each way in which episodes ended."""
    group = "/".join(part for part in ("heldout", row.tasks, "greedy" if row.greedy else "sampled") if part)
    num_ended = sum(row.outcomes.values())
    passes = {f"pass_at_{k}": value for k, value in row.pass_at.items()}
    ended = {f"ended_{name.replace(':', '_')}": count / num_ended for name, count in row.outcomes.items()}
    return _point(row, group, _fields(row) | passes | ended)


def _fields(row: Row, *, without: set[str] | None = None) -> dict[str, object]:
    hidden = _NOT_SHOWN | (without or set())
    return {name: value for name, value in msgspec.structs.asdict(row).items() if name not in hidden}


def _point(row: StepRow | EvaluationRow | AuditRow, group: str, fields: Mapping[str, object]) -> Point:
    """Of the fields that are finite numbers."""
    values = {
        f"{group}/{name}": float(value)
        for name, value in fields.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return Point(row.step, row.at, values)
