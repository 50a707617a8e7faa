"""The staleness experiment as tables in Markdown."""

import statistics
from collections.abc import Callable, Sequence
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


T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile of Student's t with 1, 2, ... 9 degrees of freedom."""


def tables(rows: Sequence[CellRow]) -> str:
    """Success by objective and lag, without failures and with each kind, how fast it came, and what the learner saw."""
    whole = [row for row in rows if row.cell.failures == "none"]
    parts = [_lag_table(whole, _without_failures(whole))] if whole else []
    for kind in FAILURES:
        if kind != "none" and (of := [row for row in rows if row.cell.failures == kind]):
            parts.append(_lag_table(of, _with_failures(of, whole)))
    if speed := _speed_table([row for row in rows if row.cell.failures in ("none", "random")]):
        parts.append(speed)
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


def _speed_table(rows: Sequence[CellRow]) -> str:
    """How fast an objective learns at each lag: the mean of the evaluations between the first and the last, minus that of the run at
    lag 0 that differs in nothing else. The last column is the 95 % interval of the longest lag by Student's t over the seeds, each
    with the mean of its pairs, because pairs of one seed have the same tasks. Empty without such pairs.
    """
    speed = {row.cell: _speed(row) for row in rows if len(row.evaluations) > 2}
    lost: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for cell, value in speed.items():
        fresh = speed.get(replace(cell, lag=0))
        if cell.lag and fresh is not None:
            lost.setdefault(cell.objective, {}).setdefault(cell.lag, []).append((cell.seed, value - fresh))
    if not lost:
        return ""
    lags = sorted({lag for by_lag in lost.values() for lag in by_lag})
    lines = [
        "Success during the run, the mean of the evaluations between the first and the last, minus that of the same run at lag 0:",
        "points, ± one standard error of the pairs (pairs).",
        "",
        _line("objective", *(f"lag {lag}" for lag in lags), f"95 % by seed, lag {lags[-1]}"),
        _line("---", *("--:" for _ in lags), "--:"),
    ]
    for objective in sorted(lost, key=get_args(LossKind).index):
        cells = (_with_pairs([loss for _, loss in lost[objective].get(lag, [])]) for lag in lags)
        lines.append(_line(f"`{objective}`", *cells, _interval_by_seed(lost[objective].get(lags[-1], []))))
    return "\n".join(lines)


def _speed(row: CellRow) -> float:
    return 100 * statistics.fmean(one.success for one in row.evaluations[1:-1])


def _with_pairs(losses: Sequence[float]) -> str:
    if len(losses) < 2:
        return f"{losses[0]:+.1f} (1)" if losses else ""
    error = statistics.stdev(losses) / len(losses) ** 0.5
    return f"{statistics.fmean(losses):+.1f} ± {error:.1f} ({len(losses)})"


def _interval_by_seed(losses: Sequence[tuple[int, float]]) -> str:
    by_seed: dict[int, list[float]] = {}
    for seed, loss in losses:
        by_seed.setdefault(seed, []).append(loss)
    means = [statistics.fmean(of) for of in by_seed.values()]
    if not 2 <= len(means) <= len(T_975) + 1:
        return ""
    middle = statistics.fmean(means)
    reach = T_975[len(means) - 2] * statistics.stdev(means) / len(means) ** 0.5
    return f"{middle - reach:+.1f} to {middle + reach:+.1f}"


def control_table(rows: Sequence[CellRow]) -> str:
    """How far behind samples were where the controller chose it, and what it cost, against the same runs at lag 0 and at the largest
    lag. Empty without such runs.
    """
    fixed = {row.cell: row for row in rows if not row.cell.is_controlled}
    lines = [
        "Lag that the controller chose, mean and largest over the runs, and success during the run against fixed lags.",
        "",
        _line(
            "objective", "up to", "runs", "mean lag", "largest", "against lag 0", "against the largest lag"
        ),
        _line("---", *6 * ["--:"]),
    ]
    together: dict[tuple[str, int], list[CellRow]] = {}
    for row in rows:
        if row.cell.is_controlled:
            together.setdefault((row.cell.objective, row.cell.lag), []).append(row)
    for (objective, lag), of in sorted(together.items()):
        costs = [
            [_speed(row) - _speed(fixed[key]) for row in of if (key := _at_fixed(row.cell, other)) in fixed]
            for other in (0, lag)
        ]
        mean = statistics.fmean(statistics.fmean(row.steps.lag) for row in of)
        largest = max(max(row.steps.lag) for row in of)
        cells = (str(lag), str(len(of)), f"{mean:.1f}", str(largest), *map(_with_pairs, costs))
        lines.append(_line(f"`{objective}`", *cells))
    return "\n".join(lines) if together else ""


def _at_fixed(cell: Cell, lag: int) -> Cell:
    return replace(cell, lag=lag, is_controlled=False)


def _with_seeds(one: Estimate | None) -> str:
    return f"{one} ({one.num_seeds})" if one else ""


def _diagnostics(rows: Sequence[CellRow]) -> str:
    columns: dict[str, Callable[[CellRow], float]] = {
        "ESS share": lambda row: _mean_trained(row, row.steps.ess_share),
        "masked %": lambda row: 100 * _mean_trained(row, row.steps.masked_share),
        "behaviour KL": lambda row: _mean_trained(row, row.steps.behaviour_kl),
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


def _mean_trained(row: CellRow, values: Sequence[float]) -> float:
    """The mean over the steps that had a group to train on; a share of 0 is a value like any other."""
    trained = [value for value, groups in zip(values, row.steps.num_groups, strict=True) if groups]
    return statistics.fmean(trained) if trained else 0.0


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
