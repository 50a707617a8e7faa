"""Options that commands have in common which grade tasks: how many at once, and how long a test run may take."""

import argparse
import os

from pipeline.request import Limits


def add_grading_options(parser: argparse.ArgumentParser, *, items: str) -> None:
    """Adds --jobs, of so many `items` at once, --cpu-s and --wall-s."""
    cores, limits = len(os.sched_getaffinity(0)), Limits()
    parser.add_argument(
        "--jobs", type=int, default=cores, metavar="N", help=f"{items} at once; default: cores"
    )
    parser.add_argument(
        "--cpu-s",
        type=float,
        default=limits.grade_cpu_s,
        help="CPU time of one test run; default: %(default)s",
    )
    parser.add_argument(
        "--wall-s",
        type=float,
        default=limits.grade_wall_s,
        help="wall time of one test run; default: %(default)s",
    )


def limits_of(options: argparse.Namespace) -> Limits:
    """The limits of a test run that the options give. Raises ValueError for options that allow no work."""
    if options.jobs < 1 or min(options.cpu_s, options.wall_s) <= 0:
        raise ValueError("--jobs must be 1 or more, --cpu-s and --wall-s above 0")
    return Limits(grade_cpu_s=options.cpu_s, grade_wall_s=options.wall_s)
