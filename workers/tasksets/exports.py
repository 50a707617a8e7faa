"""Writes task files in the formats that other tools read: `python -m workers.tasksets export KIND tasks.jsonl`.

The JSONL formats have the columns of a task's source, so that the same importer reads them back. The parquet formats are for trainers that
use only the eval script's exit status: a script whose status could differ from that of its tests is changed to return theirs, and a task
that no exit status can judge is refused. Both kinds have columns for solutions, which are read from the file beside the tasks; lists of ids
and of images do not need them.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.task import ExitCode, RewardFile, SwebenchLog, Task
from pipeline.taskfile import Gold, gold_path, read_gold, read_tasks
from workers.tasksets.eval_scripts import with_status_of_tests
from workers.tasksets.harbor_directories import write_directories
from workers.tasksets.importing import Row, hidden_tests
from workers.tasksets.sources import SOURCES

GENERATOR = "swe-task-generator"  # the data source in rows of its own script
_INSTEAD = "leave it out, or export it as instances-jsonl"


@dataclass(frozen=True, slots=True)
class Record:
    """The data of a row. `data_source` is the value of the column of that name."""

    task: Task
    gold: Gold
    data_source: str

    @property
    def instance_id(self) -> str:
        return _instance_id(self.task)


def export(options: argparse.Namespace) -> str:
    """Writes `options.out` and returns a description of its content. Raises ValueError or OSError, and writes nothing, if it cannot."""
    tasks = read_tasks(options.path)
    if not tasks:
        raise ValueError(f"{options.path}: no tasks in it")
    if options.kind == DIRECTORIES:
        write_directories([(record.task, record.gold) for record in _records(tasks, options)], options.out)
        return f"{len(tasks)} tasks of {options.path} in directories in {options.out}, as {options.kind}"
    write_list = LISTS.get(options.kind)
    content = write_list(tasks) if write_list else ROWS[options.kind](_records(tasks, options))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(content)
    return f"{len(tasks)} tasks of {options.path} in {options.out}, as {options.kind}"


def add_export_parser(subparsers: Any) -> None:
    """Adds `export` to the commands of the command line."""
    parser = subparsers.add_parser("export", help="write a task file in a format that another tool reads")
    kinds = (*ROWS, *LISTS, DIRECTORIES)
    parser.add_argument("kind", metavar="KIND", choices=kinds, help=", ".join(kinds))
    parser.add_argument("path", type=Path, metavar="TASKS.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH")
    parser.add_argument(
        "--data-source",
        metavar="NAME",
        help="the column data_source of every row; default: each task's own source",
    )
    parser.set_defaults(run=export)


def _records(tasks: Sequence[Task], options: argparse.Namespace) -> list[Record]:
    """The tasks with their solutions. A missing solution is an error, because empty columns would look like one."""
    path, named = gold_path(options.path), options.data_source
    golds = read_gold(path) if path.exists() else {}
    without = [task.id for task in tasks if task.id not in golds]
    if without:
        of = without[0] if len(without) == 1 else f"{without[0]} and {len(without) - 1} more"
        raise ValueError(
            f"{path}: no solution of {of}, and {options.kind} has columns for it; the file that"
            f" {options.path.name} was imported with must be beside it"
        )
    return [Record(task, golds[task.id], named or _data_source(task)) for task in tasks]


def _instances(records: Sequence[Record]) -> bytes:
    """One line per task: its problem and, as metadata, its columns and their source."""
    return _json_lines(
        {
            "text": record.task.problem,
            "metadata": {"instance": instance_of(record), "data_source": record.data_source},
        }
        for record in records
    )


def _instance_ids(tasks: Sequence[Task]) -> bytes:
    return "".join(f"{_instance_id(task)}\n" for task in tasks).encode()


def _docker_images(tasks: Sequence[Task]) -> bytes:
    """Each image once, in the order of first use."""
    return "".join(f"{image}\n" for image in dict.fromkeys(task.image for task in tasks)).encode()


def _parquet_generator(records: Sequence[Record]) -> bytes:
    """Four columns of text; `prompt` and `instance` are JSON."""
    return _parquet(
        [
            {
                "data_source": record.data_source,
                "prompt": json.dumps([{"role": "user", "content": record.task.problem}], ensure_ascii=False),
                "env_class": "null",
                "instance": json.dumps(
                    instance_of(record) | judged_by_exit_status(record), ensure_ascii=False
                ),
            }
            for record in records
        ]
    )


def _parquet_flat(records: Sequence[Record]) -> bytes:
    """One column per field; `prompt` is a list of chat messages."""
    return _parquet(
        [
            {
                "data_source": record.data_source,
                "prompt": [{"role": "user", "content": record.task.problem}],
                "env_class": "null",
                "instance_id": record.instance_id,
                "problem_statement": record.task.problem,
                "image_name": record.task.image,
                "repo": record.task.repo,
                "base_commit": record.task.base_commit,
                **judged_by_exit_status(record),
            }
            for record in records
        ]
    )


ROWS: dict[str, Callable[[Sequence[Record]], bytes]] = {
    "instances-jsonl": _instances,
    "evaluation-jsonl": _instances,  # evaluators read the same format
    "parquet-generator": _parquet_generator,
    "parquet-flat": _parquet_flat,
}
LISTS: dict[str, Callable[[Sequence[Task]], bytes]] = {
    "instance-ids": _instance_ids,
    "docker-images": _docker_images,
}


DIRECTORIES = "harbor"  # the kind whose output is a directory for each task


def instance_of(record: Record) -> Row:
    """The columns of the task's source, with `image_name` and `eval_script`, which all older tools read.

    The eval script is never left out: one of those tools accepts any patch as a solution if it is missing.
    """
    task = record.task
    importer = SOURCES.get(_source(task))
    if importer is None:
        raise ValueError(
            f"{task.id}: {_source(task)!r} is not a source whose columns are known: {', '.join(SOURCES)}"
        )
    return importer.row_of(task, record.gold) | {
        "image_name": task.image,
        "eval_script": task.verdict.eval_script,
    }


def judged_by_exit_status(record: Record) -> Row:
    """The columns of a task whose eval script's exit status is its verdict. Raises ValueError if there is no such script."""
    task, gold = record.task, record.gold
    match task.verdict:
        case ExitCode(eval_script=script) if not isinstance(task.verdict, RewardFile):
            pass
        case SwebenchLog() if task.setup_patch:
            raise ValueError(f"{task.id}: setup_patch: there is no column for what makes the bug: {_INSTEAD}")
        case SwebenchLog(eval_script=script):
            script = _ending_as_its_tests(task, script)
        case verdict:
            kind = verdict.__struct_config__.tag
            raise ValueError(
                f"{task.id}: a {kind} verdict on it is not an exit status: export it as instances-jsonl"
            )
    fix, tests = gold.patch, hidden_tests(task, gold)
    return {"eval_script": script, "gold_patch": fix + tests, "test_patch": tests, "fix_patch": fix}


def _ending_as_its_tests(task: Task, script: str) -> str:
    try:
        return with_status_of_tests(script)
    except ValueError as error:
        raise ValueError(f"{task.id}: eval_script: {error}; {_INSTEAD}") from error


def _instance_id(task: Task) -> str:
    return task.id.partition(":")[2]


def _source(task: Task) -> str:
    return task.id.partition(":")[0]


def _data_source(task: Task) -> str:
    return GENERATOR if _source(task) == "fleet" else _source(task)


def _json_lines(rows: Any) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _parquet(rows: list[Row]) -> bytes:
    try:
        pyarrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ValueError("writing parquet needs pyarrow: pip install pyarrow") from error
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()
