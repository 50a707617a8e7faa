"""`python -m trainer.run RECIPE.toml`: one training run, on every rank of the learner.

Rank 0 asks, takes in, decides and publishes; the other ranks (torchrun starts them) follow its learner.
Exit status: 0 the run is finished, or was stopped in good order; 1 it ended without its steps; 2 misuse,
with what to change.
"""

import argparse
import asyncio
import contextlib
import fcntl
import logging
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainer.inputs import Inputs, describe, read_inputs
from trainer.recipe import Recipe, differences, load_recipe, to_toml
from trainer.settings import TrainerSettings, trainer_settings

if TYPE_CHECKING:
    from trainer.feed import Feed
    from trainer.loop import Ending, Loop
    from trainer.progress import Progress

FIXED = ("model", "seed", "tasks.train", "tasks.heldout", "rollout.group_size")
"""What a resumed run may not change: its data order, or the policy it began with."""


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: what makes a directory a run."""

    run_id: str
    started_at: float


@dataclass(frozen=True, slots=True)
class Place:
    """A run and its directory."""

    root: Path
    run_id: str


def main() -> int:
    arguments = _parse()
    try:
        settings = trainer_settings()
        recipe = load_recipe(arguments.recipe, arguments.set)
        if arguments.dry_run:
            return _dry_run(recipe)
        if settings.rank != 0:
            return follow(recipe, settings)
        inputs = read_inputs(recipe)
        place = _place(recipe, arguments)
        with sole_trainer(place.root):
            return _lead(recipe, inputs, place, settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trainer.run", description=__doc__)
    parser.add_argument("recipe", type=Path, help="a TOML file, as in trainer/recipes")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, as in learner.lr=2e-6"
    )
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


def _place(recipe: Recipe, arguments: argparse.Namespace) -> Place:
    """The run's directory, made or found. Raises ValueError where resuming and starting are mixed up."""
    if arguments.resume:
        if arguments.run_dir is None:
            raise ValueError("--resume needs --run-dir: the directory of the run to go on with")
        return _resumed_place(recipe, arguments.run_dir, arguments.run_id)
    run_id = arguments.run_id or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    root: Path = arguments.run_dir or Path("runs") / run_id
    if (root / "run.json").exists():
        raise ValueError(
            f"{root} holds a run already: add --resume to go on with it, or choose another --run-dir"
        )
    asyncio.run(_refuse_known(run_id))
    root.mkdir(parents=True, exist_ok=True)
    (root / "recipe.toml").write_text(to_toml(recipe))
    (root / "run.json").write_bytes(msgspec.json.encode(RunFile(run_id=run_id, started_at=time.time())))
    return Place(root.resolve(), run_id)


def _resumed_place(recipe: Recipe, root: Path, run_id: str | None) -> Place:
    try:
        run = msgspec.json.decode((root / "run.json").read_bytes(), type=RunFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{root} holds no run to resume ({error}); start it without --resume") from error
    if run_id not in (None, run.run_id):
        raise ValueError(f"{root} holds the run {run.run_id}, not {run_id}; leave --run-id out")
    changes = differences(load_recipe(root / "recipe.toml"), recipe)
    for change in changes:
        if change.startswith(FIXED):
            raise ValueError(f"a resumed run cannot change {change}; start a new one for that")
        print(f"changed since the run began: {change}")
    if changes:
        (root / "recipe.toml").replace(root / "recipe.before.toml")
        (root / "recipe.toml").write_text(to_toml(recipe))
    return Place(root.resolve(), run.run_id)


async def _refuse_known(run_id: str) -> None:
    """A new run must not take up an older one's requests. Raises ValueError, also where Redis cannot be
    reached.
    """
    from pipeline import keys
    from trainer.assembly import connect

    redis = await connect()
    async with contextlib.aclosing(redis):
        if await redis.exists(keys.stream(run_id), keys.weights(run_id)):
            raise ValueError(f"Redis knows a run {run_id} already: resume it, or choose another --run-id")


@contextlib.contextmanager
def sole_trainer(root: Path) -> Iterator[None]:
    """Two trainers of one run would tear it apart. Raises ValueError if there is one already."""
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another trainer works in {root}; stop it first") from error
        yield


def follow(recipe: Recipe, settings: TrainerSettings) -> int:
    """Ranks above 0: do with the learner what rank 0 does, until it stops. Signals are for rank 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    make_feed(recipe, settings).follow()
    return 0


def make_feed(recipe: Recipe, settings: TrainerSettings) -> "Feed":
    warnings.filterwarnings("ignore", module=r"megatron\.")  # what it is built without, at every start
    from trainer.feed import Feed
    from trainer.learner import backend
    from trainer.learner.megatron import Learner

    backend.join(rank=settings.rank, world_size=settings.world_size, local_rank=settings.local_rank)
    return Feed(Learner(recipe.learner, model_directory=Path(recipe.model)))


def _lead(recipe: Recipe, inputs: Inputs, place: Place, settings: TrainerSettings) -> int:
    """Rank 0: the whole run, then its report."""
    from pipeline.settings import telemetry_settings
    from pipeline.telemetry import start_telemetry
    from trainer.progress import open_progress

    provider = start_telemetry("trainer", telemetry_settings())
    try:
        with open_progress(sys.stdout) as progress:
            logging.basicConfig(level=logging.WARNING, handlers=[progress.log_handler()], force=True)
            logging.getLogger("swerve").setLevel(logging.INFO)
            ending = asyncio.run(_conduct(recipe, place, settings, progress, inputs))
    finally:
        provider.shutdown()
    print(f"{place.run_id}: {ending}")
    return _account(place) or (1 if ending in ("nothing to learn", "failing") else 0)


def _account(place: Place) -> int:
    """The report and the reward curve; 1 if the books do not balance."""
    from trainer.curve import draw
    from trainer.report import report_on, table

    journal, picture = place.root / "journal", place.root / "curve.png"
    report = report_on(journal)
    print(table(report, place.root))
    if report.episodes:
        draw(journal, picture, title=place.run_id)
        print(picture)
    return 0 if report.healthy else 1


async def _conduct(
    recipe: Recipe, place: Place, settings: TrainerSettings, progress: "Progress", inputs: Inputs
) -> "Ending":
    from trainer.assembly import assembled

    async with assembled(
        recipe,
        inputs,
        root=place.root,
        run_id=place.run_id,
        router_url=settings.router_url,
        progress=progress,
        make_feed=lambda: make_feed(recipe, settings),
    ) as loop:
        _obey_signals(loop)
        return await loop.run()


def _obey_signals(loop: "Loop") -> None:
    """The first signal stops in good order; the next one does what it does by default."""
    running = asyncio.get_running_loop()

    def obey(number: signal.Signals) -> None:
        running.remove_signal_handler(number)
        loop.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, obey, number)


if __name__ == "__main__":
    sys.exit(main())
