"""Groups: when they close, what is dropped, and which are trained first."""

import pytest

from tests.trainer.trajectories import behind, member
from trainer.batching.collate import make_batch
from trainer.recipe import Stragglers
from trainer.records.journal_writer import OutstandingRequest
from trainer.rollouts.admission import Admission
from trainer.rollouts.groups import Group, GroupBook, cursor_of, group_id_of


def book(
    *,
    groups_per_step: int = 1,
    max_lag: int = 4,
    stragglers: Stragglers = "wait",
    requires_judgements: bool = False,
) -> GroupBook:
    admission = Admission(max_lag_versions=max_lag, groups_per_step=groups_per_step, num_steps=99)
    return GroupBook(
        admission,
        min_valid_of=lambda size: 2,
        stragglers=stragglers,
        requires_judgements=requires_judgements,
    )


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


def test_the_oldest_group_is_trained_first_whenever_it_was_complete() -> None:
    b = book(groups_per_step=2)
    for cursor in (3, 1, 2):
        b.verdict(fill(b, cursor, [0.0, 1.0]))
    taken = b.take(behind(0))
    assert taken is not None
    assert [group.cursor for group in taken] == [1, 2]
    assert b.take(behind(0)) is None, "one is too few"


def test_a_step_waits_for_a_group_it_would_leave_behind_for_too_long() -> None:
    b = book(max_lag=1)
    b.expect(0, size=2, version=0, task_id="t0")
    b.verdict(fill(b, 1, [0.0, 1.0], version=1))
    assert b.take(behind(1)) is None
    b.verdict(fill(b, 0, [0.0, 1.0]))
    taken = b.take(behind(1))
    assert taken is not None
    assert taken[0].cursor == 0


def test_a_step_that_streams_takes_what_is_ready_and_leaves_room_for_groups_that_would_be_late() -> None:
    b = book(groups_per_step=3, max_lag=1)
    b.expect(0, size=2, version=0, task_id="t0")
    for cursor in (1, 2, 3):
        b.verdict(fill(b, cursor, [0.0, 1.0], version=1))
    first = b.take_some(behind(1), num_taken=0)
    assert first is not None
    assert [group.cursor for group in first] == [1, 2], "0 would be too late in the step after"
    assert b.take_some(behind(1), num_taken=2) is None, "the last place is kept for it"
    assert b.num_live == 2
    b.put_back(first)
    assert (b.num_live, b.num_ready, b.has_taken(1)) == (4, 3, False)
    assert b.take_some(behind(1), num_taken=0) == first
    b.verdict(fill(b, 0, [0.0, 1.0]))
    assert [group.cursor for group in b.take_some(behind(1), num_taken=2) or []] == [0]
    free = book(groups_per_step=3, max_lag=4)
    for cursor in (0, 1):
        free.verdict(fill(free, cursor, [0.0, 1.0]))
    assert [group.cursor for group in free.take_some(behind(0), num_taken=0) or []] == [0, 1]
    assert free.take_some(behind(0), num_taken=2) is None
    for cursor in (2, 3):
        free.verdict(fill(free, cursor, [0.0, 1.0]))
    assert [group.cursor for group in free.take_some(behind(0), num_taken=2) or []] == [2], "the step is full"


def test_a_step_does_not_wait_where_the_recipe_lets_groups_run_late() -> None:
    b = book(max_lag=1, stragglers="train")
    b.expect(0, size=2, version=0, task_id="t0")
    b.verdict(fill(b, 1, [0.0, 1.0], version=1))
    assert b.take(behind(1)) is not None


def test_the_task_of_a_group_is_live_until_the_group_is_settled() -> None:
    b, settled = book(), set[int]()
    group = fill(b, 0, [1.0, 0.0])
    assert b.live_tasks(settled.__contains__) == {group.task_id}
    assert b.verdict(group) == "trained"
    taken = b.take(lambda version: 0)
    assert taken == [group]
    assert b.live_tasks(settled.__contains__) == {group.task_id}, "the step has not been published yet"
    settled.add(0)
    assert not b.live_tasks(settled.__contains__)


def test_a_groups_id_tells_its_cursor() -> None:
    assert cursor_of(group_id_of(12)) == 12
    with pytest.raises(ValueError, match="is not a group of a training run"):
        cursor_of("heldout_before:3")


def test_a_group_without_signal_is_trained_where_the_recipe_says_so() -> None:
    admission = Admission(max_lag_versions=1, groups_per_step=1, num_steps=4)
    b = GroupBook(admission, min_valid_of=lambda size: 2, stragglers="wait", train_without_signal=True)
    group = fill(b, 0, [0.0, 0.0])
    assert b.verdict(group) == "trained"
    batch, _ = make_batch(
        [group], step=1, lag_of=behind(0), temperature=1.0, kind="leave_one_out", withhold_beyond=None
    )
    assert batch.num_trajectories == 2
    assert all((sample.advantages_T == 0).all() for sample in batch.samples)


def outstanding_request(
    cursor: int, number: int, *, size: int = 3, request_id: str = ""
) -> OutstandingRequest:
    return OutstandingRequest(
        request_id=request_id or f"r{cursor}.{number}",
        group_id=group_id_of(cursor),
        task_id=f"t{cursor}",
        purpose="train",
        member=number,
        group_size=size,
        cursor=cursor,
        version=0,
        enqueued_at=1.0,
    )


def expect_group(into: GroupBook, cursor: int, *, size: int = 3) -> None:
    into.expect(cursor, size=size, version=0, task_id=f"t{cursor}")
    for number in range(size):
        into.expect_request(outstanding_request(cursor, number, size=size))


def test_a_groups_time_runs_from_its_first_claim() -> None:
    b = book()
    expect_group(b, 0)
    b.hold(0, member(0, 0, group_size=3, reward=1.0))
    b.hold(0, member(0, 1, group_size=3, reward=0.0))
    assert b.overdue(1e9, lambda cursor: 60.0) == [], "nobody is known to have claimed any of it"
    assert sorted(b.unclaimed) == ["r0.0", "r0.1", "r0.2"]
    b.note_claims({"r0.1": 5.0, "r0.0": 20.0}, now=100.0)
    assert b.unclaimed == []
    assert b.overdue(139.9, lambda cursor: 60.0) == []
    assert [group.cursor for group in b.overdue(140.0, lambda cursor: 60.0)] == [0]


def test_at_its_deadline_a_group_is_judged_by_its_members_and_the_rest_is_surplus() -> None:
    b = book()
    expect_group(b, 0)
    for number in (0, 1):
        b.hold(0, member(0, number, group_size=3, reward=float(number)))
    b.note_claims({"r0.0": 0.0}, now=0.0)
    (group,) = b.overdue(60.0, lambda cursor: 60.0)
    assert b.verdict(group) == "trained"
    assert list(b.surplus) == ["r0.2"]
    taken = b.take(behind(0))
    assert taken == [group]
    assert b.has_taken(0)


def test_a_group_with_too_few_valid_members_waits_beyond_its_deadline() -> None:
    b = book()
    expect_group(b, 0)
    b.hold(0, member(0, 0, group_size=3, reward=1.0))
    b.hold(0, member(0, 1, group_size=3, reward=None))
    b.note_claims({"r0.0": 0.0}, now=0.0)
    assert b.overdue(1e9, lambda cursor: 60.0) == []
    assert b.hold(0, member(0, 2, group_size=3, reward=0.0)) is not None


def test_an_answer_that_makes_it_before_the_step_joins_a_group_that_closed_without_it() -> None:
    b = book()
    expect_group(b, 0)
    for number in (0, 1):
        b.hold(0, member(0, number, group_size=3, reward=float(number)))
    b.note_claims({"r0.0": 0.0}, now=0.0)
    b.verdict(b.overdue(60.0, lambda cursor: 60.0)[0])
    complete = b.hold(0, member(0, 2, group_size=3, reward=1.0))
    assert complete is not None
    assert b.verdict(complete) == "trained"
    (group,) = b.take(behind(0)) or []
    assert group.rewards == {0: 0.0, 1: 1.0, 2: 1.0}


def test_of_two_requests_for_a_member_the_later_one_counts() -> None:
    b = book()
    expect_group(b, 0)
    b.expect_request(outstanding_request(0, 1, request_id="again"))
    assert not b.awaits(0, member(0, 1, group_size=3).head)
    assert b.awaits(0, member(0, 2, group_size=3).head)
    assert b.awaits(7, member(7, 0, group_size=3).head), "nobody heard of that group yet"


def test_a_member_without_trajectory_and_without_request_is_missing() -> None:
    b = book()
    expect_group(b, 0)
    b.forget(0, 1)
    b.hold(0, member(0, 2, group_size=3))
    assert b.missing(0) == [1]
    assert b.missing(5) == [None], "each member of a group that nobody heard of"
    b.verdict(fill(b, 1, [0.0, 1.0]))
    assert b.missing(1) == []


def test_the_book_knows_how_much_memory_its_answers_take() -> None:
    b = book()
    expect_group(b, 0)
    one = member(0, 0, group_size=3)
    b.hold(0, one)
    b.hold(0, member(0, 1, group_size=3, reward=None))
    assert b.held_bytes == b.largest_bytes == one.num_bytes == 3 * (4 + 1 + 4 + 4 + 4)
    assert (b.largest_body_bytes, b.num_awaited) == (100, 1)
    b.withdraw()
    assert b.held_bytes == 0
