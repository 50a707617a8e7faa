"""The staleness experiment as tables in Markdown. Intervals are at 95 %, by Student's t over the seeds, which are the draws."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

from msgspec.structs import replace

from benchmarks.simulation.cell import Cell, CellRow
from benchmarks.simulation.failures import FAILURES
from benchmarks.simulation.results import over_groups, over_seeds
from pipeline.intervals import HEADING
from trainer.learner.config import LossKind

Losses = dict[int, list[float]]
"""Differences in points of success, by seed."""

FAILING = {
    "random": "fail whatever they do, and are left out",
    "by_length": "fail, long ones more often, and are left out",
    "as_zero": "fail whatever they do, and are trained with reward 0",
}
"""What each kind of failure means, after "The same where 10 % of the episodes"."""


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
    lags = sorted({row.cell.lag for row in rows})
    lines = [
        title,
        "",
        _line("objective", *(f"lag {lag}" for lag in lags), "seeds", "lowest run"),
        _line("---", *("--:" for _ in lags), "--:", "--:"),
    ]
    for method, of in _by_method(rows).items():
        ends = [[100 * row.final.success for row in of if row.cell.lag == lag] for lag in lags]
        lowest = min(100 * row.final.success for row in of)
        lines.append(_line(method, *map(over_seeds, ends), _range_of(map(len, ends)), f"{lowest:.1f}"))
    return "\n".join(lines)


def _by_method(rows: Sequence[CellRow]) -> dict[str, list[CellRow]]:
    """The rows of each objective, by its name; with several updates a step, it is a method of its own."""
    found: dict[tuple[int, int], list[CellRow]] = {}
    for row in rows:
        key = get_args(LossKind).index(row.cell.objective), row.cell.num_minibatches
        found.setdefault(key, []).append(row)
    return {_method(of[0].cell): of for _, of in sorted(found.items())}


def _method(cell: Cell) -> str:
    updates = f", {cell.num_minibatches} updates a step" if cell.num_minibatches > 1 else ""
    return f"`{cell.objective}`{updates}"


def _range_of(numbers: Iterable[int]) -> str:
    numbers = sorted({number for number in numbers if number})
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _without_failures(rows: Sequence[CellRow]) -> str:
    start = 100 * statistics.fmean(row.evaluations[0].success for row in rows)
    return f"Held-out success in percent after the last step, {HEADING}; before training {start:.1f}."


def _with_failures(rows: Sequence[CellRow], whole: Sequence[CellRow]) -> str:
    """A title that says what the failures cost: the mean over pairs of runs that differ in nothing else."""
    share, kind = 100 * rows[0].settings.failure_share, rows[0].cell.failures
    title = f"The same where {share:g} % of the episodes {FAILING[kind]} (`{kind}`)"
    without = {_but_failures(row.cell): row.final.success for row in whole}
    costs: Losses = {}
    for row in rows:
        if (key := _but_failures(row.cell)) in without:
            costs.setdefault(row.cell.seed, []).append(100 * (row.final.success - without[key]))
    if sum(map(len, costs.values())) < 2:
        return f"{title}."
    return f"{title}; against the same runs without failures: {_with_pairs(costs)} pairs, in points."


def _but_failures(cell: Cell) -> Cell:
    return replace(cell, failures="none")


def _speed_table(rows: Sequence[CellRow]) -> str:
    """How fast an objective learns at each lag: the mean of the evaluations between the first and the last, minus that of the run at
    lag 0 that differs in nothing else. Empty without such pairs.
    """
    fresh = {row.cell: _speed(row) for row in rows if row.cell.lag == 0 and len(row.evaluations) > 2}
    late = [
        row for row in rows if row.cell.lag and replace(row.cell, lag=0) in fresh and len(row.evaluations) > 2
    ]
    if not late:
        return ""
    lags = sorted({row.cell.lag for row in late})
    lines = [
        "Success during the run, the mean of the evaluations between the first and the last, minus that of the same run at lag 0:",
        f"points, {HEADING}, and the number of pairs. Pairs of one seed have the same tasks, so seeds are the draws.",
        "",
        _line("objective", *(f"lag {lag}" for lag in lags)),
        _line("---", *("--:" for _ in lags)),
    ]
    for method, of in _by_method(late).items():
        lost: dict[int, Losses] = {lag: {} for lag in lags}
        for row in of:
            loss = _speed(row) - fresh[replace(row.cell, lag=0)]
            lost[row.cell.lag].setdefault(row.cell.seed, []).append(loss)
        lines.append(_line(method, *(_with_pairs(lost[lag]) for lag in lags)))
    return "\n".join(lines)


def _speed(row: CellRow) -> float:
    return 100 * statistics.fmean(one.success for one in row.evaluations[1:-1])


def _with_pairs(losses: Losses) -> str:
    num_pairs = sum(map(len, losses.values()))
    return f"{over_groups([*losses.values()], '+.1f')}, {num_pairs}" if num_pairs else ""


def control_table(rows: Sequence[CellRow]) -> str:
    """How far behind samples were where the controller chose it, and what it cost, against the same runs at lag 0 and at the largest
    lag. Empty without such runs.
    """
    fixed = {row.cell: row for row in rows if not row.cell.is_controlled}
    lines = [
        "Lag that the controller chose, mean and largest over the runs, and success during the run against fixed lags:",
        f"points, {HEADING}, and the number of pairs.",
        "",
        _line(
            "objective", "up to", "runs", "mean lag", "largest", "against lag 0", "against the largest lag"
        ),
        _line("---", *6 * ["--:"]),
    ]
    together: dict[tuple[str, int], list[CellRow]] = {}
    for row in rows:
        if row.cell.is_controlled:
            together.setdefault((_method(row.cell), row.cell.lag), []).append(row)
    for (method, lag), of in sorted(together.items()):
        costs: list[Losses] = [{}, {}]
        for row in of:
            for cost, other in zip(costs, (0, lag), strict=True):
                if (key := replace(row.cell, lag=other, is_controlled=False)) in fixed:
                    cost.setdefault(row.cell.seed, []).append(_speed(row) - _speed(fixed[key]))
        mean = statistics.fmean(statistics.fmean(row.steps.lag) for row in of)
        largest = max(max(row.steps.lag) for row in of)
        cells = (str(lag), str(len(of)), f"{mean:.1f}", str(largest), *map(_with_pairs, costs))
        lines.append(_line(method, *cells))
    return "\n".join(lines) if together else ""


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
        together.setdefault((_method(row.cell), row.cell.lag), []).append(row)
    for (method, lag), of in sorted(together.items()):
        cells = (f"{statistics.fmean(map(value, of)):.3g}" for value in columns.values())
        lines.append(_line(method, str(lag), *cells))
    return "\n".join(["Means over the trained steps and the seeds.", "", *lines])


def _mean_trained(row: CellRow, values: Sequence[float]) -> float:
    """The mean over the steps that had a group to train on; a share of 0 is a value like any other."""
    trained = [value for value, groups in zip(values, row.steps.num_groups, strict=True) if groups]
    return statistics.fmean(trained) if trained else 0.0


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
