"""`python -m trainer.tasksets import SOURCE PATH --out tasks.jsonl`: imports published tasks into a task file.

Writes the task file and, beside it, the solutions: tasks.gold.jsonl belongs to tasks.jsonl. If any task is refused, nothing
is written, and every reason is printed with file, row and field. `split` divides a task file into two that share no task;
`export` writes what other tools read. Exit status 0; 1 after a refusal; 2 for a malformed command line.
"""

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import describe_error
from pipeline.taskfile import gold_path, write_gold, write_tasks
from pipeline.visible import visible, visible_line
from trainer.tasksets import splitting
from trainer.tasksets.exports import add_export_parser
from trainer.tasksets.fields import Fields
from trainer.tasksets.filters import Selection, ids_in, selected
from trainer.tasksets.importing import Refused, tasks_of
from trainer.tasksets.sources import SOURCES


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        print(visible(options.run(options)))
    except Refused as refused:
        print(*map(visible_line, refused.reasons), sep="\n", file=sys.stderr)
        hint = visible_line(refused.hint)
        print(f"{len(refused.reasons)} refused{hint}; nothing was written", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(describe_error(error), file=sys.stderr)
        return 1
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
        if len(refused.reasons) == len(rows) and (others := _sources_of(rows[0])):
            refused.hint = f", all there are: they look like rows of {' or '.join(others)}"
        raise
    write_tasks(options.out, tasks)
    write_gold(gold_path(options.out), golds)
    kinds = Counter(str(task.verdict.__struct_config__.tag) for task in tasks)
    judged = ", ".join(f"{count} by {kind}" for kind, count in sorted(kinds.items()))
    return f"{len(tasks)} tasks ({judged}) in {options.out}, their solutions in {gold_path(options.out)}"


def _sources_of(row: Fields) -> list[str]:
    """The sources that would accept the row as it stands."""
    takers: list[str] = []
    for name, importer in SOURCES.items():
        with contextlib.suppress(ValueError):
            importer.task_of(row)
            takers.append(name)
    return takers


def _split(options: argparse.Namespace) -> str:
    out = options.out or options.path.parent
    written = splitting.split(options.path, out, options.train, options.heldout, options.seed)
    return "\n".join(f"{count} tasks in {file}" for file, count in written.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.tasksets", description=__doc__)
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_import(verbs.add_parser("import", help="import published tasks into a task file"))
    _add_split(verbs.add_parser("split", help="divide a task file into one to train on and one held out"))
    add_export_parser(verbs)
    return parser


def _add_import(parser: argparse.ArgumentParser) -> None:
    sources = parser.add_subparsers(dest="source", metavar="SOURCE", required=True)
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
    """A whole number from 1 up, or a share between 0 and 1."""
    number = float(text)
    if number <= 0 or (number >= 1 and not number.is_integer()):
        raise argparse.ArgumentTypeError(f"{text} is neither a number of tasks nor a share of them")
    return number


if __name__ == "__main__":
    sys.exit(main())
