"""`python -m workers.grade TASKS.jsonl PREDICTIONS`: grades patches from other systems with the grader of training

Each patch is graded in real containers, with the hidden tests and, after a pass, with a control run in which the same tests
must fail. PREDICTIONS is a preds.json as mini-swe-agent writes it, {ID: {"model_patch": ...}}, a JSON list of
{"instance_id": ..., "model_patch": ...}, or one such object per line (JSONL); the content of the file shows which, and ids may omit
their source's prefix. The command needs Docker and the tasks' images; no Redis, no SGLang, no GPU. Controls come from
TASKS.verified.jsonl, which `python -m workers.verify` writes.

Each verdict is stored as soon as it exists, in a journal beside the results: one finished verdict per line, under a key of
everything that the verdict depends on. An infrastructure failure is not a verdict and is not stored, so that the next call tries again.

Exit status: 0 every patch has a verdict; 1 an infrastructure failure prevented one; 2 misuse, or results that cannot be
written; 130 after Ctrl-C. The same command then continues where it stopped.
"""

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, cast

import msgspec
from rich.text import Text

from pipeline.commandline import program
from pipeline.request import Claim, Limits
from pipeline.screen import visible_line
from pipeline.task import Task
from pipeline.taskfile import fingerprint
from pipeline.trajectory import Control, Reward
from workers.display import Display, open_display
from workers.grading.grade import Graded, Grader
from workers.sandbox.backend import command_sandboxes
from workers.sandbox.protocol import Sandboxes
from workers.unqueued import (
    Broken,
    LogDirectory,
    TaskIndex,
    Unwritable,
    add_grading_options,
    exit_status,
    limits_of,
    misuse,
    must_be_writable,
    session,
    side_by_side,
    tried,
    unqueued_claim,
    verified_tasks,
    writing,
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A patch for a task."""

    task: Task
    patch: bytes


def read_predictions(path: Path) -> list[tuple[str, bytes]]:
    """The given ids, and the patches, in order. Raises ValueError naming the entry that is not a prediction."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}; give the predictions as JSON or JSONL") from error
    found = list(_given(path, text))
    if not found:
        raise ValueError(
            f'{path} holds no prediction; it must be {{ID: {{"model_patch": ...}}}}, or one '
            '{"instance_id": ..., "model_patch": ...} a line'
        )
    return found


def matched(path: Path, given: Sequence[tuple[str, bytes]], index: TaskIndex) -> list[Prediction]:
    """Each prediction of the file `path` with its task. Raises ValueError for unknown ids, and for two patches of one task."""
    index.require([task_id for task_id, _ in given], where=str(path))
    found: dict[str, Prediction] = {}
    for task_id, patch in given:
        task = index.find(task_id)
        assert task is not None
        if task.id in found:
            raise ValueError(f"{path}: two predictions for {task.id}: leave one of them out")
        found[task.id] = Prediction(task, patch)
    return list(found.values())


def _given(path: Path, text: str) -> Iterable[tuple[str, bytes]]:
    try:
        whole = json.loads(text, object_pairs_hook=_Pairs)
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply to be predictions") from error
    except json.JSONDecodeError:
        return [
            _of_line(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()
        ]
    if isinstance(whole, _Pairs):
        if "model_patch" in dict(whole):
            return [_record(str(path), whole)]
        return [(task_id, _patch(f"{path}: {task_id}", value)) for task_id, value in whole]
    if isinstance(whole, list):
        rows = cast(list[object], whole)
        return [_record(f"{path}: element {number}", row) for number, row in enumerate(rows, 1)]
    raise ValueError(f"{path}: neither an object nor a list, so it holds no predictions")


class _Pairs(list[tuple[str, Any]]):
    """A JSON object in its written form, in which repeated keys are visible."""


def _of_line(path: Path, number: int, line: str) -> tuple[str, bytes]:
    where = f"{path}:{number}"
    try:
        return _record(where, json.loads(line, object_pairs_hook=_Pairs))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg}; each line is one prediction") from error
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply to be a prediction") from error


def _record(where: str, row: object) -> tuple[str, bytes]:
    task_id = dict(row).get("instance_id") if isinstance(row, _Pairs) else None
    if not isinstance(task_id, str):
        raise ValueError(
            f'{where}: instance_id: not a string; a prediction is {{"instance_id": ..., "model_patch": ...}}'
        )
    return task_id, _patch(where, row)


def _patch(where: str, row: object) -> bytes:
    """The patch of a prediction; null, as harnesses write for an agent that submitted nothing, is an empty one."""
    if not isinstance(row, _Pairs) or "model_patch" not in dict(row):
        raise ValueError(f'{where}: no "model_patch"; give the patch there, "" for none')
    patch = dict(row)["model_patch"]
    if patch is None:
        return b""
    if not isinstance(patch, str):
        raise ValueError(f"{where}: model_patch: not a string")
    try:
        return patch.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: model_patch: {error.reason}: not Unicode text") from error


SUFFIX = ".unfinished.jsonl"


class PredictionResult(msgspec.Struct, frozen=True, kw_only=True):
    """One element of --json's list. `value` is None for an infrastructure failure, and `error` says what failed."""

    task: str
    value: float | None
    decided_by: str = ""
    applied_by: str = ""
    tests: dict[str, str] = msgspec.field(default_factory=dict[str, str])  # outcomes by name of the test
    control: Control = ""
    seconds: float
    error: str = ""


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the journal."""

    key: str
    result: PredictionResult


def result_of(task_id: str, reward: Reward, *, seconds: float) -> PredictionResult:
    """A verdict as a result."""
    return PredictionResult(
        task=task_id,
        value=reward.value,
        decided_by=reward.decided_by,
        applied_by=reward.applied_by,
        tests=reward.tests,
        control=reward.control,
        seconds=round(seconds, 2),
    )


def key_of(prediction: Prediction, limits: Limits) -> str:
    """A key that is equal only for the same patch, task, calibration and limits."""
    task = prediction.task
    said = (fingerprint(task), task.calibration, prediction.patch, limits.grade_cpu_s, limits.grade_wall_s)
    return hashlib.sha256(msgspec.msgpack.encode(said)).hexdigest()


@dataclass(slots=True)
class VerdictJournal:
    """Finished verdicts by key, in a file that is removed when nothing is left to continue."""

    path: Path | None  # None: they are not stored
    known: dict[str, PredictionResult] = field(default_factory=dict[str, PredictionResult])

    @classmethod
    def beside(cls, path: Path, *, option: str) -> Self:
        """The journal beside `path`, which `option` names. Raises Unwritable if none can be kept there."""
        journal = path.with_name(f"{path.name}{SUFFIX}")
        try:
            must_be_writable(journal, option)
        except Unwritable as error:
            raise Unwritable(f"{error}; --json OUT keeps this file beside OUT") from error
        entries = map(_entry, journal.read_bytes().split(b"\n")) if journal.exists() else ()
        return cls(journal, {one.key: one.result for one in entries if one})

    def enter(self, key: str, result: PredictionResult) -> None:
        """Stores the verdict. Raises Unwritable."""
        # The newline ends a partial last line that a killed process may have left.
        line = b"\n" + msgspec.json.encode(_Entry(key=key, result=result)) + b"\n"
        if self.path:
            with writing("journal", self.path), self.path.open("ab") as file:
                file.write(line)
        self.known[key] = result

    def remove(self) -> None:
        """Removes the journal, because everything is graded. Raises Unwritable."""
        if self.path:
            with writing("journal", self.path):
                self.path.unlink(missing_ok=True)


def _entry(line: bytes) -> _Entry | None:
    """The entry in the line; None for a line that was cut short."""
    try:
        return msgspec.json.decode(line, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


ID_CHARS = 44
_COLUMNS = {"value": 16, "applied by": 18, "tests": 12, "control": 11, "s": 8}


class ResultTable:
    """Rows on a display."""

    def __init__(self, display: Display, *, width: int) -> None:
        self._display = display
        self._width = width

    def begin(self, task_id: str) -> None:
        """The patch of this task is now being graded."""
        self._display.begin(task_id, "grading")

    def finish(self, result: PredictionResult) -> None:
        """The patch is graded, or could not be."""
        self._display.finish(result.task, [row(result, self._width)], ok=result.value is not None)


@contextmanager
def open_table(task_ids: Sequence[str]) -> Generator[ResultTable]:
    """A table of the patches of these tasks on standard output."""
    width = min(max((len(visible_line(one)) for one in task_ids), default=4), ID_CHARS)
    heading = "task".ljust(width) + "".join(name.rjust(room) for name, room in _COLUMNS.items())
    with open_display(sys.stdout, items="patches", num_items=len(task_ids), heading=heading) as display:
        yield ResultTable(display, width=width)


def row(result: PredictionResult, width: int) -> Text:
    """One patch in one line, with the deciding reason at its end."""
    value = "infrastructure" if result.value is None else f"{result.value:g}"
    cells = {
        "value": value,
        "applied by": result.applied_by or "-",
        "tests": _passed(result.tests),
        "control": result.control or "-",
        "s": f"{result.seconds:.1f}",
    }
    text = Text(visible_line(result.task)[-width:].ljust(width))
    for name, room in _COLUMNS.items():
        text.append(cells[name].rjust(room), "yellow" if cells[name] == "infrastructure" else "")
    why = visible_line(result.error if result.value is None else result.decided_by)
    text.append(f"  {why}", "yellow" if result.value is None else "green" if result.value else "")
    return text


def _passed(tests: Mapping[str, str]) -> str:
    """The number of deciding tests that passed."""
    return f"{sum(outcome == 'PASSED' for outcome in tests.values())}/{len(tests)}" if tests else "-"


LOG_NAME = "patch.log"


class PatchLogGrader(Protocol):
    """The production grader. Raises RolloutError; never returns a verdict for an infrastructure failure."""

    async def grade_with_log(self, claim: Claim, patch: bytes) -> Graded: ...


@dataclass(frozen=True, slots=True)
class PredictionGrader:
    """Grades predictions one by one; a verdict in the journal is not made again."""

    grader: PatchLogGrader
    journal: VerdictJournal
    logs: LogDirectory
    limits: Limits
    image_fix: str  # what to do about an image that is not on this host
    outage: str = ""  # why nothing at all can be graded here

    async def result(self, prediction: Prediction) -> PredictionResult:
        """The result of one prediction. Raises Unwritable."""
        key = key_of(prediction, self.limits)
        if key in self.journal.known:
            return self.journal.known[key]
        task_id, began_at = prediction.task.id, time.monotonic()
        graded = Broken(self.outage) if self.outage else await self._graded(prediction.task, prediction.patch)
        seconds = time.monotonic() - began_at
        if isinstance(graded, Broken):
            return PredictionResult(task=task_id, value=None, seconds=round(seconds, 2), error=graded.why)
        self.logs.write(task_id, LOG_NAME, graded.log)
        result = result_of(task_id, graded.reward, seconds=seconds)
        self.journal.enter(key, result)
        return result

    async def _graded(self, task: Task, patch: bytes) -> Graded | Broken:
        claim = unqueued_claim(task, command="grade", limits=self.limits)
        return await tried(lambda: self.grader.grade_with_log(claim, patch), task, image_fix=self.image_fix)


async def grade_all(
    predictions: Sequence[Prediction],
    journal: VerdictJournal,
    logs: LogDirectory,
    *,
    sandboxes: Sandboxes,
    limits: Limits,
    num_jobs: int,
    image_fix: str,
) -> list[PredictionResult]:
    """The results in the order of `predictions`. Closes `sandboxes`. Raises Unwritable and Misconfigured. SIGTERM and SIGHUP
    cancel it.
    """
    found: dict[str, PredictionResult] = {}
    async with session(sandboxes) as outage:
        grader = PredictionGrader(Grader(sandboxes), journal, logs, limits, image_fix, outage)
        with open_table([one.task.id for one in predictions]) as table:

            async def work(prediction: Prediction) -> None:
                found[prediction.task.id] = await _shown(grader, prediction, table)

            await side_by_side(predictions, work, num_jobs=num_jobs)
    return [found[one.task.id] for one in predictions]


async def _shown(grader: PredictionGrader, prediction: Prediction, table: ResultTable) -> PredictionResult:
    table.begin(prediction.task.id)
    result = await grader.result(prediction)
    table.finish(result)
    return result


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
