"""The generated family: deterministic, solvable, and split by name."""

import pytest

from trainer.demo.family import (
    KINDS,
    OPEN_KINDS,
    UNSEEN_KINDS,
    DemoTask,
    make_task,
    make_tasks,
    replace_line,
    split_of,
)

SPLITS = ("warmstart", "train", "heldout", "unseen")


def outcome(task: DemoTask, source: str) -> bool:
    """Whether the module's text passes the task's checks."""
    namespace: dict[str, object] = {}
    try:
        exec(source, namespace)
        return all(repr(eval(call, namespace)) == value for call, value in task.checks)
    except (ArithmeticError, LookupError, NameError, SyntaxError, TypeError):
        return False


@pytest.mark.parametrize("split", SPLITS)
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
    names = {split: {task.function for task in make_tasks(1, split, 100)} for split in SPLITS}
    assert sum(len(members) for members in names.values()) == len(set().union(*names.values()))
    assert all(split_of(name) == split for split, members in names.items() for name in members)


def test_a_family_names_each_function_once() -> None:
    tasks = make_tasks(2, "train", 120)
    assert len({task.function for task in tasks}) == 120


def test_no_other_repair_passes() -> None:
    for task in make_tasks(5, "train", 120):
        assert len(task.others) == (3 if task.kind in OPEN_KINDS else 0)
        for other in task.others:
            assert not outcome(task, replace_line(task.files[task.path], task.line, other))


def test_kinds_of_bug_that_are_held_out_are_in_no_other_split() -> None:
    kinds = {split: {task.kind for task in make_tasks(5, split, 120)} for split in SPLITS}
    assert kinds["warmstart"] == kinds["train"] == kinds["heldout"] == set(KINDS)
    assert kinds["unseen"] == set(UNSEEN_KINDS)
    assert not set(KINDS) & set(UNSEEN_KINDS)
