"""Divides one task file into two that share no task: to train on, and to hold out."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

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


def divided(
    tasks: Sequence[Task], num_train: int | None, heldout: float, seed: int
) -> tuple[list[Task], list[Task]]:
    """`tasks` in two, each in their order: `heldout` of them, a share if below 1, and `num_train` of the others.

    Chosen by ids and `seed` alone, so that a task's place does not change with the order of the file. Raises
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

    Returns how many tasks each has. Raises ValueError or OSError, and writes nothing, if that cannot be.
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
