"""`python -m trainer.run RECIPE.toml`: one training run, on every rank of the learner.

Rank 0 enqueues requests, receives trajectories, decides and publishes; the other ranks (torchrun starts them) follow its
learner. A recipe with `kind = "sft"` trains on the rows of files: then rank 0 reads these, and nothing is enqueued. Exit
status: 0 the run is finished, or was stopped in good order; 1 it ended without its steps; 2 misuse, with what to change.
"""

import argparse
import asyncio
import contextlib
import logging
import re
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.journal.reading import LOGS, RECIPE, RUN_FILE, journal_of
from pipeline.running_tasks import print_tasks_on_sigquit
from pipeline.taskfile import write_facts
from trainer import process
from trainer.agent_file import example_words
from trainer.inputs import (
    Inputs,
    check_deadlines,
    check_learner,
    describe,
    read_inputs,
    read_tokenizer,
    warnings,
)
from trainer.learner import directories
from trainer.plan.__main__ import add_arguments, print_plan
from trainer.process import TrainerSettings
from trainer.recipe import (
    AnyRecipe,
    ImitationRecipe,
    Recipe,
    differences,
    load_any_recipe,
    set_keys,
    to_toml,
)
from trainer.records import run_directory
from trainer.records.run_directory import RunDirectory

if TYPE_CHECKING:
    from pipeline.journal.rows import EndReason
    from trainer.imitation.rows import ImitationData
    from trainer.records.console import Console

FIXED = (
    "kind",
    "model",
    "seed",
    "tasks.train",
    "tasks.heldout",
    "tasks.heldout_sets",
    "tasks.max_weakness",
    "tasks.min_control",
    "rollout.group_size",
    "weights.adapters",
    "data.",
    "batch.rows_per_step",
)
"""Keys that a resumed run may not change: its data order, the policy that it began with, and what its open requests expect of engines."""

FIXED_OF_SOURCES = re.compile(r"sources\.[^.]+\.(name|tasks|share|group_size): ")
"""The same keys of a source, as `differences` names them."""


def main(argv: list[str] | None = None) -> int:
    arguments = _parse(argv)
    print_tasks_on_sigquit()
    return process.exit_status(lambda settings: _run(arguments, settings))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = process.recipe_parser("trainer.run", __doc__, example="learner.lr=2e-6")
    parser.add_argument(
        "--run-dir",
        type=Path,
        help="the directory of the run, which holds all its files; default runs/RUN_ID",
    )
    parser.add_argument(
        "--run-id", help="the name of the run in Redis; default the recipe's name and the time"
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume the run in --run-dir from its newest checkpoint"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the recipe and all that it names, print it with every default, and the plan; write nothing",
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    arguments.words = sys.argv[1:] if argv is None else argv
    if not arguments.dry_run and (arguments.gpus or arguments.hosts or arguments.measured):
        parser.error("--gpus, --hosts and --measured are of the plan: add --dry-run, or use swerve plan")
    return arguments


def _run(arguments: argparse.Namespace, settings: TrainerSettings) -> int:
    recipe = load_any_recipe(arguments.recipe, arguments.set)
    if settings.world_size > 1 or not arguments.dry_run:
        process.check_processes(recipe, settings)
    if settings.rank != 0:
        return 0 if arguments.dry_run else process.follow(recipe, settings)
    # This check comes first, because the tokenizer and template do not matter if the model cannot be trained.
    check_learner(recipe)
    if isinstance(recipe, ImitationRecipe):
        return _imitate(recipe, arguments, settings)
    inputs = read_inputs(recipe)
    check_deadlines(recipe, inputs)
    if arguments.dry_run:
        return _dry_run(recipe, inputs, arguments)
    with _own_directory(recipe, arguments, inputs.task_digests) as directory:
        for warning in warnings(recipe, inputs):
            print(f"warning: {warning}", file=sys.stderr)
        with run_directory.writable(directory.root):
            write_facts(directory.root, inputs.task_facts)
        ending = _lead(directory, lambda console: _train(recipe, inputs, directory, settings, console))
    print(f"{directory.run_id}: {ending}")
    is_accounted_for = _report(directory)
    return 0 if is_accounted_for and ending in ("finished", "stopped") else 1


def _imitate(recipe: ImitationRecipe, arguments: argparse.Namespace, settings: TrainerSettings) -> int:
    """Trains on the rows of a recipe, on rank 0."""
    from trainer.imitation.rows import read_data
    from trainer.imitation.run import describe as describe_imitation
    from trainer.report.imitation import imitation_table, summarize_imitation

    if arguments.gpus or arguments.hosts or arguments.measured:
        raise ValueError(
            '--gpus, --hosts and --measured are of the plan, which knows recipes of kind "rl" only'
        )
    data = read_data(recipe, read_tokenizer(Path(recipe.model), recipe.chat, ()))
    if arguments.dry_run:
        print(to_toml(recipe))
        print(describe_imitation(recipe, data))
        return 0
    with _own_directory(recipe, arguments, {}) as directory:
        ending = _lead(directory, lambda console: _train_rows(recipe, data, directory, settings, console))
    print(f"{directory.run_id}: {ending}")
    print(imitation_table(summarize_imitation(directory.root), directory.root))
    return 0


@contextlib.contextmanager
def _own_directory(
    recipe: AnyRecipe, arguments: argparse.Namespace, tasks: Mapping[str, str]
) -> Iterator[RunDirectory]:
    """The run's directory, in which no other trainer works. `tasks` are the digests of the training tasks."""
    _check_sinks(recipe)
    with (
        _open_directory(recipe, arguments, tasks) as (directory, changes),
        run_directory.sole_trainer(directory.root),
        run_directory.space_set_aside(directory.root),
    ):
        command = [sys.executable, "-m", "trainer.run", *arguments.words]
        run_directory.record_launch(directory.root, command, set_keys=set_keys(recipe), changed=changes)
        yield directory


def _dry_run(recipe: Recipe, inputs: Inputs, arguments: argparse.Namespace) -> int:
    """Prints the plan of the run. Raises ValueError if machines are named and something does not fit them."""
    print(to_toml(recipe))
    print(describe(recipe, inputs))
    for source in inputs.sources:
        print(example_words(source.agent_config, source.tasks[0], recipe.by_source[source.name]))
    if arguments.gpus or recipe.plan.gpus:
        print_plan(recipe, arguments)
    return 0


def _check_sinks(recipe: AnyRecipe) -> None:
    """Checks the sinks before the learner is built, which takes minutes with a large model."""
    from trainer.records.sinks import check_sinks  # this imports TensorBoard

    check_sinks(recipe)


@contextlib.contextmanager
def _open_directory(
    recipe: AnyRecipe, arguments: argparse.Namespace, tasks: Mapping[str, str]
) -> Iterator[tuple[RunDirectory, list[str]]]:
    """The run's directory, created or found, and what a resume changes; a run that is refused leaves no directory behind.

    Raises ValueError if the command confuses resuming and starting.
    """
    if arguments.resume:
        if arguments.run_dir is None:
            raise ValueError("--resume needs --run-dir: the directory of the run to resume")
        yield _resumed(recipe, arguments.run_dir, arguments.run_id, tasks)
        return
    run_id = arguments.run_id or f"{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    root: Path = arguments.run_dir or Path("runs") / run_id
    if (root / RUN_FILE).exists():
        raise ValueError(
            f"{root} holds a run already: add --resume to resume it, or choose another --run-dir"
        )
    if isinstance(recipe, Recipe):
        asyncio.run(_refuse_known(run_id))
    with run_directory.removed_if_refused(root):
        yield run_directory.create(root, run_id, to_toml(recipe), kind=recipe.kind, tasks=tasks), []


def _resumed(
    recipe: AnyRecipe, root: Path, run_id: str | None, tasks: Mapping[str, str]
) -> tuple[RunDirectory, list[str]]:
    """The directory of the run to resume, and what has changed since, which is also printed. Raises ValueError for changes that are not
    allowed.
    """
    found = run_directory.find(root)
    if run_id not in (None, found.run_id):
        raise ValueError(f"{root} holds the run {found.run_id}, not {run_id}; leave --run-id out")
    before = load_any_recipe(root / RECIPE)
    # Recipes of two kinds differ in every key.
    changes = (
        [f"kind: {before.kind} -> {recipe.kind}"]
        if before.kind != recipe.kind
        else differences(before, recipe)
    )
    for change in changes:
        if change.startswith(FIXED) or FIXED_OF_SOURCES.match(change):
            raise ValueError(f"a resumed run cannot change {change}; start a new one for that")
        print(f"changed since the run began: {change}")
    for key, digest in tasks.items():
        if found.tasks.get(key, digest) != digest:
            raise ValueError(
                f"{key}: these are not the tasks with which the run in {root} began, or not in that order: restore the file and its "
                "verification, on which tasks.min_control and tasks.max_weakness depend, or start a new run"
            )
    if changes:
        with run_directory.writable(root):
            (root / RECIPE).replace(root / "recipe.before.toml")
            (root / RECIPE).write_text(to_toml(recipe))
    return found, changes


async def _refuse_known(run_id: str) -> None:
    """Raises ValueError if the run is known already, because a new run must not use the requests of an older one, and if Redis cannot be
    reached.
    """
    from pipeline import keys
    from trainer.loop.run import connect

    redis = await connect()
    async with contextlib.aclosing(redis):
        if await redis.exists(keys.stream(run_id), keys.weights(run_id)):
            raise ValueError(f"Redis knows a run {run_id} already: resume it, or choose another --run-id")


def _lead(
    directory: RunDirectory, train: "Callable[[Console], Coroutine[Any, Any, EndReason]]"
) -> "EndReason":
    """Runs the whole run, on rank 0."""
    from pipeline.settings import metrics_settings, telemetry_settings
    from pipeline.telemetry import exported_metrics, start_telemetry
    from trainer.records.console import LogFile

    with contextlib.ExitStack() as stack:
        stack.callback(start_telemetry("trainer", telemetry_settings()).shutdown)
        with run_directory.writable(directory.root):
            (directory.root / LOGS).mkdir(exist_ok=True)
            log = stack.enter_context(LogFile(directory.root / LOGS / "trainer.log"))
        console = stack.enter_context(process.console_on(sys.stdout, log))
        logging.getLogger("swerve").setLevel(logging.INFO)
        stack.enter_context(exported_metrics("trainer", metrics_settings(), run=directory.run_id))
        with directories.writing(directory.root):
            return asyncio.run(train(console))


async def _train(
    recipe: Recipe, inputs: Inputs, directory: RunDirectory, settings: TrainerSettings, console: "Console"
) -> "EndReason":
    from trainer.loop.loop import Loop
    from trainer.loop.run import open_run

    async with open_run(
        recipe,
        inputs,
        root=directory.root,
        run_id=directory.run_id,
        router_url=settings.router_url,
        console=console,
        make_feed=lambda: process.make_feed(recipe, settings),
    ) as run:
        loop = Loop(run)
        process.stop_on_signal(loop.stop)
        return await loop.run()


async def _train_rows(
    recipe: ImitationRecipe,
    data: "ImitationData",
    directory: RunDirectory,
    settings: TrainerSettings,
    console: "Console",
) -> "EndReason":
    from trainer.imitation.run import open_imitation

    async with open_imitation(
        recipe,
        data,
        root=directory.root,
        run_id=directory.run_id,
        console=console,
        make_feed=lambda: process.make_feed(recipe, settings),
    ) as run:
        process.stop_on_signal(run.stop)
        return await run.run()


def _report(directory: RunDirectory) -> bool:
    """Print the report and draw the reward curve. Returns whether every request is accounted for."""
    from trainer.curve import draw
    from trainer.report.__main__ import table
    from trainer.report.summary import summarize

    journal, picture = journal_of(directory.root), directory.root / "curve.png"
    summary = summarize(directory.root)
    print(table(summary, directory.root))
    if summary.episodes:
        with directories.writing(picture):
            draw(journal, picture, title=directory.run_id)
        print(picture)
    return summary.is_accounted_for


if __name__ == "__main__":
    sys.exit(main())
