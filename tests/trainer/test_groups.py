"""Groups: when they close, what is dropped, and which are trained first."""

import pytest

from tests.trainer.trajectories import behind, member
from trainer.admission import Admission
from trainer.groups import Group, GroupBook, cursor_of, group_id_of, make_batch
from trainer.recipe import Stragglers


def book(*, groups_per_step: int = 1, max_lag: int = 4, stragglers: Stragglers = "wait") -> GroupBook:
    admission = Admission(max_lag_versions=max_lag, groups_per_step=groups_per_step, num_steps=99)
    return GroupBook(admission, min_valid_members=2, stragglers=stragglers)


def fill(into: GroupBook, cursor: int, rewards: list[float | None], *, version: int = 0) -> Group:
    for number, reward in enumerate(rewards):
        group = into.hold(
            cursor, member(cursor, number, group_size=len(rewards), reward=reward, version=version)
        )
    assert group is not None
    return group


def test_a_group_closes_only_when_every_member_is_in() -> None:
    b = book()
    assert b.hold(0, member(0, 0, group_size=2)) is None
    assert b.needed == 1
    assert b.hold(0, member(0, 1, group_size=2, reward=None)) is not None


def test_a_failed_member_counts_as_in_and_shrinks_the_group() -> None:
    b = book()
    group = fill(b, 0, [1.0, 0.0, None])
    assert b.verdict(group) == "trained"
    assert group.rewards == {0: 1.0, 1: 0.0}
    assert group.fates("trained") == {0: "trained", 1: "trained", 2: "failed"}


def test_too_few_graded_members_drop_the_group() -> None:
    b = book()
    group = fill(b, 0, [1.0, None, None])
    assert b.verdict(group) == "too_few_valid"
    assert group.fates("too_few_valid") == {0: "too_few_valid", 1: "failed", 2: "failed"}
    assert b.num_live == 0, "its slot is free"


def test_a_group_worth_the_same_throughout_is_dropped() -> None:
    b = book()
    assert b.verdict(fill(b, 0, [1.0, 1.0, None])) == "zero_variance"
    assert b.num_live == 0


def test_a_refused_trajectory_has_no_say_in_its_group() -> None:
    b = book()
    b.hold(0, member(0, 0, group_size=3, reward=1.0))
    b.hold(0, member(0, 1, group_size=3, reward=1.0))
    group = b.hold(0, member(0, 2, group_size=3, reward=0.0, fault="log-probs missing"))
    assert group is not None
    assert b.verdict(group) == "zero_variance"
    assert group.fates("zero_variance")[2] == "refused"


def test_the_oldest_asked_for_is_trained_first_whenever_it_came() -> None:
    b = book(groups_per_step=2)
    for cursor in (3, 1, 2):
        b.verdict(fill(b, cursor, [0.0, 1.0]))
    taken = b.take(behind(0))
    assert taken is not None
    assert [group.cursor for group in taken] == [1, 2]
    assert b.take(behind(0)) is None, "one is too few"


def test_a_step_waits_for_a_group_it_would_leave_behind_for_too_long() -> None:
    b = book(max_lag=1)
    b.expect(0, size=2, version=0)
    b.verdict(fill(b, 1, [0.0, 1.0], version=1))
    assert b.take(behind(1)) is None
    b.verdict(fill(b, 0, [0.0, 1.0]))
    taken = b.take(behind(1))
    assert taken is not None
    assert taken[0].cursor == 0


def test_a_step_does_not_wait_where_the_recipe_lets_groups_run_late() -> None:
    b = book(max_lag=1, stragglers="train")
    b.expect(0, size=2, version=0)
    b.verdict(fill(b, 1, [0.0, 1.0], version=1))
    assert b.take(behind(1)) is not None


def test_a_batch_trains_valid_members_with_their_advantage_and_states_its_lag() -> None:
    b = book()
    group = fill(b, 0, [1.0, 0.0, None], version=2)
    batch, fates = make_batch(
        [group], step=5, lag_of=behind(4), temperature=1.0, kind="leave_one_out", withhold_beyond=None
    )
    assert batch.request_ids == ("r0.0", "r0.1")
    assert [sample.advantages_T.tolist() for sample in batch.samples] == [[0, 1, 1], [0, -1, -1]]
    assert (batch.lag_max, batch.lag_mean, batch.num_trajectories) == (2, 2.0, 2)
    assert fates == {"r0.0": "trained", "r0.1": "trained", "r0.2": "failed"}


def test_a_withheld_member_keeps_its_say_in_the_baseline() -> None:
    b = book(stragglers="withhold")
    b.hold(0, member(0, 0, group_size=2, reward=1.0, version=0))
    group = b.hold(0, member(0, 1, group_size=2, reward=0.0, version=3))
    assert group is not None
    batch, fates = make_batch(
        [group], step=1, lag_of=behind(4), temperature=1.0, kind="leave_one_out", withhold_beyond=2
    )
    assert fates == {"r0.0": "late", "r0.1": "trained"}
    assert [sample.advantages_T.tolist() for sample in batch.samples] == [[0, -1, -1]]


def test_a_groups_id_tells_its_cursor() -> None:
    assert cursor_of(group_id_of(12)) == 12
    with pytest.raises(ValueError, match="no group of a training run"):
        cursor_of("heldout_before:3")


def test_a_group_without_signal_is_trained_where_the_recipe_says_so() -> None:
    admission = Admission(max_lag_versions=1, groups_per_step=1, num_steps=4)
    b = GroupBook(admission, min_valid_members=2, stragglers="wait", train_without_signal=True)
    group = fill(b, 0, [0.0, 0.0])
    assert b.verdict(group) == "trained"
    batch, _ = make_batch(
        [group], step=1, lag_of=behind(0), temperature=1.0, kind="leave_one_out", withhold_beyond=None
    )
    assert batch.num_trajectories == 2
    assert all((sample.advantages_T == 0).all() for sample in batch.samples)
