"""`python -m trainer.compare RUN_A RUN_B`: is recipe B better than recipe A?

RUN_A and RUN_B are directories of runs, whose held-out evaluations are compared, or what `swerve evaluate` wrote. Tasks are paired. Further
pairs of runs, with other seeds, are given by --pair: one pair only says which weights are better, and not which recipe. With --plan N,
fixed before the first look, the command may be repeated as episodes or pairs are added at the end, until it decides: all looks together
give at most 5 % of false alarms. `swerve power` says which N finds a difference. Exit status: 0; 2 misuse.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from pipeline.commandline import MISUSE, directory, program
from pipeline.errors import describe_error
from pipeline.intervals import Estimate, mean
from pipeline.message import json_line
from pipeline.screen import lines, visible_line
from trainer.compare.evaluations import checked, rewards_of
from trainer.compare.looks import Look, Pair, looks, sizes
from trainer.compare.power import add_choice


def main(argv: Sequence[str] | None = None) -> int:
    options = _parsed(argv)
    try:
        pairs = checked([(_read(a, options), _read(b, options)) for a, b in options.pairs])
    except (OSError, ValueError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return MISUSE
    made = looks(pairs, options.plan or sizes(pairs)[-1])
    if options.json:
        told = {"looks": [asdict(one) for one in made], "is_decided": made[-1].is_decided}
        print(json_line(told | {"num_pairs": len(pairs), "num_tasks": len(pairs[0][0])}))
    else:
        print(lines(list(_report(pairs, made, options))))
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("trainer.compare"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", type=directory, metavar="RUN_A")
    parser.add_argument("second", type=directory, metavar="RUN_B")
    parser.add_argument(
        "--pair",
        type=directory,
        nargs=2,
        action="append",
        default=[],
        metavar=("RUN_A", "RUN_B"),
        help="a further pair of runs, with another seed",
    )
    parser.add_argument(
        "--plan",
        type=int,
        metavar="N",
        help="episodes of each task, or pairs, in the end; default those there are",
    )
    add_choice(parser)
    options = parser.parse_args(argv)
    if options.plan is not None and options.plan < (2 if options.pair else 1):
        parser.error(
            f"--plan {options.plan}: give the episodes of each task, or with --pair the pairs, of which 2 are the fewest"
        )
    options.pairs = [(options.first, options.second), *options.pair]
    used = [path.resolve() for pair in options.pairs for path in pair]
    if len(used) > len({*used}):
        parser.error("--pair: a directory is named twice, and the same run says nothing new; give each once")
    return options


def _read(path: Path, options: argparse.Namespace) -> tuple[Path, dict[str, Sequence[float]]]:
    rewards = rewards_of(path, name=options.evaluation, tasks=options.set, greedy=options.greedy)
    return path, dict(rewards)


def _report(pairs: Sequence[Pair], made: Sequence[Look], options: argparse.Namespace) -> Iterator[str]:
    num_tasks, last = len(pairs[0][0]), made[-1]
    for name, side, path in (("A", 0, options.first), ("B", 1, options.second)):
        found = mean([[one for pair in pairs for one in pair[side][task]] for task in pairs[0][0]])
        more = f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
        yield f"{name}  {'-' if found is None else found.percent()}  {visible_line(str(path))}{more}"
    shown = Estimate(last.value, last.low, last.high, num_tasks)
    yield f"B - A  {shown.percent('+')}, over all looks together"
    yield f"{len(made)} looks, {last.num_episodes:,} episodes of {num_tasks} tasks, {last.share:.0%} of the plan"
    yield _verdict(last, ("recipe", "is") if len(pairs) > 1 else ("weights of run", "are"))
    if len(pairs) == 1:
        yield "one pair of runs says nothing of other seeds: give more with --pair to compare the recipes"


def _verdict(last: Look, words: tuple[str, str]) -> str:
    what, verb = words
    if last.is_decided:
        return f"decided: the {what} {'B' if last.value > 0 else 'A'} {verb} better"
    if last.share == 1.0:
        return (
            f"not decided, and the plan is used up: the interval says how far the {what} A and B may differ"
        )
    return "not decided: add episodes or pairs and compare again; `swerve power` says how many"


if __name__ == "__main__":
    sys.exit(main())
