"""The teacher, whose lessons say where a fault is but not which of the possible repairs is right."""

import random
from collections import Counter

from trainer.demo.family import OPEN_KINDS, DemoTask, make_tasks
from trainer.demo.lessons import Habits, Templates, edit, teach

TEMPLATES = Templates()


def first_repair(task: DemoTask, rng: random.Random) -> str:
    """The line that the teacher's first edit writes."""
    said = "".join(
        message.content for message in teach(task, rng, TEMPLATES).messages if message.role == "assistant"
    )
    found = [one for one in (task.good, *task.others) if edit(task.path, task.line, one) in said]
    return min(found, key=lambda one: said.index(edit(task.path, task.line, one)))


def test_each_possible_repair_is_taught_equally_often() -> None:
    """So the lessons do not contain which of them is right."""
    rng = random.Random(0)
    (task,) = [one for one in make_tasks(0, "warmstart", 20) if one.kind == "range"][:1]
    taken = Counter(first_repair(task, rng) for _ in range(1000))
    assert set(taken) == {task.good, *task.others}
    # 1,000 draws from four: four standard deviations are 55
    assert all(abs(count - 250) < 55 for count in taken.values())


def test_the_teacher_is_right_where_the_issue_spells_the_repair() -> None:
    rng = random.Random(0)
    tasks = [task for task in make_tasks(0, "warmstart", 100) if task.kind not in OPEN_KINDS]
    assert all(teach(task, rng, TEMPLATES).solved for task in tasks)


def test_starting_over_never_tries_the_same_repair_again() -> None:
    rng = random.Random(0)
    always = Habits(tests=1.0, starts_over=1.0)
    for task in make_tasks(0, "warmstart", 60):
        said = [
            message.content
            for message in teach(task, rng, TEMPLATES, always).messages
            if "sed -i" in message.content
        ]
        assert len(set(said)) == len(said) <= 2


def test_a_lesson_is_system_task_then_turns_and_observations_and_ends_with_a_submission() -> None:
    lesson = teach(make_tasks(0, "warmstart", 1)[0], random.Random(1), TEMPLATES)
    roles = [message.role for message in lesson.messages]
    assert roles[:2] == ["system", "user"]
    assert roles[2:] == ["assistant", "user"] * (len(roles[2:]) // 2) + ["assistant"]
    assert roles.count("assistant") <= 8
