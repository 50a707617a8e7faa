"""`python -m workers.tasksets import SOURCE PATH --out tasks.jsonl`: imports published tasks into a task file.

It writes the task file and, beside it, the solutions: tasks.gold.jsonl belongs to tasks.jsonl. If any task is refused, nothing is written,
and every reason is printed with file, row and field. `join` makes one task file of several, without duplicates; `split` divides one into
two that share no task; `report` says what is in them; `export` writes formats of other tools; `from-git` makes tasks from a repository's
history, `plant` by planting bugs in its code. Exit status: 0 done; 1 a task is refused; 2 misuse, with what to change.
"""

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pipeline.commandline import MISUSE, VERB_PARSER, program
from pipeline.errors import describe_error
from pipeline.screen import visible, visible_line
from pipeline.taskfile import gold_path, write_gold, write_tasks
from workers.making.from_git import add_from_git_parser
from workers.making.plant import add_plant_parser
from workers.tasksets.dataset import add_join_parser, add_report_parser, add_split_parser
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program("workers.tasksets"), description=__doc__)
    verbs = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=VERB_PARSER)
    _add_import(verbs.add_parser("import", help="import published tasks into a task file"))
    add_split_parser(
        verbs.add_parser("split", help="divide a task file into one to train on and one held out")
    )
    add_join_parser(verbs.add_parser("join", help="make one task file of several, without duplicates"))
    add_report_parser(verbs.add_parser("report", help="say what tasks there are, with pictures"))
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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
