"""What a verification says of how strong a task's tests are."""

import pytest

from pipeline.taskfile import Strength


@pytest.mark.parametrize(
    ("num_passing", "num", "interval"),
    [
        (0, 1, (0.0, 0.7935)),
        (1, 1, (0.2065, 1.0)),
        (0, 20, (0.0, 0.1611)),
        (5, 20, (0.1119, 0.4687)),
        (0, 0, (0.0, 1.0)),
    ],
)
def test_few_partial_fixes_say_little(num_passing: int, num: int, interval: tuple[float, float]) -> None:
    strength = Strength(num_partial_fixes=num, passing=("a.py:1: + becomes -",) * num_passing)
    assert strength.interval == pytest.approx(interval, abs=1e-4)
    assert strength.weakness == (num_passing / num if num else None)
