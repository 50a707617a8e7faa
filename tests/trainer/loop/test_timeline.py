"""Lags, with and without steps that were lost."""

from trainer.loop.state import Timeline


def timeline(*published: tuple[int, int]) -> Timeline:
    made = Timeline()
    for version, step in published:
        made.add(version, step)
    return made


def test_without_a_crash_the_lag_is_the_difference_of_versions() -> None:
    line = timeline((0, 0), (1, 1), (2, 2), (3, 3))
    assert [line.lag(version) for version in range(4)] == [3, 2, 1, 0]


def test_weights_of_lost_steps_count_as_the_last_step_kept_before_them() -> None:
    line = timeline((0, 0), (1, 1), (2, 2), (5, 2), (6, 3))  # versions 3 and 4 held steps that were lost
    assert [line.lag(version) for version in (2, 3, 4, 5, 6)] == [1, 1, 1, 1, 0]


def test_the_newest_version_may_be_published_again_after_a_resume() -> None:
    assert timeline((0, 0), (1, 1), (1, 1)).lag(0) == 1


def test_a_version_from_before_the_first_one_kept_is_as_old_as_that() -> None:
    assert timeline((4, 0), (5, 1)).lag(2) == 1
