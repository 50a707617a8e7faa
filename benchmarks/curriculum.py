"""What a curriculum and several passes save: `python -m benchmarks.curriculum [--jobs N]`, then `--table`.

Trains the demo's policy in simulation (benchmarks/simulation) on a fixed set of tasks, in turn and drawn by their signal, with one or
several passes over each batch. The table has the groups without signal, and the training episodes until held-out success first reaches what
the plain order has with one pass at its end, with t intervals over seeds at 95 %. Cells that the results file holds are skipped; `--table`
only reads.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.simulation.command import add_run_arguments, prepare_process
from pipeline.intervals import HEADING

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
    add(
        "--passes",
        nargs="+",
        type=int,
        default=(1, 2, 4),
        metavar="N",
        help="passes over each batch; default 1 2 4",
    )
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
        num_passes, order = _kind(row)
        print(
            f"{num_passes} passes {order} seed {row.cell.seed}: success {curve}  cpu {row.cpu_s} s",
            flush=True,
        )
    return 0


def table(rows: "Sequence[CellRow]") -> str:
    """A line for each number of passes and order of tasks: means over seeds, with their intervals."""
    from benchmarks.simulation.credit_tables import episodes_to, smoothed
    from benchmarks.simulation.results import over_seeds

    plain = {row.cell.seed: row for row in rows if _kind(row) == (1, "plain")}
    lines = [
        f"{HEADING}, seeds are the draws",
        "",
        "| passes | order | seeds | groups without signal, % | success at the end, % | episodes | share of 1 pass, plain |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    for num_passes, order in sorted({_kind(row) for row in rows}):
        of = [row for row in rows if _kind(row) == (num_passes, order) and row.cell.seed in plain]
        needed, shares = [], []
        for row in of:
            reference = plain[row.cell.seed]
            _, end = smoothed(reference)[-1]
            needed.append(episodes_to(row, end))
            if in_turn := episodes_to(reference, end):
                shares.append(needed[-1] / in_turn)
        cells = (
            over_seeds([100 * _share_without_signal(row) for row in of]),
            over_seeds([100 * row.final.success for row in of]),
            over_seeds(needed, ".0f"),
            over_seeds(shares, ".2f"),
        )
        lines.append(f"| {' | '.join((str(num_passes), order, str(len(of)), *cells))} |")
    return "\n".join(lines)


def _share_without_signal(row: "CellRow") -> float:
    return 1 - sum(row.steps.num_groups) / (len(row.steps.num_groups) * row.settings.groups_per_step)


def _kind(row: "CellRow") -> tuple[int, str]:
    """The number of passes and the order of tasks."""
    return row.cell.num_epochs, "signal" if row.cell.is_curriculum else "plain"


def _settings(options: argparse.Namespace) -> "Settings":
    from benchmarks.simulation.cell import Settings

    if options.short:
        return Settings(num_steps=2, num_heldout=8, evaluate_every=2, num_tasks=options.tasks)
    return Settings(num_steps=options.steps, num_tasks=options.tasks, evaluate_every=5)


def _cells(options: argparse.Namespace) -> "list[Cell]":
    from benchmarks.simulation.cell import Cell

    return [
        Cell(objective="stream_grpo", lag=LAG, seed=seed, num_epochs=num_passes, is_curriculum=is_curriculum)
        for seed in options.seeds
        for num_passes in options.passes
        for is_curriculum in (False, True)
    ]


if __name__ == "__main__":
    sys.exit(main())
