"""What a curriculum, several passes and group sizes by success rate save: `python -m benchmarks.curriculum [--jobs N]`, then `--table`.

Trains the demo's policy in simulation (benchmarks/simulation) on a fixed set of tasks, in turn and drawn by their signal, with one or
several passes over each batch. `--sizes 0 16` adds runs in the plain order whose groups have up to 16 members, by the estimated success
rate of their task. The table has the groups without signal, success after as many episodes as the plain order has in all with one pass and
fixed groups, and the training episodes until held-out success first reaches what that run has at its end, with t intervals over seeds at
95 %. Cells that the results file holds are skipped; `--table` only reads.
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
    add(
        "--sizes",
        nargs="+",
        type=int,
        default=(0,),
        metavar="N",
        help="largest sizes of a group, as curriculum.max_group_size; 0: all groups have as many members, which is the default",
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
        num_passes, order, largest = _kind(row)
        print(
            f"{num_passes} passes {order} groups of {_members(row.settings, largest)} "
            f"seed {row.cell.seed}: success {curve}  cpu {row.cpu_s} s",
            flush=True,
        )
    return 0


def table(rows: "Sequence[CellRow]") -> str:
    """A line for each number of passes, order of tasks and sizes of groups: means over seeds, with their intervals."""
    from benchmarks.simulation.credit_tables import episodes_to, smoothed, success_after
    from benchmarks.simulation.results import over_seeds

    plain = {row.cell.seed: row for row in rows if _kind(row) == (1, "plain", 0)}
    lines = [
        f"{HEADING}, seeds are the draws",
        "",
        "| passes | order | members | seeds | groups without signal, % | success at the end, % | at equal episodes, % | episodes "
        "| share of 1 pass, plain |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in sorted({_kind(row) for row in rows}):
        num_passes, order, largest = kind
        of = [row for row in rows if _kind(row) == kind and row.cell.seed in plain]
        needed, shares, equal = [], [], []
        for row in of:
            reference = plain[row.cell.seed]
            _, end = smoothed(reference)[-1]
            needed.append(episodes_to(row, end))
            equal.append(100 * success_after(row, reference.episodes_until(reference.settings.num_steps)))
            if in_turn := episodes_to(reference, end):
                shares.append(needed[-1] / in_turn)
        cells = (
            over_seeds([100 * _share_without_signal(row) for row in of]),
            over_seeds([100 * row.final.success for row in of]),
            over_seeds(equal),
            over_seeds(needed, ".0f"),
            over_seeds(shares, ".2f"),
        )
        members = _members(rows[0].settings, largest)
        lines.append(f"| {' | '.join((str(num_passes), order, members, str(len(of)), *cells))} |")
    return "\n".join(lines)


def _share_without_signal(row: "CellRow") -> float:
    return 1 - sum(row.steps.num_groups) / (len(row.steps.num_groups) * row.settings.groups_per_step)


def _kind(row: "CellRow") -> tuple[int, str, int]:
    """The number of passes, the order of tasks and the largest size of a group, 0 if all groups have one size."""
    return row.cell.num_epochs, "signal" if row.cell.is_curriculum else "plain", row.cell.max_group_size


def _members(settings: "Settings", largest: int) -> str:
    return f"{settings.group_size} to {largest}" if largest else str(settings.group_size)


def _settings(options: argparse.Namespace) -> "Settings":
    from benchmarks.simulation.cell import Settings

    if options.short:
        return Settings(num_steps=2, num_heldout=8, evaluate_every=2, num_tasks=options.tasks)
    return Settings(num_steps=options.steps, num_tasks=options.tasks, evaluate_every=5)


def _cells(options: argparse.Namespace) -> "list[Cell]":
    from benchmarks.simulation.cell import Cell

    return [
        Cell(
            objective="stream_grpo",
            lag=LAG,
            seed=seed,
            num_epochs=num_passes,
            is_curriculum=is_curriculum,
            max_group_size=largest,
        )
        for seed in options.seeds
        for num_passes in options.passes
        for largest in options.sizes
        for is_curriculum in ((False,) if largest else (False, True))
    ]


if __name__ == "__main__":
    sys.exit(main())
