"""What a curriculum saves: `python -m benchmarks.curriculum [--jobs N]`, then `--table`.

Trains the demo's policy in simulation (benchmarks/simulation) on a fixed set of tasks, in turn and drawn by their signal. The table has the
groups without signal, and the episodes that each needs to reach the final held-out success of the plain order. Cells that the results file
holds are skipped; `--table` only reads.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.simulation.command import add_run_arguments, prepare_process

if TYPE_CHECKING:
    from benchmarks.simulation.cell import Cell, CellRow, Settings

RESULTS = Path("docs/learning/curriculum.jsonl")
LAG = 1  # as in the demo


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.curriculum",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tasks", type=int, default=64, metavar="N", help="training tasks; default %(default)s")
    add("--seeds", nargs="+", type=int, default=(0, 1, 2), metavar="SEED", help="default %(default)s")
    add_run_arguments(parser, results=RESULTS)
    options = parser.parse_args(argv)
    prepare_process()

    from benchmarks.simulation.results import missing, read, run

    settings = _settings(options)
    try:
        rows = [row for row in read(options.results) if row.settings == settings]
    except ValueError as error:
        parser.error(str(error))
    if options.table:
        if not rows:
            parser.error(
                f"--table: {options.results} holds no finished cell; run the command without --table first"
            )
        print(table(rows))
        return 0
    for row in run(missing(_cells(options), settings, rows), settings, options.results, jobs=options.jobs):
        curve = " ".join(f"{100 * one.success:.0f}" for one in row.evaluations)
        print(f"{_name(row)} seed {row.cell.seed}: success {curve}  cpu {row.cpu_s} s", flush=True)
    return 0


def table(rows: "Sequence[CellRow]") -> str:
    """A line for each order of tasks, with means over seeds and their standard errors."""
    from benchmarks.simulation.credit_tables import episodes_to, smoothed
    from benchmarks.simulation.results import estimate

    plain = {row.cell.seed: row for row in rows if not row.cell.is_curriculum}
    lines = [
        "| order | seeds | groups without signal | success at the end | episodes to the plain order's end | share of the plain order's |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in ("plain", "signal"):
        of = [row for row in rows if _name(row) == name and row.cell.seed in plain]
        if not of:
            continue
        needed = [episodes_to(row, smoothed(plain[row.cell.seed])[-1][1]) for row in of]
        shares = [
            one / episodes_to(plain[row.cell.seed], smoothed(plain[row.cell.seed])[-1][1])
            for one, row in zip(needed, of, strict=True)
        ]
        without = [
            1 - sum(row.steps.num_groups) / (len(row.steps.num_groups) * row.settings.groups_per_step)
            for row in of
        ]
        success = estimate([row.final.success for row in of], of[0].final.num_episodes)
        cells = (
            name,
            str(len(of)),
            f"{100 * statistics.fmean(without):.1f} %",
            str(success),
            f"{statistics.fmean(needed):.0f}",
            f"{statistics.fmean(shares):.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _name(row: "CellRow") -> str:
    return "signal" if row.cell.is_curriculum else "plain"


def _settings(options: argparse.Namespace) -> "Settings":
    from benchmarks.simulation.cell import Settings

    if options.short:
        return Settings(num_steps=2, num_heldout=8, evaluate_every=2, num_tasks=options.tasks)
    return Settings(num_steps=options.steps, num_tasks=options.tasks, evaluate_every=5)


def _cells(options: argparse.Namespace) -> "list[Cell]":
    from benchmarks.simulation.cell import Cell

    return [
        Cell(objective="stream_grpo", lag=LAG, seed=seed, is_curriculum=is_curriculum)
        for seed in options.seeds
        for is_curriculum in (False, True)
    ]


if __name__ == "__main__":
    sys.exit(main())
