"""Advantages: relations that hold for any rewards, and where they fall."""

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.trajectories import member
from trainer.batching.credit import (
    BASELINES,
    group_mean,
    group_mean_std,
    has_signal,
    leave_one_out,
)
from trainer.recipe import AdvantageKind
from trainer.rollouts.groups import Group

rewards = st.dictionaries(st.integers(0, 15), st.floats(0, 1), min_size=2, max_size=16)


@given(rewards)
def test_leave_one_out_advantages_sum_to_nothing(given: dict[int, float]) -> None:
    assert math.isclose(sum(leave_one_out(given).values()), 0, abs_tol=1e-9)


@given(rewards)
def test_leave_one_out_is_the_distance_to_the_mean_of_the_others(given: dict[int, float]) -> None:
    for number, advantage in leave_one_out(given).items():
        others = [reward for other, reward in given.items() if other != number]
        assert advantage == pytest.approx(given[number] - sum(others) / len(others), abs=1e-9)


@given(rewards)
def test_leave_one_out_is_the_distance_to_the_mean_stretched_by_n_over_n_minus_1(
    given: dict[int, float],
) -> None:
    centred = group_mean(given)
    stretch = len(given) / (len(given) - 1)
    for number, advantage in leave_one_out(given).items():
        assert advantage == pytest.approx(centred[number] * stretch, abs=1e-9)


@given(rewards, st.floats(-5, 5))
def test_a_constant_added_to_every_reward_changes_no_advantage(
    given: dict[int, float], offset: float
) -> None:
    moved = {number: reward + offset for number, reward in given.items()}
    assert leave_one_out(moved) == pytest.approx(leave_one_out(given), abs=1e-9)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8), st.sets(st.integers(0, 20)))
def test_failed_members_move_nobodys_advantage(valid: list[float], failed: set[int]) -> None:
    alone = Group(0, len(valid), 0, "t0", {n: member(0, n, reward=reward) for n, reward in enumerate(valid)})
    broken = {100 + n: member(0, 100 + n, reward=None) for n in failed}
    refused = {200 + n: member(0, 200 + n, reward=1.0, fault="log-probs missing") for n in failed}
    among = Group(0, 99, 0, "t0", {**alone.members, **broken, **refused})
    assert leave_one_out(among.rewards) == leave_one_out(alone.rewards)


def test_the_grpo_variant_divides_by_the_spread() -> None:
    found = group_mean_std({0: 0.0, 1: 1.0})
    assert found == pytest.approx({0: -1.0, 1: 1.0}, abs=1e-5)


def test_equal_rewards_carry_no_signal() -> None:
    assert not has_signal([1.0, 1.0, 1.0])
    assert has_signal([1.0, 0.0, 1.0])


def test_every_kind_that_a_recipe_may_name_has_a_function() -> None:
    assert set(get_args(AdvantageKind)) == BASELINES.keys()
