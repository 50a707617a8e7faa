"""Converts rows to tasks: the interface of a source, the choice of rows, and an import that collects all refusals.

A new source is a module beside this one with an `IMPORTER`, and a line in sources.py.
"""

import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline.task import ExitCode, Task
from pipeline.taskfile import Gold
from workers.images.names import parse_name
from workers.tasksets.rows import Fields, read_rows

Row = dict[str, Any]
IMAGE_COLUMNS = ("image", "image_name", "docker_image")  # the first that is not empty counts


class Refused(ValueError):
    """Rows that cannot be used. `reasons` has one per row, naming file, row and field; `hint` is a remedy for all of them."""

    hint = ""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = tuple(reasons)


def no_options(parser: ArgumentParser) -> None:
    """Adds nothing: the source has no options of its own."""


def as_they_are(rows: list[Fields], options: Namespace) -> list[Fields]:
    return rows


def instance_id(fields: Fields) -> str:
    return fields.text("instance_id")


def named_image(fields: Fields) -> str:
    """The image that the row names, which has precedence over any rule for names; "" if it names none. Raises ValueError."""
    for column in IMAGE_COLUMNS:
        if name := fields.optional_text(column).strip():
            try:
                parse_name(name)
            except ValueError as error:
                raise fields.refusal(column, str(error)) from error
            return name
    return ""


def named_workdir(fields: Fields, default: str) -> str:
    """The repository's directory in the image: the row's `workdir` if it has one, otherwise `default`; "" means the image's own WORKDIR,
    which only a worker can look up. Raises ValueError.
    """
    if fields.value("workdir") is None:
        return default
    workdir = fields.optional_text("workdir")
    if workdir and not is_plain_path(workdir):
        why = f'must be an absolute path, is {workdir!r}; "" means the image\'s own WORKDIR'
        raise fields.refusal("workdir", why)
    return workdir


def is_plain_path(path: str) -> bool:
    """Whether the path is absolute and contains no variable."""
    return path.startswith("/") and "$" not in path


def hidden_tests(task: Task, gold: Gold) -> str:
    """The diff of the hidden tests: the verdict's own, otherwise the one beside the solution."""
    if isinstance(task.verdict, ExitCode) and task.verdict.test_patch:
        return task.verdict.test_patch.decode("utf-8", "surrogateescape")
    return gold.test_patch


@dataclass(frozen=True, slots=True)
class Importer:
    """One source of tasks.

    `task_of` makes a task and its solution from a row, `row_of` makes such a row again for `export`. `read` returns all rows
    of a path. `--only` picks rows by `id_of`, `--repo` and `--max-bytes` by the fields that `repo` and `size` name.
    `complete` adds missing columns to the picked rows, from the options that `add_options` defines. All of them raise
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


GIT_ENV = "export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'"


def checkout(commit: str) -> str:
    """A set-up script that checks out `commit`, even if the image's build left changed files."""
    return f"{GIT_ENV}\ngit checkout -q --force {shlex.quote(commit)}\n"


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows must meet every condition that is given; `first` counts those that do. Empty or None means any."""

    only: frozenset[str] = frozenset()  # instance ids, with or without "{source}:"
    repos: tuple[str, ...] = ()  # shell patterns such as django/*; one must match
    max_bytes: int | None = None  # size of problem statement, patch and hidden tests together, in UTF-8
    first: int | None = None


def ids_in(text: str) -> frozenset[str]:
    """The ids in "a,b,c", or one per line in the file of "@file". Raises ValueError if there are none."""
    listed = Path(text[1:]).read_text().split("\n") if text.startswith("@") else text.split(",")
    ids = frozenset(one.strip() for one in listed) - {""}
    if not ids:
        raise ValueError(f"--only {text}: no ids in it")
    return ids


def selected(rows: Sequence[Fields], importer: Importer, source: str, selection: Selection) -> list[Fields]:
    """The rows to import, in order. A row that cannot be read is kept, so that the import reports it.

    Raises ValueError for ids that no row has, and if no row is left.
    """
    chosen: list[Fields] = []
    missing = set(selection.only)
    for fields in rows:
        names = _names(fields, importer, source)
        if selection.only and names and not names & selection.only:
            continue
        missing -= names
        if _meets(fields, importer, selection):
            chosen.append(fields)
    if missing:
        raise ValueError(f"--only: no row has the id {', '.join(sorted(missing))}")
    if not chosen[: selection.first]:
        raise ValueError(f"none of {len(rows)} rows is left by {_told(selection)}")
    return chosen[: selection.first]


def _names(fields: Fields, importer: Importer, source: str) -> set[str]:
    """The names by which the row may be chosen; none if its id cannot be read."""
    try:
        name = importer.id_of(fields)
    except ValueError:
        return set()
    return {name, f"{source}:{name}"}


def _meets(fields: Fields, importer: Importer, selection: Selection) -> bool:
    if fields.broken:
        return True
    repo = fields.values.get(importer.repo)
    if isinstance(repo, str) and selection.repos:
        name = repo.lower()
        if not any(fnmatchcase(name, pattern.lower()) for pattern in selection.repos):
            return False
    if selection.max_bytes is None:
        return True
    texts = [fields.values.get(name) for name in importer.size]
    num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts if isinstance(text, str))
    return num_bytes <= selection.max_bytes


def _told(selection: Selection) -> str:
    options = {
        "--only": bool(selection.only),
        "--repo": bool(selection.repos),
        "--max-bytes": selection.max_bytes is not None,
        "--first": selection.first is not None,
    }
    return ", ".join(option for option, given in options.items() if given)
