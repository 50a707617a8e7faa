"""`python -m workers.grade TASKS.jsonl PREDICTIONS`: grades patches from other systems with the grader of training

Each patch is graded in real containers, with the hidden tests and, after a pass, with a control run in which the same tests
must fail. PREDICTIONS is a preds.json, {ID: {"model_patch": ...}}, or a JSONL of {"instance_id": ..., "model_patch": ...};
ids may omit their source's prefix. The command needs Docker and the tasks' images; no Redis, no SGLang, no GPU. Controls come from
TASKS.verified.jsonl, which `python -m workers.verify` writes.

Exit status: 0 every patch has a verdict; 1 an infrastructure failure prevented one; 2 misuse, or results that cannot be
written; 130 after Ctrl-C. The same command then continues where it stopped.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.commandline import program
from pipeline.request import Limits
from workers.grade.run import Prediction, PredictionResult, VerdictJournal, matched, read_predictions
from workers.sandbox.backend import command_sandboxes
from workers.sandbox.protocol import Sandboxes
from workers.unqueued import (
    LogDirectory,
    TaskIndex,
    add_grading_options,
    exit_status,
    limits_of,
    misuse,
    must_be_writable,
    verified_tasks,
    writing,
)


@dataclass(frozen=True, slots=True)
class GradingWork:
    """The predictions to grade, the settings, and the destination of the results."""

    predictions: list[Prediction]
    limits: Limits
    journal: VerdictJournal
    logs: LogDirectory
    json: Path | None


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_intermixed_args(argv)  # PREDICTIONS may follow options
    try:
        work = _read(options)
        sandboxes = command_sandboxes(fleet=f"grade-{os.getpid()}")
    except (OSError, ValueError) as error:
        return misuse(error)
    journal = work.journal
    return exit_status(
        lambda: _grade(work, options, sandboxes),
        kept_if_stopped=lambda: (
            f"the same command goes on where it was, by {journal.path}" if journal.known else ""
        ),
        kept_if_unwritable=lambda: f"{journal.path} has the verdicts" if journal.path else "",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("workers.grade"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("tasks", type=Path, metavar="TASKS.jsonl")
    add("predictions", type=Path, nargs="?", metavar="PREDICTIONS", help="patches by task, as JSON or JSONL")
    add("--only", default="", metavar="ID[,ID...]", help="grade the patches of these tasks alone")
    add("--patch", type=Path, metavar="FILE", help="grade this patch, of the one task that --only names")
    add("--json", type=Path, metavar="OUT", help="write the results there as one list")
    add("--logs", type=Path, metavar="DIR", help="keep the whole log of each patch as DIR/TASK/patch.log")
    add_grading_options(parser, items="patches graded")
    return parser


def _read(options: argparse.Namespace) -> GradingWork:
    """Reads the work from the options. Raises ValueError or OSError for input that cannot be graded at all."""
    limits, logs = limits_of(options), LogDirectory(options.logs)
    tasks = verified_tasks(options.tasks)
    predictions = _predictions(options, TaskIndex(options.tasks, tasks))
    if options.json:
        must_be_writable(options.json, "--json")
    logs.check()
    if options.json or options.predictions:
        option = "--json" if options.json else "PREDICTIONS"
        journal = VerdictJournal.beside(options.json or options.predictions, option=option)
    else:
        journal = VerdictJournal(None)
    return GradingWork(predictions, limits, journal, logs, options.json)


def _predictions(options: argparse.Namespace, index: TaskIndex) -> list[Prediction]:
    only = [one for one in options.only.split(",") if one]
    if (options.predictions is None) == (options.patch is None):
        raise ValueError("give either PREDICTIONS, or --only ID with --patch FILE")
    chosen = index.require(only, where="--only")
    if options.patch is not None:
        if len(chosen) != 1:
            raise ValueError("--patch: name the one task that the patch is for with --only ID")
        return [Prediction(chosen[0], options.patch.read_bytes())]
    path: Path = options.predictions
    given = read_predictions(path)
    if not only:
        return matched(path, given, index)
    predictions = matched(path, [one for one in given if index.find(one[0]) in chosen], index)
    missing = [task.id for task in chosen if task not in [one.task for one in predictions]]
    if missing:
        raise ValueError(f"--only: {path} holds no prediction for {missing[0]}")
    return predictions


def _grade(work: GradingWork, options: argparse.Namespace, sandboxes: Sandboxes) -> int:
    """Grades what is not graded yet, writes the results and returns the exit status. Raises Unwritable."""
    from workers.grade.run import grade_all

    _say_what_has_no_controls(work, options.tasks)
    results = asyncio.run(
        grade_all(
            work.predictions,
            work.journal,
            work.logs,
            sandboxes=sandboxes,
            limits=work.limits,
            num_jobs=options.jobs,
            image_fix=f"`python -m workers.images pull {options.tasks}`, or `python -m workers.images build DIR`",
        )
    )
    if work.json:
        with writing("--json", work.json):
            work.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)))
    print(_summary(results))
    if any(one.value is None for one in results):
        return 1
    work.journal.remove()
    return 0


def _say_what_has_no_controls(work: GradingWork, tasks: Path) -> None:
    num_without = sum(not one.task.calibration for one in work.predictions)
    if num_without:
        print(
            f"{num_without} of {len(work.predictions)} tasks were never calibrated, so that their passes are graded "
            f"without controls: `python -m workers.verify {tasks}` calibrates them",
            file=sys.stderr,
        )


def _summary(results: Sequence[PredictionResult]) -> str:
    num_resolved = sum(one.value == 1 for one in results)
    num_broken = sum(one.value is None for one in results)
    broken = f"; {num_broken} could not be graded, because the infrastructure failed" if num_broken else ""
    return f"{num_resolved} of {len(results)} patches are worth 1{broken}"


if __name__ == "__main__":
    sys.exit(main())
