"""The demonstration's command line: ``python -m trainer.demo tasks`` and ``python -m trainer.demo images``."""

import argparse
import sys
from pathlib import Path


def main() -> int:
    """Run one command; returns 2 on a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m trainer.demo")
    commands = parser.add_subparsers(dest="command", required=True)
    tasks = commands.add_parser("tasks", help="write a family of tasks in swe-task-generator's layout")
    tasks.add_argument("--out", type=Path, required=True)
    tasks.add_argument("--seed", type=int, default=0)
    tasks.add_argument("--train", type=int, default=96, help="number of training tasks")
    tasks.add_argument("--heldout", type=int, default=64, help="number of held-out tasks")
    tasks.add_argument(
        "--image-prefix", default="swerve-demo", help="image repository; the tag is the task's name"
    )
    images = commands.add_parser(
        "images", help="build the images of a written family, skipping those present"
    )
    images.add_argument("directory", type=Path)
    options = parser.parse_args()
    try:
        return _tasks(options) if options.command == "tasks" else _images(options)
    except ValueError as error:
        print(f"trainer.demo: {error}", file=sys.stderr)
        return 2


def _tasks(options: argparse.Namespace) -> int:
    from trainer.demo.task_directories import write_family

    count = write_family(
        options.out, seed=options.seed, num_train=options.train, num_heldout=options.heldout,
        image_prefix=options.image_prefix,
    )  # fmt: skip
    print(f"{count} tasks in {options.out}")
    return 0


def _images(options: argparse.Namespace) -> int:
    from trainer.demo.images import build_images

    built, present = build_images(options.directory)
    print(f"{built} images built, {present} already there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
