"""`python -m trainer.run RECIPE.toml`: one training run, on every rank of the learner.

Rank 0 asks, takes in, decides and publishes; the other ranks (torchrun starts them) follow its learner.
Exit status: 0 the run is finished, or was stopped in good order; 1 it ended without its steps; 2 misuse,
with what to change.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainer import process
from trainer.inputs import Inputs, describe, read_inputs
from trainer.recipe import Recipe, differences, load_recipe, to_toml
from trainer.records.run_directory import RECIPE, RUN_FILE, RunDirectory, RunFile, sole_trainer
from trainer.settings import TrainerSettings

if TYPE_CHECKING:
    from trainer.loop.loop import Ending
    from trainer.records.console import Console

FIXED = ("model", "seed", "tasks.train", "tasks.heldout", "rollout.group_size")
"""What a resumed run may not change: its data order, or the policy it began with."""


def main() -> int:
    arguments = _parse()
    return process.exit_status(lambda settings: _run(arguments, settings))


def _run(arguments: argparse.Namespace, settings: TrainerSettings) -> int:
    recipe = load_recipe(arguments.recipe, arguments.set)
    if arguments.dry_run:
        return _dry_run(recipe)
    if settings.rank != 0:
        return process.follow(recipe, settings)
    inputs = read_inputs(recipe)
    place = _place(recipe, arguments)
    with sole_trainer(place.root):
        ending = _lead(recipe, inputs, place, settings)
    print(f"{place.run_id}: {ending}")
    is_accounted_for = _report(place)
    return 0 if is_accounted_for and ending in ("finished", "stopped") else 1


def _parse() -> argparse.Namespace:
    parser = process.recipe_parser("trainer.run", __doc__, example="learner.lr=2e-6")
    parser.add_argument(
        "--run-dir", type=Path, help="where everything of the run is kept; default runs/RUN_ID"
    )
    parser.add_argument("--run-id", help="its name in Redis; default the recipe's name and the time")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --run-dir, from its newest checkpoint"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved recipe and the plan; touch nothing"
    )
    return parser.parse_args()


def _dry_run(recipe: Recipe) -> int:
    print(to_toml(recipe))
    print(describe(recipe, read_inputs(recipe)))
    return 0


def _place(recipe: Recipe, arguments: argparse.Namespace) -> RunDirectory:
    """The run's directory, made or found. Raises ValueError where resuming and starting are mixed up."""
    if arguments.resume:
        if arguments.run_dir is None:
            raise ValueError("--resume needs --run-dir: the directory of the run to go on with")
        return _resumed_place(recipe, arguments.run_dir, arguments.run_id)
    run_id = arguments.run_id or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    root: Path = arguments.run_dir or Path("runs") / run_id
    if (root / RUN_FILE).exists():
        raise ValueError(
            f"{root} holds a run already: add --resume to go on with it, or choose another --run-dir"
        )
    asyncio.run(_refuse_known(run_id))
    root.mkdir(parents=True, exist_ok=True)
    (root / RECIPE).write_text(to_toml(recipe))
    (root / RUN_FILE).write_bytes(msgspec.json.encode(RunFile(run_id=run_id, started_at=time.time())))
    return RunDirectory(root.resolve(), run_id)


def _resumed_place(recipe: Recipe, root: Path, run_id: str | None) -> RunDirectory:
    try:
        run = msgspec.json.decode((root / RUN_FILE).read_bytes(), type=RunFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{root} holds no run to resume ({error}); start it without --resume") from error
    if run_id not in (None, run.run_id):
        raise ValueError(f"{root} holds the run {run.run_id}, not {run_id}; leave --run-id out")
    changes = differences(load_recipe(root / RECIPE), recipe)
    for change in changes:
        if change.startswith(FIXED):
            raise ValueError(f"a resumed run cannot change {change}; start a new one for that")
        print(f"changed since the run began: {change}")
    if changes:
        (root / RECIPE).replace(root / "recipe.before.toml")
        (root / RECIPE).write_text(to_toml(recipe))
    return RunDirectory(root.resolve(), run.run_id)


async def _refuse_known(run_id: str) -> None:
    """A new run must not take up an older one's requests. Raises ValueError, also where Redis cannot be
    reached.
    """
    from pipeline import keys
    from trainer.loop.assembly import connect

    redis = await connect()
    async with contextlib.aclosing(redis):
        if await redis.exists(keys.stream(run_id), keys.weights(run_id)):
            raise ValueError(f"Redis knows a run {run_id} already: resume it, or choose another --run-id")


def _lead(recipe: Recipe, inputs: Inputs, place: RunDirectory, settings: TrainerSettings) -> "Ending":
    """The whole run, on rank 0."""
    from pipeline.settings import telemetry_settings
    from pipeline.telemetry import start_telemetry

    provider = start_telemetry("trainer", telemetry_settings())
    try:
        with process.shown_on(sys.stdout) as progress:
            logging.getLogger("swerve").setLevel(logging.INFO)
            return asyncio.run(_conduct(recipe, place, settings, progress, inputs))
    finally:
        provider.shutdown()


def _report(place: RunDirectory) -> bool:
    """Print the report and draw the reward curve. Returns whether every request is accounted for."""
    from trainer.records.reward_curve import draw
    from trainer.records.summary import summarize, table

    journal, picture = place.root / "journal", place.root / "curve.png"
    summary = summarize(place.root)
    print(table(summary, place.root))
    if summary.episodes:
        draw(journal, picture, title=place.run_id)
        print(picture)
    return summary.is_accounted_for


async def _conduct(
    recipe: Recipe, place: RunDirectory, settings: TrainerSettings, progress: "Console", inputs: Inputs
) -> "Ending":
    from trainer.loop.assembly import assembled

    async with assembled(
        recipe,
        inputs,
        root=place.root,
        run_id=place.run_id,
        router_url=settings.router_url,
        progress=progress,
        make_feed=lambda: process.make_feed(recipe, settings),
    ) as loop:
        process.obey_signals(loop.stop)
        return await loop.run()


if __name__ == "__main__":
    sys.exit(main())
