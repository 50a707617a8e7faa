"""The generated family: deterministic, solvable, and split by name."""

import pytest

from trainer.demo.bugs import KINDS
from trainer.demo.family import DemoTask, make_task, make_tasks, replace_line
from trainer.demo.words import split_of


def outcome(task: DemoTask, source: str) -> bool:
    """Whether the module's text passes the task's checks."""
    namespace: dict[str, object] = {}
    try:
        exec(source, namespace)
        return all(repr(eval(call, namespace)) == value for call, value in task.checks)
    except (ArithmeticError, LookupError, NameError, SyntaxError, TypeError):
        return False


@pytest.mark.parametrize("split", ["warmstart", "train", "heldout"])
def test_every_task_fails_its_checks_until_it_is_fixed(split: str) -> None:
    for number in range(100):
        task = make_task(0, split, number)
        assert not outcome(task, task.files[task.path])
        assert outcome(task, task.fixed_files()[task.path])
        assert f"{task.function}(" in task.issue


def test_the_same_seed_gives_the_same_task_and_another_seed_another() -> None:
    assert make_task(3, "train", 5) == make_task(3, "train", 5)
    assert make_task(3, "train", 5) != make_task(4, "train", 5)


def test_no_function_name_is_in_two_splits() -> None:
    names = {
        split: {task.function for task in make_tasks(1, split, 150)}
        for split in ("warmstart", "train", "heldout")
    }
    assert not names["warmstart"] & names["train"]
    assert not names["heldout"] & (names["warmstart"] | names["train"])
    assert all(split_of(name) == split for split, members in names.items() for name in members)


def test_a_family_names_each_function_once() -> None:
    tasks = make_tasks(2, "train", 120)
    assert len({task.function for task in tasks}) == 120


def test_most_tasks_cannot_be_fixed_without_reading_the_file() -> None:
    tasks = make_tasks(5, "train", 300)
    guessed = [outcome(task, replace_line(task.files[task.path], *task.guess)) for task in tasks]
    assert 0.05 < sum(guessed) / len(guessed) < 0.25
    assert {task.kind for task in tasks} == set(KINDS)
