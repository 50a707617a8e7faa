"""A judge of steps that knows the task's bug, and is wrong at a given rate.

It scores what a turn did for the repair, never the outcome: the function was found, the right file read, an edit left the
function right or wrong, a check was worth running. Format errors and the submission have no score, as in `[judge]` of a recipe.
"""

import random
from collections.abc import Sequence

from benchmarks.simulation.episodes import Episode
from trainer.demo import lessons
from trainer.demo.family import DemoTask


def scores(episode: Episode, *, accuracy: float, rng: random.Random) -> dict[int, float]:
    """The score of each turn, 1 or -1; each is turned round with probability 1 - `accuracy`, whatever the others are."""
    right = true_scores(episode.task, episode.commands, episode.solved_after)
    return {turn: score if rng.random() < accuracy else -score for turn, score in right.items()}


def true_scores(
    task: DemoTask, commands: Sequence[str | None], solved_after: Sequence[bool]
) -> dict[int, float]:
    """What a judge without errors says of these commands; `solved_after` tells whether the files were right after each."""
    found: dict[int, float] = {}
    for turn, command in enumerate(commands):
        is_good = _is_good(task, commands[:turn], command, solved_after[turn])
        if is_good is not None:
            found[turn] = 1.0 if is_good else -1.0
    return found


def _is_good(
    task: DemoTask, before: Sequence[str | None], command: str | None, is_solved: bool
) -> bool | None:
    """None: not scored."""
    if command is None or lessons.SENTINEL in command:
        return None
    if command == lessons.find(task.function):
        return command not in before
    if command == lessons.read(task.path):
        return command not in before
    if command == lessons.read(task.path, reset=True):
        return any(_is_edit(one) for one in before)
    if _is_edit(command):
        return is_solved
    if command == lessons.check(task.module, task.function, task.example):
        return bool(before) and _is_edit(before[-1])
    return False


def _is_edit(command: str | None) -> bool:
    return command is not None and command.startswith("sed -i ")
