"""`python -m trainer.evaluate`: how well something solves tasks.

    RECIPE.toml --run-dir DIR                             weights of ours: a checkpoint, or a Hugging Face directory
    TASKS.jsonl --api-base URL --model NAME --agent FILE --out DIR
                                                          any model behind an OpenAI-compatible server
    compare A B                                           two evaluations of the second kind, task by task

Each has its own --help: `python -m trainer.evaluate RECIPE.toml --help`, and so on.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from pipeline.commandline import MISUSE, directory, program
from pipeline.errors import describe_error
from pipeline.intervals import Estimate, paired_difference, share
from pipeline.message import json_line
from pipeline.screen import visible_line
from trainer.evaluate import endpoint
from trainer.evaluate.results import RECORD, EvaluationDirectory, graded_runs

_SHOWN_AT_MOST = 20  # number of tasks in a printed list
_USAGE = f"usage: {program('trainer.evaluate')} {{RECIPE.toml | TASKS.jsonl | compare}} ..."
_COMPARE = """`python -m trainer.evaluate compare A B`: is B better than A on the tasks for which both have verdicts?

A and B are directories that `python -m trainer.evaluate TASKS.jsonl ... --out` wrote. It prints the success of each, the paired difference
B - A with its 95 % interval (tasks are the draws), and the won and lost tasks: those whose rate of success is higher or lower in B. Exit
status: 0; 2 misuse.
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two evaluations, on the tasks with at least one graded episode in both."""

    first: Estimate
    second: Estimate
    difference: Estimate  # second minus first
    won: list[str]
    lost: list[str]
    num_equal: int
    num_left_out: int  # tasks for which only one of them has a verdict


def compare(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=program("trainer.evaluate") + " compare",
        description=_COMPARE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", type=directory, metavar="A")
    parser.add_argument("second", type=directory, metavar="B")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    try:
        found = compared(_runs(options.first), _runs(options.second))
    except (OSError, ValueError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return MISUSE
    print(json_line(asdict(found)) if options.json else _text_of(found, options))
    return 0


def _runs(path: Path) -> dict[str, list[bool]]:
    if not (path / RECORD).is_file():
        raise ValueError(f"{path} holds no {RECORD}: give the --out of an evaluation")
    directory = EvaluationDirectory(path, "")
    directory.open()
    return graded_runs(directory.known.values())


def compared(first: Mapping[str, Sequence[bool]], second: Mapping[str, Sequence[bool]]) -> Comparison:
    """The comparison of two evaluations. Raises ValueError if no task has a verdict in both."""
    both = [task for task, runs in first.items() if runs and second.get(task)]
    rates = {task: (fmean(first[task]), fmean(second[task])) for task in both}
    mean_first, mean_second = (
        share([fmean(runs[task]) for task in both], sum(len(runs[task]) for task in both))
        for runs in (first, second)
    )
    difference = paired_difference(first, second)
    if mean_first is None or mean_second is None or difference is None:
        raise ValueError("no task has a verdict in both: compare evaluations of the same tasks")
    return Comparison(
        first=mean_first,
        second=mean_second,
        difference=difference,
        won=[task for task, (before, after) in rates.items() if after > before],
        lost=[task for task, (before, after) in rates.items() if after < before],
        num_equal=sum(before == after for before, after in rates.values()),
        num_left_out=len({task for runs in (first, second) for task, each in runs.items() if each})
        - len(both),
    )


def _text_of(found: Comparison, options: argparse.Namespace) -> str:
    left_out = f"; {found.num_left_out} more have a verdict in one only" if found.num_left_out else ""
    return "\n".join(
        (
            f"{found.difference.num_draws} tasks{left_out}",
            f"A  {found.first.percent()}  {visible_line(str(options.first))}",
            f"B  {found.second.percent()}  {visible_line(str(options.second))}",
            f"B - A  {found.difference.percent('+')}",
            f"won {len(found.won)}: {_listed(found.won)}",
            f"lost {len(found.lost)}: {_listed(found.lost)}",
            f"equal {found.num_equal}",
        )
    )


def _listed(tasks: Sequence[str]) -> str:
    more = len(tasks) - _SHOWN_AT_MOST
    shown = ", ".join(visible_line(task) for task in tasks[:_SHOWN_AT_MOST]) or "-"
    return f"{shown} and {more} more" if more > 0 else shown


def main() -> int:
    words = sys.argv[1:]
    if words[:1] == ["compare"]:
        return compare(words[1:])
    if any(word.endswith(".toml") and not _is_harness(words, place) for place, word in enumerate(words)):
        from trainer.evaluate import weights

        return weights.main()
    if not words or words in (["-h"], ["--help"]):
        print(f"{_USAGE}\n\n{(__doc__ or '').strip()}")
        return 0 if words else 2
    return endpoint.main(words)


def _is_harness(words: list[str], place: int) -> bool:
    """Whether the argument names the file of an agent program, which is TOML like a recipe."""
    return words[place].startswith("--harness=") or words[max(place - 1, 0)] == "--harness"


if __name__ == "__main__":
    sys.exit(main())
