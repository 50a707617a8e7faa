"""The experiment with judges as a table in Markdown and a picture: episodes until a success is reached."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulation.cell import CellRow
from benchmarks.simulation.results import over_seeds
from pipeline.intervals import HEADING

Judge = tuple[str, float, float]
"""Credit method, coefficient, accuracy."""

COLUMNS = (
    "credit",
    "coefficient",
    "judge is right",
    "seeds",
    "episodes to reach it",
    "reached",
    "success at the end",
    "mean of the run",
    "against the outcome",
)

SMOOTHED = 3
"""Evaluations that a point of a curve is the mean of: one alone has an error of four percent."""


def table(rows: Sequence[CellRow]) -> str:
    """A line for each judge. What is to be reached is the success of the outcome alone at the end of the run, in each seed its own;
    seeds without such a run are left out.
    """
    alone = {row.cell.seed: row for row in rows if row.cell.credit == "outcome"}
    targets = {seed: smoothed(row)[-1][1] for seed, row in alone.items()}
    target = 100 * statistics.fmean(targets.values())
    lines = [
        f"To be reached: what the outcome alone has at the end of {_num_episodes(rows[0])} episodes, {target:.1f} % on average.",
        f"{HEADING}, seeds are the draws.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (method, coefficient, accuracy), several in _by_judge(rows).items():
        of = [row for row in several if row.cell.seed in alone]
        needed = [episodes_to(row, targets[row.cell.seed]) for row in of]
        gains = [100 * (_mean(row) - _mean(alone[row.cell.seed])) for row in of]
        reached = sum(number < _num_episodes(row) for number, row in zip(needed, of, strict=True))
        judge = ("", "") if method == "outcome" else (f"{coefficient:g}", f"{100 * accuracy:.0f} %")
        cells = (
            f"`{method}`",
            *judge,
            str(len(of)),
            over_seeds(needed, ".0f"),
            f"{reached} of {len(of)}",
            over_seeds([100 * row.final.success for row in of]),
            f"{100 * statistics.fmean(map(_mean, of)):.1f}",
            "" if method == "outcome" else over_seeds(gains, "+.1f"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def smoothed(row: CellRow) -> list[tuple[int, float]]:
    """Step and success, each the mean of the evaluations around it; at an end, of those that there are."""
    points, reach = row.evaluations, SMOOTHED // 2
    near = [points[max(0, number - reach) : number + reach + 1] for number in range(len(points))]
    return [
        (one.step, statistics.fmean(each.success for each in around))
        for one, around in zip(points, near, strict=True)
    ]


def episodes_to(row: CellRow, target: float) -> float:
    """Training episodes until the smoothed curve first reaches `target`, between evaluations by a straight line; all of the run's
    if it never does.
    """
    curve = smoothed(row)
    for (step, success), (later, next_success) in itertools.pairwise(curve):
        if next_success >= target:
            way = max(0.0, target - success) / (next_success - success) if next_success > success else 0.0
            before, after = row.episodes_until(step), row.episodes_until(later)
            return before + (after - before) * way
    return float(_num_episodes(row))


def success_after(row: CellRow, num_episodes: float) -> float:
    """The smoothed success after this many training episodes, between evaluations by a straight line; that at the end if it has fewer."""
    curve = [(row.episodes_until(step), success) for step, success in smoothed(row)]
    for (before, success), (after, next_success) in itertools.pairwise(curve):
        if before <= num_episodes <= after:
            return success + (next_success - success) * (num_episodes - before) / (after - before)
    return curve[-1][1]


def draw(rows: Sequence[CellRow], picture: Path) -> None:
    """Write `picture` (PNG): held-out success by episodes, the mean of the seeds of each judge."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for (method, coefficient, accuracy), of in _by_judge(rows).items():
        points = list(zip(*(smoothed(row) for row in of), strict=True))
        label = method if method == "outcome" else f"{method} {coefficient:g}, right {100 * accuracy:.0f} %"
        axes.plot(
            [of[0].episodes_until(one[0][0]) for one in points],
            [statistics.fmean(success for _, success in one) for one in points],
            label=f"{label} ({len(of)})",
        )
    axes.set_xlabel("training episodes")
    axes.set_ylabel("held-out success")
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _by_judge(rows: Sequence[CellRow]) -> dict[Judge, list[CellRow]]:
    found: dict[Judge, list[CellRow]] = {}
    for row in rows:
        cell = row.cell
        found.setdefault((cell.credit, cell.coefficient, cell.accuracy), []).append(row)
    return dict(sorted(found.items(), key=lambda one: (one[0][0], one[0][1], -one[0][2])))


def _mean(row: CellRow) -> float:
    """The mean over all evaluations of a run: how early it rose and how high."""
    return statistics.fmean(one.success for one in row.evaluations)


def _num_episodes(row: CellRow) -> int:
    return row.episodes_until(row.settings.num_steps)
