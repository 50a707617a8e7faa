"""Ready groups that wait for judgements: passed over, and never trained too late for that."""

import pytest

from tests.trainer.rollouts.test_groups import book, fill
from tests.trainer.trajectories import behind
from trainer.recipe import Stragglers
from trainer.rollouts.groups import Group, GroupBook


def ready(into: GroupBook, *cursors: int, waiting: tuple[int, ...] = ()) -> None:
    for cursor in cursors:
        into.verdict(fill(into, cursor, [1.0, 0.0]))
        if cursor in waiting:
            into.hold_back(cursor)


def cursors(groups: list[Group] | None) -> list[int] | None:
    return None if groups is None else [group.cursor for group in groups]


def test_a_group_that_waits_is_passed_over_while_that_makes_it_not_late() -> None:
    b = book(max_lag=2)
    ready(b, 0, 1, 2, waiting=(0,))
    assert cursors(b.take(behind(0))) == [1]
    assert b.num_live == 2, "it counts for admission as before"
    b.release(0)
    assert cursors(b.take(behind(1))) == [0]


@pytest.mark.parametrize("stragglers", ["wait", "train", "withhold"])
def test_a_group_that_would_become_late_goes_without_its_judgements(stragglers: Stragglers) -> None:
    b = book(max_lag=2, stragglers=stragglers)
    ready(b, 0, 1, 2, waiting=(0,))
    assert cursors(b.take(behind(2))) == [0]
    assert b.num_unjudged == 0


@pytest.mark.parametrize("stragglers", ["wait", "train", "withhold"])
def test_a_group_whose_judgements_are_required_is_waited_for(stragglers: Stragglers) -> None:
    b = book(max_lag=2, stragglers=stragglers, requires_judgements=True)
    ready(b, 0, 1, waiting=(0,))
    assert b.take(behind(2)) is None
    b.release(0)
    assert cursors(b.take(behind(2))) == [0]


def test_a_step_waits_while_too_few_groups_are_judged() -> None:
    b = book(groups_per_step=2)
    ready(b, 0, 1, waiting=(1,))
    assert b.take(behind(0)) is None
    assert cursors(b.take_some(behind(0), num_taken=0)) == [0]
    b.release(1)
    assert cursors(b.take_some(behind(0), num_taken=1)) == [1]


def test_a_waiting_group_of_a_task_in_quarantine_waits_no_longer() -> None:
    b = book()
    ready(b, 0, waiting=(0,))
    assert [group.cursor for group in b.withdraw_task("t0")] == [0]
    assert (b.num_unjudged, b.num_live) == (0, 0)
