"""Process set-up shared by all commands that run a learner: misuse is reported in one line, every rank gets its learner, the
first signal ends the run in good order, and the log goes to the console.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from pipeline.commandline import FAILED, program, status_of
from pipeline.screen import outlive_readers
from pipeline.settings import check_variables
from trainer.learner import directories
from trainer.recipe import AnyRecipe, Recipe

if TYPE_CHECKING:
    from trainer.feed import Feed
    from trainer.records.console import Console, LogFile


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """The router of the engines, and the rank of this process among the learner's, as torchrun sets it."""

    router_url: str
    rank: int
    world_size: int
    local_rank: int


def trainer_settings() -> TrainerSettings:
    """The settings. Raises ValueError naming the variable that cannot be used."""
    check_variables()
    return TrainerSettings(
        router_url=os.environ.get("SWERVE_ROUTER_URL", "http://127.0.0.1:30000"),
        rank=_whole("RANK", 0),
        world_size=_whole("WORLD_SIZE", 1),
        local_rank=_whole("LOCAL_RANK", 0),
    )


def _whole(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdigit():
        raise ValueError(f"{variable}={text!r}: give a whole number; torchrun sets it")
    return int(text)


def recipe_parser(module: str, description: str | None, *, example: str) -> argparse.ArgumentParser:
    """A parser that takes a recipe and overrides of its keys; `example` is such an override."""
    parser = argparse.ArgumentParser(prog=program(module), description=description)
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
    """The exit status of `command`.

    ValueError gives MISUSE; a full disk, and a service that does not answer, give FAILED. Each prints one line on stderr.
    """
    try:
        return command(trainer_settings())
    except ValueError as error:
        print("error:", " ".join(line.strip() for line in str(error).splitlines()), file=sys.stderr)
        return status_of(error)
    except BaseException as error:
        full = directories.disk_full_in(error)
        if full is None:
            raise
        print("error:", "; ".join([str(full), *getattr(full, "__notes__", ())]), file=sys.stderr)
        return FAILED


def check_processes(recipe: AnyRecipe, settings: TrainerSettings) -> None:
    """Raises ValueError unless torchrun started as many processes as the learner's layout needs, or a multiple."""
    learner = recipe.learner
    if settings.world_size % learner.replica_processes:
        raise ValueError(
            f"learner.tensor_parallel = {learner.tensor_parallel}, learner.pipeline_parallel = {learner.pipeline_parallel} "
            f"and learner.context_parallel = {learner.context_parallel} need {learner.replica_processes} processes or a "
            f"multiple, not {settings.world_size}: start them with `torchrun --nproc-per-node`, or lower one"
        )


def make_feed(recipe: AnyRecipe, settings: TrainerSettings, *, num_threads: int = 0) -> "Feed":
    """The learner of this rank, connected with those of the other ranks, on `num_threads` CPU threads. 0: torch's default number."""
    # Each step packs samples of other lengths, which fragments a GPU's memory. The allocator reads this once, when torch first uses it.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # At every start it lists the optional packages that it was built without.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    from trainer.feed import Feed
    from trainer.learner import backend
    from trainer.learner.megatron import Learner

    if num_threads:
        backend.use_threads(num_threads)
    backend.join(rank=settings.rank, world_size=settings.world_size, local_rank=settings.local_rank)
    keep_tokens = isinstance(recipe, Recipe) and recipe.rollouts.keeps_tokens
    learner = Learner(
        recipe.learner,
        model_directory=Path(recipe.model),
        packs_exports=isinstance(recipe, Recipe) and recipe.weights.precision == "fp8",
        keep_tokens=keep_tokens,
    )
    return Feed(learner)


def follow(recipe: AnyRecipe, settings: TrainerSettings, *, num_threads: int = 0) -> int:
    """Used on ranks above 0: repeats rank 0's calls of its learner, until rank 0 stops. Only rank 0 handles signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    make_feed(recipe, settings, num_threads=num_threads).follow()
    return 0


@contextlib.contextmanager
def console_on(screen: TextIO, log: "LogFile | None" = None) -> "Iterator[Console]":
    """A console on `screen`, with log records among its lines; `log` gets the same as lines. A run continues when nobody reads its output
    any more.
    """
    from trainer.records.console import LineConsole, LoggedConsole, open_console

    outlive_readers()

    with open_console(screen) as console:
        logged = None if log is None else LineConsole(cast("TextIO", log))
        handlers = [one.log_handler() for one in (console, logged) if one is not None]
        logging.basicConfig(level=logging.WARNING, handlers=handlers, force=True)
        yield console if logged is None else LoggedConsole(console, logged)


def stop_on_signal(stop: Callable[[], None]) -> None:
    """Call `stop` on the first SIGINT or SIGTERM; a second one has its default effect. Call this inside the event loop."""
    running = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        running.remove_signal_handler(number)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, handle, number)
