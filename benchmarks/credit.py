"""What a judge of steps is worth: `python -m benchmarks.credit [--jobs N]`, then `--table`.

Trains the demo's policy in simulation (benchmarks/simulation) with the outcome alone, and with the scores of a judge that knows the
task's bug and is right so often. The table says how many episodes each needs to reach the final held-out success of the outcome
alone. Cells that the results file holds are skipped; `--table` only reads.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from benchmarks.simulation.command import add_run_arguments, prepare_process
from trainer.recipe import CreditMethod, CreditRecipe

if TYPE_CHECKING:
    from benchmarks.simulation.cell import Cell, CellRow, Settings

RESULTS = Path("docs/learning/credit.jsonl")
METHODS: tuple[CreditMethod, ...] = tuple(
    method for method in get_args(CreditMethod) if not CreditRecipe(method=method).distills
)
LAG = 1  # as in the demo


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
    elif not any(row.cell.credit == "outcome" for row in rows):
        parser.error(
            f"--table: {options.results} holds no run with the outcome alone; run the command without --table first"
        )
    else:
        _print_table(rows, options.results.with_suffix(".png"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.credit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=("outcome", "outcome_then_steps"),
        metavar="METHOD",
        help="default %(default)s",
    )
    add("--coefficients", nargs="+", type=float, default=(0.1,), metavar="C", help="default %(default)s")
    add(
        "--accuracies", nargs="+", type=float, default=(0.8, 0.6, 0.5), metavar="P",
        help="share of the judge's scores that are right; 0.5 is a judge that answers at random",
    )  # fmt: skip
    add("--seeds", nargs="+", type=int, default=(0, 1, 2, 3, 4), metavar="SEED", help="default %(default)s")
    add_run_arguments(parser, results=RESULTS)
    return parser


def _run(options: argparse.Namespace, rows: "Sequence[CellRow]") -> None:
    from benchmarks.simulation.results import missing, run

    settings = _settings(options)
    cells = missing(_cells(options), settings, rows)
    for row in run(cells, settings, options.results, jobs=options.jobs):
        curve = " ".join(f"{100 * one.success:.0f}" for one in row.evaluations)
        cell = row.cell
        judge = f"{cell.credit} {cell.coefficient} accuracy {cell.accuracy}"
        print(f"{judge} seed {cell.seed}: success {curve}  cpu {row.cpu_s} s", flush=True)


def _settings(options: argparse.Namespace) -> "Settings":
    from benchmarks.simulation.cell import Settings

    if options.short:
        return Settings(num_steps=2, num_heldout=8, evaluate_every=2)
    return Settings(num_steps=options.steps, evaluate_every=4)


def _cells(options: argparse.Namespace) -> "list[Cell]":
    """The cells ordered by seed, so that early results cover every method; the outcome alone has no judge to vary."""
    from benchmarks.simulation.cell import Cell

    cells = [
        Cell(objective="stream_grpo", lag=LAG, seed=seed)
        if method == "outcome"
        else Cell(
            objective="stream_grpo",
            lag=LAG,
            seed=seed,
            credit=method,
            coefficient=coefficient,
            accuracy=accuracy,
        )
        for seed in options.seeds
        for method in options.methods
        for coefficient in options.coefficients
        for accuracy in options.accuracies
    ]
    return list(dict.fromkeys(cells))


def _print_table(rows: "Sequence[CellRow]", picture: Path) -> None:
    from benchmarks.simulation.credit_tables import draw, table

    draw(rows, picture)
    print(table(rows))
    print(picture, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
