"""Published tasks as the tests find them: what lies in fixtures/, and importing it."""

import json
from pathlib import Path
from typing import Any

from pipeline.task import Task
from pipeline.taskfile import Gold, gold_path, read_gold, read_tasks
from workers.tasksets.__main__ import main

FIXTURES = Path(__file__).with_name("fixtures")


def write_lines(path: Path, *rows: object) -> Path:
    """A row that is text goes in as it is."""
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def fixture_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FIXTURES / name).read_text().splitlines()]


def imported(out: Path, source: str, path: Path, *options: str) -> dict[str, tuple[Task, Gold]]:
    """By instance id. `out` is the directory to write into."""
    tasks = out / "tasks.jsonl"
    assert main(["import", source, str(path), "--out", str(tasks), *options]) == 0
    golds = read_gold(gold_path(tasks))
    return {task.id.partition(":")[2]: (task, golds[task.id]) for task in read_tasks(tasks)}
