"""Agreement of votes: by hand, and what chance would bring about."""

import random

import pytest

from trainer.judge import Agreement, agreement


def test_pairs_and_unanimity_are_counted_over_turns_with_two_votes_or_more() -> None:
    found = agreement([(1.0, 1.0, 1.0), (1.0, 1.0, -1.0), (-1.0,), ()])
    assert (found.num_turns, found.unanimous, found.pairs) == (2, 0.5, 4 / 6)


def test_alpha_is_krippendorffs_by_his_own_example() -> None:
    # Krippendorff, "Computing Krippendorff's alpha-reliability" (2011), section A: binary data, two observers, no missing data.
    meg = [0, 1, 0, 0, 0, 0, 0, 0, 1, 0]
    owen = [1, 1, 1, 0, 0, 1, 0, 0, 0, 0]
    assert agreement(zip(map(float, meg), map(float, owen), strict=True)).alpha == pytest.approx(
        0.095, abs=5e-4
    )


def test_votes_by_chance_have_an_alpha_of_about_0_and_equal_ones_of_1() -> None:
    draw = random.Random(3)
    by_chance = [[draw.choice([-1.0, 1.0]) for _ in range(3)] for _ in range(4000)]
    assert agreement(by_chance).alpha == pytest.approx(0, abs=0.05)
    assert agreement([[1.0, 1.0], [-1.0, -1.0]]).alpha == 1


def test_without_two_different_votes_there_is_no_alpha() -> None:
    assert agreement([[1.0, 1.0], [1.0, 1.0]]).alpha is None
    assert agreement([[1.0], []]) == Agreement()
