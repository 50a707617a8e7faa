"""The drift report: where learner and engine disagree about log-probs, from the audits of a run.

Numerical noise is alike everywhere. What grows with the position points at attention or positions, what belongs to one version at
its publication, what belongs to one kind of token at how it was rendered or masked.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from trainer.records.audit_row import AuditRow, Drift

MAX_LINES = 8
"""Of weight versions; neighbouring ones share a line beyond that."""


class DriftReport(msgspec.Struct, frozen=True, kw_only=True):
    """All audits of a run together."""

    num_tokens: int = 0  # measured
    num_batch_tokens: int = 0  # trained by the audited steps
    num_unmeasured: int = 0  # drawn, but sampled by weights that were no longer held
    num_positions: int = 0  # that the learner computed for it
    audit_s: float = 0.0
    by_version: dict[str, Drift] = {}
    by_position: dict[str, Drift] = {}
    by_kind: dict[str, Drift] = {}


def drift_report(audits: Iterable[AuditRow]) -> DriftReport:
    rows = list(audits)
    return DriftReport(
        num_tokens=sum(row.num_tokens for row in rows),
        num_batch_tokens=sum(row.num_batch_tokens for row in rows),
        num_unmeasured=sum(row.num_unmeasured for row in rows),
        num_positions=sum(row.num_positions for row in rows),
        audit_s=sum(row.audit_s for row in rows),
        by_version=_added([row.by_version for row in rows]),
        by_position=_added([row.by_position for row in rows]),
        by_kind=_added([row.by_kind for row in rows]),
    )


def drift_lines(report: DriftReport) -> Iterator[str]:
    """The report as a table; one line if nothing was measured."""
    if not report.num_tokens:
        yield "drift: nothing was measured; it needs learner.snapshots_kept and audit.share above 0"
        return
    yield f"{'drift, nats':<22}{'tokens':>12}{'mean':>12}{'max':>12}{'bias':>12}"
    yield from _table("version", _joined(report.by_version))
    yield from _table("position", report.by_position)
    yield from _table("kind", report.by_kind)
    yield (
        f"{report.num_tokens:,} of {report.num_batch_tokens:,} trained tokens were measured, {report.num_unmeasured:,} drawn ones "
        f"could not be; the learner computed {report.num_positions:,} positions for it in {report.audit_s:.1f} s"
    )


def merged(drifts: Iterable[Drift]) -> Drift:
    """The drift over all their tokens."""
    parts = list(drifts)
    num_tokens = sum(part.num_tokens for part in parts)
    return Drift(
        num_tokens=num_tokens,
        mean=sum(part.mean * part.num_tokens for part in parts) / num_tokens,
        max=max(part.max for part in parts),
        bias=sum(part.bias * part.num_tokens for part in parts) / num_tokens,
    )


def _added(tables: Sequence[Mapping[str, Drift]]) -> dict[str, Drift]:
    """Tables with the same labels as one, in the order of the numbers that the labels begin with."""
    labels = sorted({label for table in tables for label in table}, key=_place)
    return {label: merged(table[label] for table in tables if label in table) for label in labels}


def _place(label: str) -> tuple[int, str]:
    first = label.partition("-")[0]
    return (int(first), "") if first.isdecimal() else (0, label)


def _joined(by_version: Mapping[str, Drift]) -> dict[str, Drift]:
    """At most MAX_LINES spans of versions with about as many versions each."""
    labels = list(by_version)
    size = -(-len(labels) // MAX_LINES)
    spans = (labels[start : start + size] for start in range(0, len(labels), size))
    return {
        span[0] if len(span) == 1 else f"{span[0]}-{span[-1]}": merged(by_version[label] for label in span)
        for span in spans
    }


def _table(name: str, drifts: Mapping[str, Drift]) -> Iterator[str]:
    for label, drift in drifts.items():
        yield (
            f"  {name + ' ' + label:<20}{drift.num_tokens:>12,}{drift.mean:>12.2e}{drift.max:>12.2e}{drift.bias:>+12.2e}"
        )
