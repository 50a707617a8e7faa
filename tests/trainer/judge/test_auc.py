"""The area under the curve: against counting every pair, and with an interval that groups decide."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainer.judge import ScoredRollouts

rollouts = st.lists(
    st.tuples(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), st.booleans(), st.sampled_from("abc")),
    min_size=2,
    max_size=20,
)


def scored(found: list[tuple[float, bool, str]]) -> ScoredRollouts:
    return ScoredRollouts(*map(list, zip(*found, strict=True)))


def by_counting(found: list[tuple[float, bool, str]], *, within: bool) -> float | None:
    pairs = [
        (high, low)
        for (high, solved, here), (low, other, there) in itertools.product(found, repeat=2)
        if solved and not other and (here == there or not within)
    ]
    if not pairs:
        return None
    return sum(1.0 if high > low else 0.5 if high == low else 0.0 for high, low in pairs) / len(pairs)


@given(rollouts)
def test_it_is_the_share_of_pairs_in_which_the_solved_rollout_scores_higher_and_ties_count_half(
    found: list[tuple[float, bool, str]],
) -> None:
    expected = by_counting(found, within=False)
    assert scored(found).area() == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("within", [False, True])
def test_within_groups_only_members_of_one_group_are_compared(within: bool) -> None:
    # The judge likes the easy task, and in each group the wrong members.
    found = [(0.5, True, "easy"), (0.6, False, "easy"), (-0.6, True, "hard"), (-0.5, False, "hard")]
    found = [*found, (0.5, True, "easy"), (-0.5, False, "hard")]
    judged = scored(found)
    auc = judged.auc_within_groups() if within else judged.auc()
    assert auc is not None
    assert auc.value == pytest.approx(by_counting(found, within=within))
    assert (auc.num_solved, auc.num_unsolved) == (3, 3)


@settings(max_examples=10, deadline=None)
@given(rollouts)
def test_the_interval_is_the_same_each_time_and_lies_between_0_and_1(
    found: list[tuple[float, bool, str]],
) -> None:
    first, second = scored(found).auc(), scored(found).auc()
    assume(first is not None)
    assert first == second
    assert first is not None
    assert 0 <= first.low <= first.high <= 1


def width(found: list[tuple[float, bool, str]]) -> float:
    auc = scored(found).auc()
    assert auc is not None
    return auc.high - auc.low


def test_copies_in_one_group_narrow_the_interval_no_more_than_one_rollout_does() -> None:
    once = [(0.1 * (number % 7), number % 3 > 0, f"g{number:02}") for number in range(40)]
    related = [one for one in once for _ in range(4)]
    unrelated = [(score, solved, f"{group}.{copy}") for score, solved, group in once for copy in range(4)]
    assert width(related) == width(once)
    assert width(unrelated) < 0.6 * width(once), "four times as many draws: half as wide"


def test_there_is_nothing_to_tell_without_a_solved_and_an_unsolved_rollout() -> None:
    judged = scored([(0.5, True, "a"), (-0.5, True, "b")])
    assert (judged.area(), judged.auc(), judged.auc_within_groups()) == (None, None, None)
