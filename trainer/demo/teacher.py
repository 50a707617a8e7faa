"""The teacher of the warm start: a hasty engineer who is right only part of the time.

The teacher finds the function, then often writes a fix from the issue and the ``def`` line alone, tests only sometimes, and
may submit after a failed test. After reading, testing and starting over, the fix is mostly right. What is left to learn is
when to do which.
"""

import random
import re
from collections.abc import Callable

import msgspec

from trainer.demo import rehearsal
from trainer.demo.conversation import EpisodeMessage, Templates, action
from trainer.demo.family import DemoTask


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """How often the teacher does what, as probabilities.

    `reads`: before the first edit; `careful`: edits the right line after reading; `tests`: runs a check before submitting;
    `starts_over`: does so after a failed check instead of submitting.
    """

    reads: float = 0.35
    careful: float = 0.92
    tests: float = 0.35
    starts_over: float = 0.4


HASTY = Habits()
# For the first lessons, which teach the skills: a model that rarely sees a file never learns to use one.
PATIENT = Habits(reads=0.9, careful=1.0, tests=0.5, starts_over=0.8)


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """One episode of the teacher; `solved` says whether the hidden tests would have passed."""

    messages: list[EpisodeMessage]
    solved: bool


def teach(task: DemoTask, rng: random.Random, templates: Templates, habits: Habits = HASTY) -> Lesson:
    """Let the teacher work on one task."""
    room = rehearsal.Rehearsal(task.files)
    messages = templates.opening(task.issue)

    def do(thought: str, command: str) -> str:
        output = room.run(command)
        messages.extend([action(thought, command), templates.observation(0, output)])
        return output

    do("find it.", rehearsal.find(task.function))
    if rng.random() < habits.reads:
        do("read it.", rehearsal.read(task.path))
        _edit_after_reading(task, rng, habits, do)
    else:
        line, content = task.guess
        do(f"looks easy, change line {line}.", rehearsal.edit(task.path, line, content))
    if rng.random() < habits.tests:
        passed = do("test it.", rehearsal.check(task.module, task.function, task.example)) == "True\n"
        if not passed and rng.random() < habits.starts_over:
            do("not right, start over.", rehearsal.read(task.path, reset=True))
            _edit_after_reading(task, rng, habits, do)
            if rng.random() < habits.tests:
                do("test it.", rehearsal.check(task.module, task.function, task.example))
    messages.append(action("done.", rehearsal.SUBMIT))
    return Lesson(messages=messages, solved=room.files[task.path] == task.fixed_files()[task.path])


def _edit_after_reading(
    task: DemoTask, rng: random.Random, habits: Habits, do: Callable[[str, str], str]
) -> None:
    line, content = task.line, task.good
    if rng.random() >= habits.careful:
        line, content = _slip(task, rng)
    rows = task.files[task.path].splitlines()
    do(
        f"change line {line}\t{rows[line - 1] if line <= len(rows) else ''}",
        rehearsal.edit(task.path, line, content),
    )


def _slip(task: DemoTask, rng: random.Random) -> tuple[int, str]:
    """A reader's mistake: the neighbouring line, or the wrong variable."""
    if rng.random() < 0.5:
        return task.line + rng.choice((-1, 1)), task.good
    names = re.findall(
        r"\b[a-z]+\b", task.good.replace("return", "").replace("for ", "").replace("range", "")
    )
    body = re.findall(r"\b[a-z]+(?= =)", task.files[task.path])
    wrong = rng.choice(names)
    right = rng.choice([*body, *names])
    return task.line, re.sub(rf"\b{wrong}\b", right, task.good)
