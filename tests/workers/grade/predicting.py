"""Predictions on disk, and the command that grades them."""

import json
from pathlib import Path
from typing import Any

from workers.grade import main


def write_predictions(path: Path, patches: dict[str, str | None]) -> Path:
    """As mini-swe-agent writes them, by task."""
    rows = {
        task_id: {"model_name_or_path": "m", "instance_id": task_id, "model_patch": patch}
        for task_id, patch in patches.items()
    }
    path.write_text(json.dumps(rows))
    return path


def grade(tasks: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status, and what --json says by task."""
    out = tasks.with_name("graded.json")
    status = main([str(tasks), "--json", str(out), *arguments])
    return status, {line["task"]: line for line in json.loads(out.read_text())}
