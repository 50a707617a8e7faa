"""`python -m trainer.plan RECIPE.toml --gpus 16xH100-80 --hosts 4x64`: whether a run fits its machines, and how fast it will be.

It reads the recipe and the model's `config.json`, and starts nothing; tasks, weights and torch are not needed. Exit status: 0 all fits;
2 something does not, with what would make it fit, or misuse.
"""

import argparse
import signal
import sys

from trainer import process
from trainer.plan.command import add_arguments, print_launch, print_plan
from trainer.plan.launch import WAYS
from trainer.recipe import load_recipe


def main(argv: list[str] | None = None) -> int:
    parser = process.recipe_parser("trainer.plan", __doc__, example="learner.recompute=full")
    add_arguments(parser)
    parser.add_argument(
        "--launch", choices=WAYS, help="print the commands that start the planned run, instead of the plan"
    )
    arguments = parser.parse_args(argv)
    return process.exit_status(lambda settings: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.set)
    if arguments.launch:
        print_launch(recipe, arguments)
    else:
        print_plan(recipe, arguments)
    return 0


if __name__ == "__main__":
    # A reader such as `head`, which stops early, ends this command silently.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
