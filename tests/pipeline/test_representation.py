"""Who gets trained: ratios of shares, their intervals, and what is warned of."""

import random

import pytest

from pipeline.intervals import RatioOfShares
from pipeline.journal.rows import EpisodeRow, Fate
from pipeline.representation import represented


def episode(
    group: int, member: int, *, tokens: int = 100, fate: Fate = "trained", reward: float = 0.0
) -> EpisodeRow:
    return EpisodeRow(
        request_id=f"{group}-{member}",
        group_id=f"g{group}",
        task_id=f"task-{group % 5}",
        purpose="train",
        member=member,
        group_size=8,
        fate=fate,
        outcome="submitted",
        reward=reward,
        sampled_tokens=tokens,
    )


def test_long_rollouts_that_are_dropped_are_warned_of_with_the_interval() -> None:
    rows = [
        episode(group, member, tokens=5000 if member < 2 else 100, reward=member % 2, fate=fate)
        for group in range(40)
        for member in range(8)
        for fate in ["overlong" if member < 2 and group % 4 else "trained"]
    ]
    found = represented(rows)
    long = next(one for one in found.by["length"] if one.name == "4096-8191")
    assert (long.asked, long.finished, long.trained) == (80, 80, 20)
    assert long.ratio is not None
    assert long.ratio.value == pytest.approx((20 / 260) / (80 / 320))
    assert long.ratio.low < long.ratio.value < long.ratio.high < 1
    (warning,) = found.warnings
    assert warning.startswith("rollouts of 4096-8191 sampled tokens are trained 0.31 (0.")
    assert "95 %) times as often as they are asked for" in warning
    assert long.token_ratio is not None
    assert long.token_ratio.value == pytest.approx((20 * 5000 / 124_000) / (80 * 5000 / 424_000))


def test_tasks_that_teach_nothing_are_no_reason_for_a_warning() -> None:
    rows = [
        episode(group, member, reward=float(group % 5 > 0 and member % 2), fate=fate)
        for group in range(40)
        for member in range(8)
        for fate in ["trained" if group % 5 else "zero_variance"]
    ]
    found = represented(rows)
    never = next(one for one in found.by["difficulty"] if one.name == "never solved")
    assert (never.trained, never.is_rarer) == (0, True)
    assert never.reasons == {"zero_variance": 64}
    assert found.warnings == []


def test_evaluations_and_open_rollouts_are_not_asked_for_training() -> None:
    rows = [episode(0, member) for member in range(4)]
    evaluated = EpisodeRow(
        request_id="e", group_id="e", task_id="t", purpose="eval", member=0, group_size=1, fate="evaluated"
    )
    assert represented([*rows, evaluated]).num_asked == 4


def test_nothing_trained_has_no_ratio() -> None:
    found = represented([episode(0, member, fate="failed") for member in range(4)])
    assert [one.ratio for one in found.by["task"]] == [None]
    assert found.warnings == []


def test_the_interval_of_a_ratio_covers_the_true_one_where_groups_are_dropped_whole() -> None:
    """Of 300 simulated runs at least 90 % must cover: a third of the rollouts are long, and in each group they are dropped together with
    probability one half, so the true ratio is (1/3 * 1/2) / (1/3 * 1/2 + 2/3) / (1/3) = 0.6.
    """
    drawn, num_covered = random.Random(7), 0
    for _ in range(300):
        totals, parts = {}, {}
        for group in range(30):
            num_long = sum(drawn.random() < 1 / 3 for _ in range(8))
            num_kept = num_long if drawn.random() < 0.5 else 0
            totals[f"g{group}"] = (8 - num_long + num_kept, 8)
            parts[f"g{group}"] = (num_kept, num_long)
        found = RatioOfShares(totals).of(parts)
        assert found is not None
        num_covered += found.low <= 0.6 <= found.high
    assert num_covered >= 270


def test_a_kind_that_was_never_trained_is_not_certain_to_be_rare() -> None:
    few = RatioOfShares({f"g{one}": (7, 8) for one in range(4)}).of({"g0": (0, 1)})
    assert few is not None
    assert (few.value, few.low) == (0.0, 0.0)
    assert few.high > 1
    many = RatioOfShares({f"g{one}": (7, 8) for one in range(40)}).of({f"g{one}": (0, 1) for one in range(40)})
    assert many is not None
    assert many.high < 0.2


def test_a_kind_of_which_all_is_trained_in_few_groups_is_not_certain_to_be_frequent() -> None:
    totals = {f"g{one}": (4, 8) for one in range(40)}
    few = RatioOfShares(totals).of({"g0": (1, 1), "g1": (1, 1)})
    assert few is not None
    assert (few.value, few.high) == (2.0, 2.0)
    assert few.low < 1


@pytest.mark.parametrize("others", [0, 9])
def test_one_group_says_nothing_about_others(others: int) -> None:
    totals = {f"g{one}": (4, 8) for one in range(1 + others)}
    found = RatioOfShares(totals).of({"g0": (1, 4)})
    assert found is not None
    assert (found.value, found.low, found.high) == (0.5, 0.0, 2.0)
