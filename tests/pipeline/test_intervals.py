"""Intervals hold the truth as often as they say, also for few draws, and count related values as related."""

import random
from statistics import fmean

import pytest

from pipeline.intervals import (
    Estimate,
    clustered_mean,
    difference,
    mean,
    paired_difference,
    share,
    t_mean,
    t_quantile,
)


def interval(per_task: list[float], num_episodes: int) -> tuple[float, float]:
    found = share(per_task, num_episodes)
    assert found is not None
    assert found.low <= found.value <= found.high
    return round(found.low, 3), round(found.high, 3)


def test_an_interval_is_wilsons_where_a_task_is_solved_or_not() -> None:
    assert interval([0.0] * 20, 20) == (0.0, 0.161)
    assert interval([1.0] * 20, 20) == (0.839, 1.0)
    assert interval([0.0, 1.0] * 5, 10) == (0.237, 0.763)
    assert interval([0.0, 1.0] * 200, 400) == (0.451, 0.549)
    assert interval([1.0], 1) == (0.207, 1.0)
    assert share([], 0) is None


def test_an_interval_counts_tasks_and_not_the_episodes_of_one() -> None:
    def width(per_task: list[float]) -> float:
        low, high = interval(per_task, 8 * len(per_task))
        return high - low

    apart, alike = [0.0, 1.0, 0.125, 0.875] * 5, [0.5, 0.5, 0.625, 0.375] * 5
    assert width(apart) == pytest.approx(width([0.0, 1.0] * 10), abs=0.03), "as if each had one episode"
    assert width(alike) < 0.6 * width(apart)
    assert width([0.5] * 20) == pytest.approx(width([0.0, 1.0] * 80), rel=0.1), "160 draws, and no more"
    assert interval([0.5], 1000) == (0.0, 1.0), "one task says nothing about others"


def test_one_more_success_moves_an_interval_up() -> None:
    """Also from the last share of 0 or 1 on, where the variance over tasks says nothing of its own."""
    intervals = [interval([solved / 8] + [0.0] * 19, 160) for solved in range(5)]
    assert intervals == sorted(intervals)
    assert [high for _, high in intervals] == sorted(high for _, high in intervals)


def test_t_quantiles_are_those_of_the_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}
    for degrees, expected in table.items():
        assert t_quantile(degrees) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("num_tasks", "num_episodes", "success"),
    [(20, 1, 0.05), (20, 1, 0.5), (4, 8, 0.05), (4, 8, 0.5), (12, 4, 0.1), (20, 8, 0.05), (128, 4, 0.7)],
)
def test_intervals_hold_the_truth_as_often_as_they_say(
    num_tasks: int, num_episodes: int, success: float
) -> None:
    """Tasks differ where they have several episodes: their rates are drawn from a beta distribution."""
    draw, held, num_tries = random.Random(1), 0, 600
    for _ in range(num_tries):
        rates = [
            success if num_episodes == 1 else draw.betavariate(success, 1 - success) for _ in range(num_tasks)
        ]
        found = share(
            [fmean(draw.random() < rate for _ in range(num_episodes)) for rate in rates],
            num_tasks * num_episodes,
        )
        assert found is not None
        held += found.low <= success <= found.high
    assert held / num_tries >= 0.9


@pytest.mark.parametrize(("before", "after"), [(0.5, 0.5), (0.05, 0.1), (0.3, 0.6)])
@pytest.mark.parametrize("num_tasks", [4, 20])
def test_intervals_of_differences_hold_the_truth_as_often_as_they_say(
    num_tasks: int, before: float, after: float
) -> None:
    """Most tasks are hard or easy for both, so the two results of a task are seldom different."""
    draw, held, num_tries = random.Random(2), 0, 600
    for _ in range(num_tries):
        first: dict[str, list[bool]] = {}
        second: dict[str, list[bool]] = {}
        for name in map(str, range(num_tasks)):
            one, other = draw.random(), draw.random()
            first[name] = [one < before]
            second[name] = [(one if draw.random() < 0.8 else other) < after]
        found = paired_difference(first, second)
        assert found is not None
        held += found.low <= after - before <= found.high
    assert held / num_tries >= 0.9


def test_a_small_win_on_every_task_is_seen_if_tasks_have_many_episodes() -> None:
    first = {str(task): [True] * 32 + [False] * 32 for task in range(20)}
    second = {task: [True] * 4 + runs[:-4] for task, runs in first.items()}
    found = paired_difference(first, second)
    assert found is not None
    assert (found.value, found.low > 0.03, found.high < 0.09) == (0.0625, True, True)


def test_equal_evaluations_are_not_certain_to_be_equally_good() -> None:
    runs = {str(task): [task % 2 == 0] for task in range(20)}
    found = paired_difference(runs, runs)
    assert found is not None
    assert found.value == 0
    assert -0.15 < found.low < -0.05
    assert found.high == pytest.approx(-found.low)


def test_a_paired_difference_is_over_tasks_that_both_have() -> None:
    found = paired_difference(
        {"a": [True], "b": [False], "c": [True]}, {"a": [True], "b": [True], "d": [True]}
    )
    assert found is not None
    assert (found.value, found.num_draws) == (0.5, 2)


@pytest.mark.parametrize(
    ("num_groups", "size", "success"), [(20, 1, 0.05), (4, 8, 0.05), (4, 8, 0.5), (6, 4, 0.3)]
)
def test_means_of_groups_of_unequal_sizes_hold_the_truth_as_often_as_they_say(
    num_groups: int, size: int, success: float
) -> None:
    """So are the report's quarters, the pages' steps, the curve's windows and held-out success made."""
    draw, held, num_tries = random.Random(4), 0, 600
    for _ in range(num_tries):
        groups: list[list[float]] = []
        for number in range(num_groups):
            rate = success if size == 1 else draw.betavariate(success, 1 - success)
            groups.append([float(draw.random() < rate) for _ in range(max(1, size - number % 3))])
        found = mean(groups)
        assert found is not None
        held += found.low <= success <= found.high
    assert held / num_tries >= 0.9


@pytest.mark.parametrize("num_groups", [4, 20])
def test_t_means_and_differences_hold_the_truth_as_often_as_they_say(num_groups: int) -> None:
    """Scores of a judge, which may be negative; members of a group have most of their noise in common."""
    draw, held_mean, held_difference, num_tries = random.Random(5), 0, 0, 600

    def drawn(centre: float) -> Estimate:
        groups = [
            [level + draw.gauss(0, 0.1) for _ in range(4)]
            for level in (draw.gauss(centre, 0.5) for _ in range(num_groups))
        ]
        found = t_mean(groups)
        assert found is not None
        return found

    for _ in range(num_tries):
        before, after = drawn(0.1), drawn(0.4)
        held_mean += before.low <= 0.1 <= before.high
        found = difference(before, after)
        held_difference += found.low <= 0.3 <= found.high
    assert held_mean / num_tries >= 0.9
    assert held_difference / num_tries >= 0.9


@pytest.mark.parametrize(("num_draws", "before", "after"), [(20, 0.05, 0.05), (20, 0.05, 0.3), (4, 0.5, 0.5)])
def test_differences_of_independent_shares_hold_the_truth_as_often_as_they_say(
    num_draws: int, before: float, after: float
) -> None:
    draw, held, num_tries = random.Random(6), 0, 600

    def drawn(success: float) -> Estimate:
        found = mean([[float(draw.random() < success)] for _ in range(num_draws)])
        assert found is not None
        return found

    for _ in range(num_tries):
        found = difference(drawn(before), drawn(after))
        held += found.low <= after - before <= found.high
    assert held / num_tries >= 0.9


def test_a_large_group_counts_for_more_in_the_mean_and_makes_it_less_certain() -> None:
    even, uneven = (
        mean([[1.0] * 4, [0.0] * 4, [1.0] * 4, [0.0] * 4]),
        mean([[1.0] * 12, [0.0], [1.0] * 2, [0.0]]),
    )
    assert even is not None
    assert uneven is not None
    assert (even.value, uneven.value) == (0.5, 0.875)
    assert uneven.high - uneven.low > even.high - even.low


def test_an_estimate_reads_the_same_everywhere() -> None:
    found = mean([[0.0]] * 20)
    assert found is not None
    assert found.percent() == "0.0 % (0.0 to 16.1, 95 %)"
    assert found.cell() == "0.0 (0.0 to 16.1)"
    assert found.plain() == "0.000 (0.000 to 0.161, 95 %)"


def test_a_mean_of_sums_and_counts_is_the_mean_of_the_values() -> None:
    groups = [[0.5, 2.0], [], [-1.0], [3.0, 4.0, 5.0]]
    assert clustered_mean((sum(group), len(group)) for group in groups) == t_mean(groups)
    assert clustered_mean([(0.0, 0)]) is None
