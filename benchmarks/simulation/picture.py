"""Draws the staleness experiment: final success by lag, and by step at the largest lag."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.simulation.cell import CellRow
from pipeline.intervals import t_mean

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
    for number, objective in enumerate(dict.fromkeys(row.cell.objective for row in rows)):
        by_lag: dict[int, list[list[float]]] = {}
        for row in rows:
            if row.cell.objective == objective:
                by_lag.setdefault(row.cell.lag, []).append([row.final.success])
        estimates = [(lag, one) for lag, of in sorted(by_lag.items()) if (one := t_mean(of))]
        axes.errorbar(
            [lag + 0.08 * number for lag, _ in estimates],
            [one.value for _, one in estimates],
            yerr=[min(one.high - one.value, 1.0) for _, one in estimates],
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
