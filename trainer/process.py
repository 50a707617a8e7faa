"""What every command with a learner is as a process: misuse told in one line, the learner on every rank, one trainer to a
directory, a first signal that ends it in good order, and a log on the screen.
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
    """With the recipe and what is changed in it; `example` is of such a change."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("recipe", type=Path, help="a TOML file, as in trainer/recipes")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help=f"override, as in {example}"
    )
    return parser


def exit_status(command: Callable[[TrainerSettings], int]) -> int:
    """What `command` returns; MISUSE, with what to change on stderr, if it raises ValueError."""
    try:
        return command(trainer_settings())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISUSE


def make_feed(recipe: Recipe, settings: TrainerSettings) -> "Feed":
    """This rank's learner, joined with the others'."""
    warnings.filterwarnings("ignore", module=r"megatron\.")  # what it is built without, at every start
    from trainer.feed import Feed
    from trainer.learner import backend
    from trainer.learner.megatron import Learner

    backend.join(rank=settings.rank, world_size=settings.world_size, local_rank=settings.local_rank)
    return Feed(Learner(recipe.learner, model_directory=Path(recipe.model)))


def follow(recipe: Recipe, settings: TrainerSettings) -> int:
    """Ranks above 0: do with the learner what rank 0 does, until it stops. Signals are for rank 0."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    make_feed(recipe, settings).follow()
    return 0


@contextlib.contextmanager
def shown_on(screen: TextIO) -> "Iterator[Console]":
    """The progress of what is done, with the log among its lines."""
    from trainer.records.console import open_console

    with open_console(screen) as progress:
        logging.basicConfig(level=logging.WARNING, handlers=[progress.log_handler()], force=True)
        yield progress


def obey_signals(stop: Callable[[], None]) -> None:
    """The first signal calls `stop`; the next one does what it does by default. To be called in the event loop."""
    running = asyncio.get_running_loop()

    def obey(number: signal.Signals) -> None:
        running.remove_signal_handler(number)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, obey, number)
