"""Process set-up shared by all commands that run a learner: misuse is reported in one line, every rank gets its learner, the
first signal ends the run in good order, and the log goes to the console.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from trainer.recipe import Recipe
from trainer.settings import TrainerSettings, trainer_settings

if TYPE_CHECKING:
    from trainer.feed import Feed
    from trainer.records.console import Console

MISUSE = 2


def recipe_parser(module: str, description: str | None, *, example: str) -> argparse.ArgumentParser:
    """A parser that takes a recipe and overrides of its keys; `example` is such an override."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("recipe", type=Path, help="the recipe, a TOML file as in trainer/recipes")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"override one key of the recipe, as in {example}; may be repeated",
    )
    return parser


def exit_status(command: Callable[[TrainerSettings], int]) -> int:
    """What `command` returns. If it raises ValueError: MISUSE, with the error as one line on stderr."""
    try:
        return command(trainer_settings())
    except ValueError as error:
        print("error:", " ".join(line.strip() for line in str(error).splitlines()), file=sys.stderr)
        return MISUSE


def check_processes(recipe: Recipe, settings: TrainerSettings) -> None:
    """Raises ValueError unless torchrun started as many processes as the learner's layout needs, or a multiple."""
    learner = recipe.learner
    if settings.world_size % learner.replica_processes:
        raise ValueError(
            f"learner.tensor_parallel = {learner.tensor_parallel}, learner.pipeline_parallel = {learner.pipeline_parallel} "
            f"and learner.context_parallel = {learner.context_parallel} need {learner.replica_processes} processes or a "
            f"multiple, not {settings.world_size}: start them with `torchrun --nproc-per-node`, or lower one"
        )


def make_feed(recipe: Recipe, settings: TrainerSettings) -> "Feed":
    """The learner of this rank, connected with those of the other ranks."""
    # At every start it lists the optional packages that it was built without.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    from trainer.feed import Feed
    from trainer.learner import backend
    from trainer.learner.megatron import Learner

    backend.join(rank=settings.rank, world_size=settings.world_size, local_rank=settings.local_rank)
    learner = Learner(
        recipe.learner, model_directory=Path(recipe.model), keep_tokens=recipe.rollouts.keeps_tokens
    )
    return Feed(learner)


def follow(recipe: Recipe, settings: TrainerSettings) -> int:
    """Ranks above 0: repeat what rank 0 does with its learner, until rank 0 stops. Only rank 0 handles signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    make_feed(recipe, settings).follow()
    return 0


@contextlib.contextmanager
def console_on(screen: TextIO) -> "Iterator[Console]":
    """A console on `screen`; log records appear among its lines."""
    from trainer.records.console import open_console

    with open_console(screen) as console:
        logging.basicConfig(level=logging.WARNING, handlers=[console.log_handler()], force=True)
        yield console


def stop_on_signal(stop: Callable[[], None]) -> None:
    """Call `stop` on the first SIGINT or SIGTERM; a second one has its default effect. Call this inside the event loop."""
    running = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        running.remove_signal_handler(number)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, handle, number)
