"""The teacher: right part of the time when hasty, always when diligent."""

import random

from trainer.demo.conversation import Templates
from trainer.demo.family import make_tasks
from trainer.demo.teacher import HASTY, Habits, teach


def solved_share(habits: Habits) -> float:
    rng, templates = random.Random(0), Templates()
    lessons = [teach(task, rng, templates, habits) for task in make_tasks(0, "warmstart", 300)]
    return sum(lesson.solved for lesson in lessons) / len(lessons)


def test_the_hasty_teacher_is_right_part_of_the_time() -> None:
    assert 0.25 < solved_share(HASTY) < 0.55


def test_reading_and_care_solve_every_task() -> None:
    assert solved_share(Habits(reads=1.0, careful=1.0, tests=1.0, starts_over=1.0)) == 1.0


def test_a_lesson_is_system_task_then_turns_and_observations_and_ends_with_a_submission() -> None:
    lesson = teach(make_tasks(0, "warmstart", 1)[0], random.Random(1), Templates())
    roles = [message.role for message in lesson.messages]
    assert roles[:2] == ["system", "user"]
    assert roles[2:] == ["assistant", "user"] * (len(roles[2:]) // 2) + ["assistant"]
    assert roles.count("assistant") <= 8
