"""What stale samples do to each objective: `python -m benchmarks.staleness [--jobs N]`, then `--table`.

Trains the demo's policy in simulation (benchmarks/simulation) for each objective, lag, seed and kind of failure. Cells that the
results file holds are skipped, so an interrupted command goes on where it was. `--table` only reads: it prints tables in Markdown
and draws the picture beside the file.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from benchmarks.simulation.command import add_run_arguments, prepare_process
from benchmarks.simulation.failures import FAILURES
from trainer.learner.config import LossKind

if TYPE_CHECKING:
    from benchmarks.simulation.cell import Cell, CellRow, Settings

RESULTS = Path("docs/learning/staleness.jsonl")
FIRST: tuple[LossKind, ...] = ("stream_grpo", "reinforce", "grpo")
OBJECTIVES = (*FIRST, *(kind for kind in get_args(LossKind) if kind not in (*FIRST, "sft")))
LAGS = (0, 2, 4, 8, 16)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    prepare_process()

    from benchmarks.simulation.results import read

    try:
        rows = [row for row in read(options.results) if row.settings == _settings(options)]
    except ValueError as error:
        parser.error(str(error))
    if not options.table:
        _run(options, rows)
    elif not rows:
        parser.error(
            f"--table: {options.results} holds no finished cell; run the command without --table first"
        )
    else:
        _print_table(rows, options.results.with_suffix(".png"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.staleness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--objectives",
        nargs="+",
        choices=OBJECTIVES,
        default=OBJECTIVES,
        metavar="KIND",
        help="default: all but sft",
    )
    add("--lags", nargs="+", type=int, default=LAGS, metavar="VERSIONS", help="default %(default)s")
    add("--seeds", nargs="+", type=int, default=(0, 1, 2), metavar="SEED", help="default %(default)s")
    add(
        "--failures",
        nargs="+",
        choices=FAILURES,
        default=("none", "random"),
        help="how 10 %% of the episodes fail",
    )
    add(
        "--updates",
        type=int,
        default=1,
        metavar="N",
        help="updates of a step, each on a part of its trajectories; from 2 on, clips and proximal policies act; default %(default)s",
    )
    add(
        "--controlled",
        action="store_true",
        help="let a run's controller choose the lag, up to each of --lags",
    )
    add_run_arguments(parser, results=RESULTS)
    return parser


def _run(options: argparse.Namespace, rows: "Sequence[CellRow]") -> None:
    from benchmarks.simulation.results import missing, run

    settings = _settings(options)
    cells = missing(_cells(options), settings, rows)
    for row in run(cells, settings, options.results, jobs=options.jobs):
        curve = " ".join(f"{100 * one.success:.0f}" for one in row.evaluations)
        cell = row.cell
        lag = f"{'up to ' * cell.is_controlled}{cell.lag}"
        print(
            f"{cell.objective} lag {lag} seed {cell.seed} failures {cell.failures} updates {cell.num_minibatches}: success {curve}  "
            f"cpu {row.cpu_s} s",
            flush=True,
        )


def _settings(options: argparse.Namespace) -> "Settings":
    from benchmarks.simulation.cell import Settings

    if options.short:
        return Settings(num_steps=2, num_heldout=8, evaluate_every=2)
    return Settings(num_steps=options.steps)


def _cells(options: argparse.Namespace) -> "list[Cell]":
    from benchmarks.simulation.cell import Cell

    return [
        Cell(
            objective=objective,
            lag=lag,
            seed=seed,
            failures=failures,
            num_minibatches=options.updates,
            is_controlled=options.controlled,
        )
        for failures in options.failures
        for seed in options.seeds
        for objective in options.objectives
        for lag in options.lags
    ]


def _print_table(rows: "Sequence[CellRow]", picture: Path) -> None:
    from benchmarks.simulation.picture import draw
    from benchmarks.simulation.tables import control_table, tables

    fixed = [row for row in rows if not row.cell.is_controlled]
    if fixed:
        draw(fixed, picture)
        print(tables(fixed))
    print(control_table(rows))
    print(picture, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
