"""`python -m trainer.tasksets import fleet DIR --out tasks.jsonl`: published tasks into a task file.

Writes the task file and, beside it, the solutions: tasks.jsonl has tasks.gold.jsonl. Writes nothing if any
task is refused, and says which. Exit status 0, or 1 after a refusal.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.taskfile import gold_path, write_gold, write_tasks
from trainer.tasksets.fleet import import_fleet
from trainer.tasksets.swe_bench import import_swe_bench

IMPORTERS = {"fleet": import_fleet, "swe-bench": import_swe_bench}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        tasks, golds = IMPORTERS[options.kind](options.source)
        write_tasks(options.out, tasks)
        write_gold(gold_path(options.out), golds)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(tasks)} tasks in {options.out}, their solutions in {gold_path(options.out)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer.tasksets", description=__doc__)
    kinds = parser.add_subparsers(required=True).add_parser("import", help="published tasks into a task file")
    sources = kinds.add_subparsers(dest="kind", required=True)
    fleet = sources.add_parser("fleet", help="a directory of swe-task-generator's task_*/task.json")
    swe_bench = sources.add_parser(
        "swe-bench", help="a JSONL file of SWE-bench rows as swebench 5.x has them"
    )
    for source in (fleet, swe_bench):
        source.add_argument("source", type=Path)
        source.add_argument("--out", type=Path, required=True, metavar="TASKS.jsonl")
    return parser


if __name__ == "__main__":
    sys.exit(main())
