"""The plan as a part of a command: its arguments, and its text or its error."""

import argparse
from pathlib import Path

from msgspec.structs import replace

from trainer.plan.launch import launch_text
from trainer.plan.planning import RunPlan, make_plan, misfits
from trainer.plan.remedies import remedies
from trainer.plan.text import describe, misfit_sentence
from trainer.recipe import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the run is planned for, where it differs from the recipe's table [plan]."""
    group = parser.add_argument_group(
        "plan", "what the run is planned for; the default is the recipe's [plan]"
    )
    group.add_argument(
        "--gpus",
        metavar="GPUS",
        help="all GPUs, as in 16xH100-80; or the learner's and the engines', as in 8xH100-80+16xL40S-48",
    )
    group.add_argument(
        "--hosts",
        metavar="HOSTS",
        help="hosts of the sandboxes and the cores of one, as in 4x64; with GiB of memory, as in 4x64x512",
    )
    group.add_argument(
        "--measured",
        type=Path,
        metavar="RUN_DIR",
        help="a run whose episodes tell how long episodes are; by default they are as [plan] says or as the limits suggest",
    )


def planned(recipe: Recipe, arguments: argparse.Namespace) -> Recipe:
    """`recipe` with the machines that the arguments name."""
    given = {name: value for name in ("gpus", "hosts") if (value := getattr(arguments, name))}
    return replace(recipe, plan=replace(recipe.plan, **given))


def print_plan(recipe: Recipe, arguments: argparse.Namespace) -> None:
    """Raises ValueError where nothing can be planned, and, after the plan is printed, for what does not fit."""
    plan = make_plan(planned(recipe, arguments), measured=arguments.measured)
    print(describe(plan))
    if fault := faults(plan, arguments.measured):
        raise ValueError(fault)
    print("everything fits")


def print_launch(recipe: Recipe, arguments: argparse.Namespace) -> None:
    """The commands that start the run. Raises ValueError where something does not fit."""
    plan = make_plan(planned(recipe, arguments), measured=arguments.measured)
    if fault := faults(plan, arguments.measured):
        raise ValueError(fault)
    print(launch_text(plan, arguments.recipe, arguments.launch))


def faults(plan: RunPlan, measured: Path | None = None) -> str:
    """What does not fit, each with what would make it fit; empty if everything does."""
    return "; ".join(misfit_sentence(need, remedies(plan, need, measured=measured)) for need in misfits(plan))
