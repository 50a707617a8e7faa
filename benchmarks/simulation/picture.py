"""Draws the staleness experiment: final success by lag, and by step at the largest lag."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.simulation.cell import CellRow
from benchmarks.simulation.results import Estimate, final_success

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(rows: Sequence[CellRow], picture: Path) -> None:
    """Write `picture` (PNG) of the cells without failures, or of all if there are none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [row for row in rows if row.cell.failures == "none"] or list(rows)
    figure, (by_lag, by_step) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    _draw_lags(by_lag, chosen)
    largest = max(row.cell.lag for row in chosen)
    _draw_steps(by_step, [row for row in chosen if row.cell.lag == largest])
    by_step.set_title(f"lag {largest}, mean of the seeds", fontsize="medium")
    by_lag.legend(frameon=False, fontsize="small")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _draw_lags(axes: "Axes", rows: Sequence[CellRow]) -> None:
    found: dict[tuple[str, int], Estimate] = final_success(
        rows, lambda row: (row.cell.objective, row.cell.lag)
    )
    for number, objective in enumerate(dict.fromkeys(row.cell.objective for row in rows)):
        lags = sorted(lag for kind, lag in found if kind == objective)
        estimates = [found[objective, lag] for lag in lags]
        axes.errorbar(
            [lag + 0.08 * number for lag in lags],
            [one.mean for one in estimates],
            yerr=[one.error for one in estimates],
            marker="o",
            markersize=4,
            capsize=2,
            label=objective,
        )
    axes.axhline(statistics.fmean(row.evaluations[0].success for row in rows), color="#7f8c8d", linestyle=":")
    axes.set_xlabel("lag (versions)")
    axes.set_ylabel("held-out success after the last step")
    axes.set_ylim(0, 1)


def _draw_steps(axes: "Axes", rows: Sequence[CellRow]) -> None:
    for objective in dict.fromkeys(row.cell.objective for row in rows):
        of = [row.evaluations for row in rows if row.cell.objective == objective]
        curves = zip(*of, strict=True)
        points = [(one[0].step, statistics.fmean(each.success for each in one)) for one in curves]
        axes.plot([step for step, _ in points], [mean for _, mean in points], marker="o", markersize=4)
    axes.set_xlabel("step")
