"""Admission: nothing is trained later than promised, and nothing waits for ever."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.trajectories import behind, member
from trainer.rollouts.admission import FREE_FAILURES, LONGEST_PAUSE_S, Admission, Backlog, Brake
from trainer.rollouts.groups import Group, GroupBook

admissions = st.builds(
    Admission,
    max_lag_versions=st.integers(0, 4),
    groups_per_step=st.integers(1, 4),
    num_steps=st.integers(1, 12),
)


@dataclass
class Outcome:
    lags: list[int]
    steps: int
    most_open: int


def simulate(admission: Admission, data: st.DataObject, *, is_controlled: bool = False) -> Outcome:
    """A run whose groups finish in any order, and some of which are dropped, driven as the trainer drives
    it; with another limit for admission after each step if it `is_controlled`.
    """
    bound = admission
    book = GroupBook(admission, min_valid_of=lambda size: 2, stragglers="wait")
    unfinished: dict[int, Group] = {}
    cursor = version = most_open = 0
    lags: list[int] = []
    drops = 30  # endless dropping would be an endless run
    while version < admission.num_steps:
        for _ in range(bound.room(begun_steps=version, served_steps=version, live_groups=book.num_live)):
            unfinished[cursor] = book.expect(cursor, size=2, version=version, task_id="t")
            cursor += 1
        most_open = max(most_open, book.num_live)
        groups = book.take(behind(version))
        if groups is not None:
            lags += [version - group.enqueued_version for group in groups]
            version += 1
            if is_controlled:
                limit = data.draw(st.integers(0, admission.max_lag_versions))
                bound = replace(admission, max_lag_versions=limit)
            continue
        assert unfinished, (
            "nothing is open, nothing may be enqueued, and yet there is no batch: it would hang"
        )
        finished = unfinished.pop(data.draw(st.sampled_from(sorted(unfinished))))
        dropped = drops > 0 and data.draw(st.booleans())
        drops -= dropped
        finish(book, finished, has_signal=not dropped)
    return Outcome(lags, version, most_open)


def finish(book: GroupBook, group: Group, *, has_signal: bool) -> None:
    for number in range(group.size):
        reward = float(number) if has_signal else 0.0
        complete = book.hold(group.cursor, member(group.cursor, number, group_size=group.size, reward=reward))
    assert complete is group
    book.verdict(group)


# Quick: no group is trained later than the lag allows.
@settings(max_examples=150)
@given(admission=admissions, data=st.data())
def test_no_group_is_trained_later_than_the_lag_allows_in_whatever_order_they_finish(
    admission: Admission, data: st.DataObject
) -> None:
    outcome = simulate(admission, data)
    assert outcome.steps == admission.num_steps
    assert max(outcome.lags) <= admission.max_lag_versions
    assert outcome.most_open <= (admission.max_lag_versions + 1) * admission.groups_per_step


@pytest.mark.slow
@settings(max_examples=100)
@given(admission=admissions, data=st.data())
def test_a_limit_that_changes_below_the_largest_lag_keeps_the_promise_and_hangs_nothing(
    admission: Admission, data: st.DataObject
) -> None:
    outcome = simulate(admission, data, is_controlled=True)
    assert outcome.steps == admission.num_steps
    assert max(outcome.lags) <= admission.max_lag_versions


def test_a_dropped_group_gives_its_slot_back() -> None:
    admission = Admission(max_lag_versions=0, groups_per_step=2, num_steps=5)
    assert admission.room(begun_steps=0, served_steps=0, live_groups=2) == 0
    assert admission.room(begun_steps=0, served_steps=0, live_groups=1) == 1


def test_a_published_version_opens_one_more_step() -> None:
    admission = Admission(max_lag_versions=1, groups_per_step=3, num_steps=9)
    assert admission.room(begun_steps=1, served_steps=0, live_groups=3) == 0
    assert admission.room(begun_steps=1, served_steps=1, live_groups=3) == 3


def test_the_bound_of_the_lag_and_the_end_of_the_run_are_told_apart() -> None:
    admission = Admission(max_lag_versions=1, groups_per_step=2, num_steps=3)
    assert admission.bound(begun_steps=0, served_steps=0, live_groups=3) == ""
    assert admission.bound(begun_steps=0, served_steps=0, live_groups=4) == "lag"
    assert admission.bound(begun_steps=1, served_steps=1, live_groups=4) == "end"


def test_no_more_is_enqueued_than_the_last_steps_can_use() -> None:
    admission = Admission(max_lag_versions=8, groups_per_step=2, num_steps=3)
    assert admission.room(begun_steps=0, served_steps=0, live_groups=0) == 6
    assert admission.room(begun_steps=2, served_steps=2, live_groups=2) == 0
    assert "remaining steps need is enqueued" in admission.sentence(
        begun_steps=2, served_steps=2, live_groups=2
    )


def test_the_sentence_says_why_nothing_is_enqueued() -> None:
    admission = Admission(max_lag_versions=1, groups_per_step=2, num_steps=9)
    assert admission.sentence(begun_steps=0, served_steps=0, live_groups=1).startswith("open: 3 more groups")
    closed = admission.sentence(begun_steps=0, served_steps=0, live_groups=4)
    assert closed.startswith("closed: 4 groups are open")
    assert "more than 1 versions late" in closed


def test_a_few_failed_groups_slow_nothing_down() -> None:
    assert Brake(failed_groups=FREE_FAILURES, last_failed_at=9.0).room(7, open_groups=3, now=9.0) == 7


def test_an_outage_is_met_with_one_group_at_a_time_each_after_a_longer_pause() -> None:
    brake = Brake(failed_groups=FREE_FAILURES + 3, last_failed_at=100.0)
    assert brake.pause_s == 4.0
    assert brake.room(7, open_groups=0, now=103.9) == 0
    assert brake.room(7, open_groups=0, now=104.0) == 1
    assert brake.room(7, open_groups=1, now=104.0) == 0, "it is under way"
    assert brake.room(0, open_groups=0, now=104.0) == 0, "the lag still bounds it"
    assert Brake(failed_groups=1000, last_failed_at=0.0).pause_s == LONGEST_PAUSE_S


def test_a_full_backlog_lets_one_group_at_a_time_through() -> None:
    assert Backlog("held", 100, held_bytes=99).room(7, group_size=4, open_groups=3) == 7
    full = Backlog("held", 100, held_bytes=100)
    assert full.room(7, group_size=4, open_groups=3) == 0
    assert full.room(7, group_size=4, open_groups=0) == 1, "or a step short of a group would wait for ever"
    assert full.room(0, group_size=4, open_groups=0) == 0, "the lag still bounds it"


def test_each_outstanding_trajectory_is_assumed_as_large_as_the_largest_seen() -> None:
    backlog = Backlog("held", 1000, held_bytes=100, num_awaited=4, largest_bytes=50)
    assert backlog.spare_bytes == 700
    assert backlog.room(9, group_size=4, open_groups=1) == 3
    assert backlog.room(2, group_size=4, open_groups=1) == 2
    assert backlog.is_full(15)
    assert not backlog.is_full(14)


def test_the_sentence_says_whose_memory_is_full() -> None:
    backlog = Backlog("of answers wait", 1_000_000, held_bytes=900_000, num_awaited=2, largest_bytes=100_000)
    said = "closed: 0.9 MB of answers wait and 2 more are expected, up to 0.1 MB each; 1.0 MB may"
    assert backlog.sentence(4) == said
    assert Backlog("held", 100).sentence(4) == ""


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 40), min_size=1), data=st.data())
def test_a_bound_is_overrun_by_one_group_at_most_once_the_largest_trajectory_is_known(
    sizes: list[int], data: st.DataObject
) -> None:
    held, awaited = 0, 0
    for size in sizes:
        backlog = Backlog("held", 500, held_bytes=held, num_awaited=awaited, largest_bytes=40)
        awaited += 2 * backlog.room(5, group_size=2, open_groups=(awaited + 1) // 2)
        arrived = data.draw(st.integers(0, awaited))
        held, awaited = held + arrived * size, awaited - arrived
        assert held <= 500 + 2 * 40
        held -= data.draw(st.integers(0, held))
