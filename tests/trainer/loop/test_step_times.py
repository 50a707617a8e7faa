"""Where the seconds of a step are charged."""

import pytest

from trainer.loop.state import StepTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_moment_belongs_to_one_part_and_a_part_inside_another_only_to_itself() -> None:
    clock = Clock()
    times = StepTimes(clock)
    clock.now += 1
    with times.spent("wait"):
        clock.now += 2
        with times.spent("checkpoint"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    lap = times.lap()
    assert {part: seconds for part, seconds in lap.items() if seconds} == {
        "wait": 10,
        "checkpoint": 4,
        "other": 17,
    }
    assert sum(lap.values()) == clock.now - 100


def test_a_lap_begins_where_the_one_before_ended_also_inside_a_part() -> None:
    clock = Clock()
    times = StepTimes(clock)
    with times.spent("wait"):
        clock.now += 1
        assert times.lap()["wait"] == 1
        clock.now += 2
    assert times.lap()["wait"] == 2


def test_what_raises_is_charged_too() -> None:
    clock = Clock()
    times = StepTimes(clock)

    def export() -> None:
        with times.spent("export"):
            clock.now += 3
            raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        export()
    clock.now += 1
    assert (times.lap()["export"], times.lap()["other"]) == (3, 0)
