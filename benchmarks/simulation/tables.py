"""The staleness experiment as tables in Markdown."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

from msgspec.structs import replace

from benchmarks.simulation.cell import Cell, CellRow
from benchmarks.simulation.failures import FAILURES
from benchmarks.simulation.results import Estimate, final_success
from trainer.learner.config import LossKind

Cells = dict[tuple[str, int], Estimate]
"""By objective and lag."""


FAILING = {
    "random": "fail whatever they do, and are left out",
    "by_length": "fail, long ones more often, and are left out",
    "as_zero": "fail whatever they do, and are trained with reward 0",
}
"""What each kind of failure means, behind "The same where 10 % of the episodes"."""


def tables(rows: Sequence[CellRow]) -> str:
    """Success by objective and lag, without failures and with each kind, and what the learner saw."""
    whole = [row for row in rows if row.cell.failures == "none"]
    parts = [_lag_table(whole, _without_failures(whole))] if whole else []
    for kind in FAILURES:
        if kind != "none" and (of := [row for row in rows if row.cell.failures == kind]):
            parts.append(_lag_table(of, _with_failures(of, whole)))
    return "\n\n".join([*parts, _diagnostics(whole or rows)])


def _lag_table(rows: Sequence[CellRow], title: str) -> str:
    found: Cells = final_success(rows, lambda row: (row.cell.objective, row.cell.lag))
    lags = sorted({lag for _, lag in found})
    lines = [
        title,
        "",
        _line("objective", *(f"lag {lag}" for lag in lags), "lowest run"),
        _line("---", *("--:" for _ in lags), "--:"),
    ]
    for objective in sorted({row.cell.objective for row in rows}, key=get_args(LossKind).index):
        by_lag = {lag: found[objective, lag] for lag in lags if (objective, lag) in found}
        cells = (_with_seeds(by_lag.get(lag)) for lag in lags)
        lowest = min(row.final.success for row in rows if row.cell.objective == objective)
        lines.append(_line(f"`{objective}`", *cells, f"{100 * lowest:.1f}"))
    return "\n".join(lines)


def _without_failures(rows: Sequence[CellRow]) -> str:
    start = statistics.fmean(row.evaluations[0].success for row in rows)
    return f"Held-out success in percent after the last step, ± one standard error (seeds); before training {100 * start:.1f}."


def _with_failures(rows: Sequence[CellRow], whole: Sequence[CellRow]) -> str:
    """A title that says what the failures cost: the mean over pairs of runs that differ in nothing else. The spread of the pairs
    gives the standard error.
    """
    share, kind = 100 * rows[0].settings.failure_share, rows[0].cell.failures
    title = f"The same where {share:g} % of the episodes {FAILING[kind]} (`{kind}`)"
    without = {_but_failures(row.cell): row.final.success for row in whole}
    costs = [row.final.success - without[key] for row in rows if (key := _but_failures(row.cell)) in without]
    if len(costs) < 2:
        return f"{title}."
    error = statistics.stdev(costs) / len(costs) ** 0.5
    return (
        f"{title}; against the same runs without failures {100 * statistics.fmean(costs):+.1f} ± {100 * error:.1f} points, "
        f"mean of {len(costs)} pairs."
    )


def _but_failures(cell: Cell) -> Cell:
    return replace(cell, failures="none")


def _with_seeds(one: Estimate | None) -> str:
    return f"{one} ({one.num_seeds})" if one else ""


def _diagnostics(rows: Sequence[CellRow]) -> str:
    columns: dict[str, Callable[[CellRow], float]] = {
        "ESS share": lambda row: _mean(row.steps.ess_share),
        "masked %": lambda row: 100 * _mean(row.steps.masked_share),
        "behaviour KL": lambda row: _mean(row.steps.behaviour_kl),
        "last entropy": lambda row: next((one for one in reversed(row.steps.entropy) if one), 0.0),
        "steps without a group": lambda row: float(row.steps.num_groups.count(0)),
        "format errors %": lambda row: 100 * row.format_error_share,
    }
    lines = [_line("objective", "lag", *columns), _line("---", "--:", *("--:" for _ in columns))]
    together: dict[tuple[str, int], list[CellRow]] = {}
    for row in rows:
        together.setdefault((row.cell.objective, row.cell.lag), []).append(row)
    for (objective, lag), of in sorted(together.items(), key=lambda item: item[0]):
        cells = (f"{statistics.fmean(map(value, of)):.3g}" for value in columns.values())
        lines.append(_line(f"`{objective}`", str(lag), *cells))
    return "\n".join(["Means over the trained steps and the seeds.", "", *lines])


def _mean(values: Iterable[float]) -> float:
    trained = [value for value in values if value]
    return statistics.fmean(trained) if trained else 0.0


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
