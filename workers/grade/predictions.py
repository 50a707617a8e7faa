"""Predictions: patches that somebody else's agent made of our tasks.

A preds.json as mini-swe-agent writes it, `{ID: {"model_patch": ...}}`, a JSON list of `{"instance_id": ..., "model_patch": ...}`, or one
such object a line (JSONL). Which of them a file is shows in its content.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pipeline.task import Task
from workers.unqueued.tasks import TaskIndex


@dataclass(frozen=True, slots=True)
class Prediction:
    """A patch for a task."""

    task: Task
    patch: bytes


def read_predictions(path: Path) -> list[tuple[str, bytes]]:
    """Ids as they are given, and patches, in order. Raises ValueError naming the place that is no prediction."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}; give the predictions as JSON or JSONL") from error
    found = list(_predictions(path, text))
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


def _predictions(path: Path, text: str) -> Iterable[tuple[str, bytes]]:
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
    """A JSON object as it is written: a key that stands twice is seen twice."""


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
            f'{where}: instance_id: not a text; a prediction is {{"instance_id": ..., "model_patch": ...}}'
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
        raise ValueError(f"{where}: model_patch: not a text")
    try:
        return patch.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: model_patch: {error.reason}: not Unicode text") from error
