"""`python -m trainer.replay RUN_DIR --steps 10..20`: the kept rollouts of a run through the learner again, without a fleet.

With the run's own recipe the steps come out bit for bit as they were, on a CPU in the layout of the run. With `--set`, as in
`--set learner.loss.kind=cispo`, they are taken under both recipes, from the same weights, and shown side by side. The replay begins
at the newest checkpoint before the first step, or at the starting weights, and takes the steps in between with the run's recipe.

The rollouts stay those of the run: the further B moves from the weights that sampled them, the lower its ess_share, and the less it
says. Exit status: 0 done; 1 a step is not what it was; 2 misuse.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from trainer import process
from trainer.recipe import Recipe, differences, load_recipe
from trainer.records.run_directory import RECIPE
from trainer.replay.comparison import ReplayedStep, beside_the_run, side_by_side
from trainer.replay.kept_run import KeptRun
from trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from trainer.feed import Feed

REPLAYABLE = ("learner.", "batch.advantage:", "credit.")
"""What a replay can change: all else was decided when the rollouts were played."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return process.exit_status(lambda settings: _replay(options, settings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, as in runs/demo"
    )
    parser.add_argument(
        "--steps", default="..", metavar="FIRST..LAST", help="10..20, 10.., ..20 or 10; default all"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key of learner or credit, or batch.advantage, and compare; may be repeated",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write the weights after the last step, with --set those of B",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per step instead of the table"
    )
    return parser


def _replay(options: argparse.Namespace, settings: TrainerSettings) -> int:
    run = KeptRun(options.run_dir)
    changed = load_recipe(run.root / RECIPE, options.set)
    changes = differences(run.recipe, changed)
    for change in changes:
        if not change.startswith(REPLAYABLE):
            raise ValueError(
                f"a replay cannot change {change}: the rollouts are played; it can change learner.*, credit.* and batch.advantage"
            )
    if options.set and not changes:
        raise ValueError(f"--set {' '.join(options.set)}: the run was like that already")
    recipes = [_without_snapshots(recipe) for recipe in ([run.recipe, changed] if changes else [run.recipe])]
    for recipe in recipes:
        process.check_processes(recipe, settings)
    if settings.rank != 0:
        return [process.follow(recipe, settings) for recipe in recipes][-1]
    steps = _steps(options.steps, run.num_steps)
    replayed = _replayed(run, recipes, steps, settings, options.export)
    if options.json:
        for name, found in zip("AB", replayed, strict=False):
            for step in found:
                print(
                    msgspec.json.encode(
                        {"recipe": name, "step": step.row.step, "metrics": step.metrics}
                    ).decode()
                )
    elif changes:
        print("\n".join(side_by_side(replayed[0], replayed[1], changes)))
    else:
        print("\n".join(beside_the_run(replayed[0])))
    return 1 if any(step.differing for step in replayed[0]) else 0


def _without_snapshots(recipe: Recipe) -> Recipe:
    """A replay audits nothing."""
    return replace(recipe, learner=replace(recipe.learner, snapshots_kept=0))


def _steps(text: str, last: int) -> range:
    """The steps of "10..20", "10..", "..20" or "10". Raises ValueError."""
    first, dots, end = text.partition("..")
    if not dots:
        end = first
    if not all(part.isdecimal() for part in (first, end) if part) or text == "":
        raise ValueError(f"--steps {text!r}: write it as 10..20, 10.., ..20 or 10")
    chosen = range(int(first or 1), int(end or last) + 1)
    if not chosen or chosen[0] < 1 or chosen[-1] > last:
        raise ValueError(f"--steps {text}: the run has taken the steps 1..{last}")
    return chosen


def _replayed(
    run: KeptRun, recipes: Sequence[Recipe], steps: range, settings: TrainerSettings, export: Path | None
) -> list[list[ReplayedStep]]:
    """The steps under each recipe, from the same weights."""
    begin, start = run.checkpoint_before(steps[0])
    replayed: list[list[ReplayedStep]] = []
    with contextlib.ExitStack() as stack:
        for recipe in recipes:
            feed = process.make_feed(recipe, settings)
            if start is not None:
                feed.restore(start)
            lead = range(begin + 1, steps[0])
            if lead:
                print(f"taking steps {lead[0]} to {lead[-1]} first, as the run did", file=sys.stderr)
                list(_take(feed, run, recipe, lead))
                if len(recipes) > 1:
                    begin, start = lead[-1], _saved(feed, Path(stack.enter_context(_directory_in(run.root))))
            replayed.append(list(_take(feed, run, recipe, steps)))
            if export is not None and recipe is recipes[-1]:
                feed.export(export)
            feed.stop()
    return replayed


def _take(feed: "Feed", run: KeptRun, recipe: Recipe, steps: range) -> Iterator[ReplayedStep]:
    for step in steps:
        yield ReplayedStep(run.row(step), feed.step(run.batch(step, recipe.batch.advantage, recipe.credit)))


def _directory_in(root: Path) -> "tempfile.TemporaryDirectory[str]":
    """For a checkpoint that all ranks read: removed afterwards."""
    try:
        return tempfile.TemporaryDirectory(prefix=".replay-", dir=root)
    except OSError as error:
        raise ValueError(
            f"{root} cannot be written ({error.strerror}); a checkpoint for B belongs there"
        ) from error


def _saved(feed: "Feed", directory: Path) -> Path:
    place = directory / "checkpoint"
    feed.begin_save(place, b"")
    feed.finish_save()
    return place


if __name__ == "__main__":
    sys.exit(main())
