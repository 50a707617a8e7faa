"""What the commands that run cells have in common: the quiet environment, and arguments. Imports neither torch nor Megatron."""

import argparse
import os
import warnings
from pathlib import Path


def prepare_process() -> None:
    """One thread for each cell, and no warnings of Megatron about optional packages, here and in the processes of --jobs."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")


def add_run_arguments(parser: argparse.ArgumentParser, *, results: Path) -> None:
    """How many updates, at how many cells at a time, and where the rows are."""
    add = parser.add_argument
    add("--steps", type=int, default=40, metavar="N", help="updates of each cell; default %(default)s")
    add("--jobs", type=int, default=1, metavar="N", help="cells at the same time, one core each")
    add("--results", type=Path, default=results, metavar="FILE", help="default %(default)s")
    add("--table", action="store_true", help="run nothing: print the tables and draw the picture")
    add("--short", action="store_true", help="two steps: shows that it runs, not what is learned")
