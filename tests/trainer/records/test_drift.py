"""The drift report of a run: its audits put together, and shown."""

import pytest

from pipeline.journal.rows import AuditRow, Drift
from trainer.report.summary import MAX_LINES, DriftReport, drift_lines, drift_report


def drift(num_tokens: int, mean: float, *, bias: float = 0.0) -> Drift:
    return Drift(num_tokens=num_tokens, mean=mean, max=2 * mean, bias=bias)


def audit(step: int, *, versions: dict[str, Drift]) -> AuditRow:
    num_tokens = sum(one.num_tokens for one in versions.values())
    return AuditRow(
        step=step,
        num_tokens=num_tokens,
        num_batch_tokens=50 * num_tokens,
        num_unmeasured=1,
        num_samples=1,
        num_positions=3 * num_tokens,
        gap_max=max(one.max for one in versions.values()),
        gap_mean=0.1,
        audit_s=0.5,
        by_version=versions,
        by_position={"0-255": drift(1, 0.1), "1024-2047": drift(1, 0.3)},
        by_kind={"text": drift(1, 0.1), "call": drift(1, 0.3)},
    )


def test_audits_are_added_token_by_token() -> None:
    report = drift_report(
        [
            audit(1, versions={"0": drift(1, 0.4, bias=-0.4)}),
            audit(2, versions={"0": drift(3, 0.0), "1": drift(1, 0.2)}),
        ]
    )
    assert report.by_version["0"] == Drift(num_tokens=4, mean=0.1, max=0.8, bias=-0.1)
    assert (report.num_tokens, report.num_batch_tokens, report.num_unmeasured) == (5, 250, 2)
    assert (report.num_positions, report.audit_s) == (15, 1.0)
    assert report.by_kind["call"].mean == pytest.approx(0.3)


def test_versions_and_positions_come_in_their_order() -> None:
    report = drift_report([audit(1, versions={"10": drift(1, 0.1), "9": drift(1, 0.1)})])
    assert list(report.by_version) == ["9", "10"]
    assert list(report.by_position) == ["0-255", "1024-2047"]


def test_the_table_has_a_line_for_each_part_and_a_few_for_many_versions() -> None:
    many = drift_report([audit(n, versions={str(n): drift(1, 0.1)}) for n in range(100)])
    lines = list(drift_lines(many))
    versions = [line.split()[1] for line in lines if line.startswith("  version")]
    assert len(versions) <= MAX_LINES
    assert (versions[0], versions[-1]) == ("0-12", "91-99")
    assert any(line.split() == ["kind", "call", "100", "3.00e-01", "6.00e-01", "+0.00e+00"] for line in lines)
    assert "100 of 5,000 trained tokens were measured" in lines[-1]


def test_a_run_without_an_audit_says_what_it_needs() -> None:
    (line,) = drift_lines(DriftReport())
    assert "learner.snapshots_kept" in line
