"""`python -m workers.tasksets plant REPO --out DIR`: makes verified tasks by planting bugs in a Python repository's own code.

All tests run once, to learn which functions each of them reaches. Then small changes of these functions are tried, in an order that the
seed decides, each with the tests that reach it. Where some tests fail and others pass, the change becomes a task: its base is the
repository with the bug and without the files of the failing tests, which are the hidden tests; the known fix takes the bug back; the
problem shows a call that fails. From there on it goes the way of the tasks of `from_git.py`. Exit status: 0 done; 1 fewer tasks than
`--most` because of the infrastructure; 2 misuse, with what to change.
"""

import argparse
import functools
from collections.abc import Mapping

from workers.making.author import add_author_options, author_settings
from workers.making.bugs import KINDS
from workers.making.candidates import Settings, Stage
from workers.making.history import resolved
from workers.making.stages import Stages, add_making_options, require_positive, run_stages, settings_of

LABELS: Mapping[Stage, str] = {"seen": "bugs tried", "candidate": "fail some tests and not all"}


def add_plant_parser(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_making_options(parser, items="bugs tried")
    add("--seed", type=int, default=0, metavar="N", help="which bugs are tried first; default: %(default)s")
    add("--most", type=int, default=100, metavar="N", help="most tasks to keep; default: %(default)s")
    help_ = f"kinds of bugs; default: {','.join(KINDS)}, and model with --author-url"
    add("--kinds", metavar="KIND,...", help=help_)
    help_ = "bugs in one task, each in another function; default: %(default)s"
    add("--bugs", type=int, default=1, metavar="N", help=help_)
    add_author_options(parser, writes="problems, and bugs of the kind model")
    parser.set_defaults(run=run, language="python")


def run(options: argparse.Namespace) -> int:
    """Makes the tasks, or reports on them, and returns the exit status. Raises ValueError, OSError."""

    def make(stages: Stages) -> bool:
        from workers.making.planting import Planter

        return Planter(stages).plant()

    return run_stages(options, LABELS, functools.partial(checked_settings, options), make)


def checked_settings(options: argparse.Namespace) -> Settings:
    """What the book is made with. Raises ValueError naming an option."""
    require_positive(options, "most", "bugs")
    author = author_settings(options)
    known = (*KINDS, *(["model"] if author else []))
    named = known if options.kinds is None else map(str.strip, options.kinds.split(","))
    options.kinds = tuple(dict.fromkeys(word for word in named if word))
    if unknown := [kind for kind in options.kinds if kind not in known]:
        hint = "; model needs --author-url" if unknown[0] == "model" else ""
        raise ValueError(f"--kinds: {unknown[0]!r} is none of {', '.join(known)}{hint}")
    if not options.kinds:
        raise ValueError(f"--kinds: name one or more of {', '.join(known)}")
    commit = resolved(options.repository, options.branch, "--branch")
    kinds, seed, bugs = ",".join(sorted(options.kinds)), str(options.seed), str(options.bugs)
    return settings_of(options, branch=commit, kinds=kinds, seed=seed, bugs=bugs, **author)
