"""`python -m workers.tasksets import SOURCE PATH --out tasks.jsonl`: imports published tasks into a task file.

It writes the task file and, beside it, the solutions: tasks.gold.jsonl belongs to tasks.jsonl. If any task is refused, nothing is written,
and every reason is printed with file, row and field. `split` divides a task file into two that share no task; `export` writes formats of
other tools; `from-git` makes tasks from a repository's history, `plant` by planting bugs in its code. Exit status: 0 done; 1 a task is
refused; 2 misuse, with what to change.
"""

import argparse
import contextlib
import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipeline.commandline import MISUSE, VERB_PARSER, program
from pipeline.errors import describe_error
from pipeline.screen import visible, visible_line
from pipeline.task import Task
from pipeline.taskfile import (
    gold_path,
    read_gold,
    read_tasks,
    read_verified,
    verified_path,
    write_gold,
    write_tasks,
    write_verified,
)
from workers.making.from_git import add_from_git_parser
from workers.making.plant import add_plant_parser
from workers.tasksets.exports import add_export_parser
from workers.tasksets.importing import Refused, Selection, ids_in, selected, tasks_of
from workers.tasksets.rows import Fields
from workers.tasksets.sources import SOURCES


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        said: str | int = options.run(options)
        if isinstance(said, int):
            return said
        print(visible(said))
    except Refused as refused:
        print(*map(visible_line, refused.reasons), sep="\n", file=sys.stderr)
        hint = visible_line(refused.hint)
        print(f"{len(refused.reasons)} refused{hint}; nothing was written", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        return MISUSE
    return 0


def _import(options: argparse.Namespace) -> str:
    importer = SOURCES[options.source]
    selection = Selection(
        only=ids_in(options.only) if options.only else frozenset(),
        repos=tuple(options.repo),
        max_bytes=options.max_bytes,
        first=options.first,
    )
    rows = selected(importer.read(options.path, options.split), importer, options.source, selection)
    try:
        tasks, golds = tasks_of(importer, importer.complete(rows, options))
    except Refused as refused:
        if len(refused.reasons) == len(rows) and (others := _sources_of(rows[0], but=options.source)):
            refused.hint = f", all there are: they look like rows of {' or '.join(others)}"
        raise
    write_tasks(options.out, tasks)
    write_gold(gold_path(options.out), golds)
    kinds = Counter(str(task.verdict.__struct_config__.tag) for task in tasks)
    judged = ", ".join(f"{count} by {kind}" for kind, count in sorted(kinds.items()))
    return f"{len(tasks)} tasks ({judged}) in {options.out}, their solutions in {gold_path(options.out)}"


def _sources_of(row: Fields, *, but: str) -> list[str]:
    """The other sources that would accept the row as it is."""
    takers: list[str] = []
    for name, importer in SOURCES.items():
        if name == but:
            continue
        with contextlib.suppress(ValueError):
            importer.task_of(row)
            takers.append(name)
    return takers


def _split(options: argparse.Namespace) -> str:
    out = options.out or options.path.parent
    written = split(options.path, out, options.train, options.heldout, options.seed)
    return "\n".join(f"{count} tasks in {file}" for file, count in written.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program("workers.tasksets"), description=__doc__)
    verbs = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=VERB_PARSER)
    _add_import(verbs.add_parser("import", help="import published tasks into a task file"))
    _add_split(verbs.add_parser("split", help="divide a task file into one to train on and one held out"))
    add_export_parser(verbs)
    add_from_git_parser(
        verbs.add_parser("from-git", help="make tasks from the history of a Python repository")
    )
    add_plant_parser(verbs.add_parser("plant", help="make tasks by planting bugs in a Python repository"))
    return parser


def _add_import(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_subparsers(dest="source", metavar="SOURCE", required=True, parser_class=VERB_PARSER)
    for name, importer in SOURCES.items():
        source = sources.add_parser(name, help=importer.help, description=importer.help)
        add = source.add_argument
        add(
            "path",
            type=Path,
            metavar="PATH",
            help=".jsonl, .json, .parquet, the directory of a saved dataset, or another form of the source",
        )
        add("--out", type=Path, required=True, metavar="TASKS.jsonl")
        add("--split", metavar="NAME", help="the split to import, if the path has several")
        add(
            "--first",
            type=_positive,
            metavar="N",
            help="import at most N of the tasks that the other options leave",
        )
        add("--only", metavar="IDS", help="import these instance ids: A,B,C, or @FILE with one per line")
        add(
            "--repo",
            action="append",
            default=[],
            metavar="PATTERN",
            help="import repositories of this name, such as 'django/*'; may be repeated",
        )
        help_ = "leave out tasks whose problem statement, patch and hidden tests are longer together"
        add("--max-bytes", type=_positive, metavar="N", help=help_)
        importer.add_options(source)
        source.set_defaults(run=_import)


def _add_split(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="TASKS.jsonl")
    parser.add_argument(
        "--train",
        type=_positive,
        metavar="N",
        help="number of tasks to train on; default: all that are not held out",
    )
    parser.add_argument(
        "--heldout",
        type=_amount,
        required=True,
        metavar="M",
        help="number of tasks to hold out, or a share such as 0.1",
    )
    parser.add_argument("--seed", type=int, default=0, help="tasks are chosen by their ids and this number")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write both; default: beside TASKS.jsonl"
    )
    parser.set_defaults(run=_split)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _amount(text: str) -> float:
    """A whole number of at least 1, or a share between 0 and 1."""
    number = float(text)
    if number <= 0 or (number >= 1 and not number.is_integer()):
        raise argparse.ArgumentTypeError(f"{text} is neither a number of tasks nor a share of them")
    return number


def divided(
    tasks: Sequence[Task], num_train: int | None, heldout: float, seed: int
) -> tuple[list[Task], list[Task]]:
    """Two lists of `tasks`, each in their order: `heldout` of them, a share if below 1, and `num_train` of the others.

    The choice depends only on ids and `seed`, so that it does not change with the order of the file. Raises
    ValueError if there are not enough, or either would be empty.
    """
    num_heldout = round(heldout * len(tasks)) if heldout < 1 else int(heldout)
    num_train = len(tasks) - num_heldout if num_train is None else num_train
    if num_train < 1 or num_heldout < 1 or num_train + num_heldout > len(tasks):
        raise ValueError(
            f"{len(tasks)} tasks cannot be divided into {num_train} to train on and {num_heldout} held out"
        )
    ranked = sorted((task.id for task in tasks), key=lambda task_id: _rank(task_id, seed))
    held, trained = set(ranked[:num_heldout]), set(ranked[num_heldout : num_heldout + num_train])
    return [task for task in tasks if task.id in trained], [task for task in tasks if task.id in held]


def split(path: Path, out: Path, num_train: int | None, heldout: float, seed: int) -> dict[Path, int]:
    """Writes `{name}.train.jsonl` and `{name}.heldout.jsonl` into `out`, with their solutions and verifications.

    Returns the number of tasks in each. Raises ValueError or OSError, and writes nothing, if that is impossible.
    """
    train, held = divided(read_tasks(path), num_train, heldout, seed)
    golds = read_gold(gold_path(path))
    verified = read_verified(verified_path(path)) if verified_path(path).exists() else {}
    without = [task.id for task in (*train, *held) if task.id not in golds]
    if without:
        raise ValueError(f"{gold_path(path)}: no solution of {', '.join(without)}")
    files = {out / f"{path.stem}.train.jsonl": train, out / f"{path.stem}.heldout.jsonl": held}
    for file, tasks in files.items():
        write_tasks(file, tasks)
        write_gold(gold_path(file), (golds[task.id] for task in tasks))
        if verified:
            known = (verified[task.id] for task in tasks if task.id in verified)
            write_verified(verified_path(file), known)
    return {file: len(tasks) for file, tasks in files.items()}


def _rank(task_id: str, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{task_id}".encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
