"""Turns rows into tasks: what a source has to define, and one import that collects all refusals.

A new source is a module beside this one with an `IMPORTER`, and a line in sources.py.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.task import ExitCode, Task
from pipeline.taskfile import Gold
from trainer.tasksets.fields import Fields
from trainer.tasksets.rows import read_rows

Row = dict[str, Any]
IMAGE_COLUMNS = ("image", "image_name", "docker_image")  # the first that is not empty counts


class Refused(ValueError):
    """Rows that cannot be used. `reasons` has one per row, naming file, row and field; `hint` is what all of them suggest."""

    hint = ""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = tuple(reasons)


def no_options(parser: ArgumentParser) -> None:
    """For a source without options of its own."""


def as_they_are(rows: list[Fields], options: Namespace) -> list[Fields]:
    return rows


def instance_id(fields: Fields) -> str:
    return fields.text("instance_id")


def named_image(fields: Fields) -> str:
    """The image that the row names, which has precedence over any rule for names; "" if it names none. Raises ValueError."""
    names = (fields.optional_text(column).strip() for column in IMAGE_COLUMNS)
    return next((name for name in names if name), "")


def hidden_tests(task: Task, gold: Gold) -> str:
    """The diff of the hidden tests: the verdict's own, else the one beside the solution."""
    if isinstance(task.verdict, ExitCode) and task.verdict.test_patch:
        return task.verdict.test_patch.decode("utf-8", "surrogateescape")
    return gold.test_patch


@dataclass(frozen=True, slots=True)
class Importer:
    """One source of tasks.

    `task_of` makes a task and its solution of a row, `row_of` makes such a row again for `export`. `read` returns all rows
    of a path. `--only` picks rows by `id_of`, `--repo` and `--max-bytes` by the fields that `repo` and `size` name.
    `complete` adds to the picked rows what they lack, from the options that `add_options` defines. All of them raise
    ValueError naming file, row and field.
    """

    help: str
    task_of: Callable[[Fields], tuple[Task, Gold]]
    row_of: Callable[[Task, Gold], Row]
    read: Callable[[Path, str | None], list[Fields]] = read_rows
    complete: Callable[[list[Fields], Namespace], list[Fields]] = as_they_are
    add_options: Callable[[ArgumentParser], None] = no_options
    id_of: Callable[[Fields], str] = instance_id
    repo: str = "repo"
    size: tuple[str, ...] = ("problem_statement", "patch", "test_patch")


def tasks_of(importer: Importer, rows: Iterable[Fields]) -> tuple[list[Task], list[Gold]]:
    """Tasks and their solutions, in the order of `rows`. Raises Refused with every row that cannot be used."""
    tasks: dict[str, Task] = {}
    golds: list[Gold] = []
    first: dict[str, str] = {}
    refusals: list[str] = []
    for fields in rows:
        try:
            task, gold = importer.task_of(fields)
            if task.id in first:
                raise fields.refusal("id", f"{task.id!r} is that of {first[task.id]} too")
        except ValueError as error:
            refusals.append(str(error))
            continue
        first[task.id] = fields.where
        tasks[task.id] = task
        golds.append(gold)
    if refusals:
        raise Refused(refusals)
    return list(tasks.values()), golds
