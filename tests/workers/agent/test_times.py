"""Where the time of an episode goes: charged as it happens, and to nothing twice."""

import msgspec
import pytest

from pipeline.errors import EngineError
from tests.pipeline import samples
from workers.rollout import EpisodeTimes


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_what_the_engine_did_not_work_on_a_reply_was_spent_waiting_for_it() -> None:
    clock = Clock()
    times = EpisodeTimes(clock)
    clock.now += 1
    with times.spent("open"):
        clock.now += 2
    with times.spent("policy"):
        clock.now += 10
    with times.spent("command"):
        clock.now += 4
    times.turn_to("close")
    clock.now += 8
    times.turn_to("other")
    with times.spent("grade"):
        clock.now += 16
    found = times.seconds([samples.turn(generate_s=9.5, engine_wait_s=6.5)])
    assert (found.open_s, found.command_s, found.close_s, found.grade_s, found.other_s) == (2, 4, 8, 16, 1)
    assert (found.generate_s, found.engine_wait_s) == (3, 7)
    assert sum(msgspec.structs.asdict(found).values()) == clock.now - 50


def test_a_reply_that_never_came_was_waiting_and_an_engine_that_says_nothing_worked_all_the_time() -> None:
    clock = Clock()
    times = EpisodeTimes(clock)
    with times.spent("policy"):
        clock.now += 5

    def ask() -> None:
        with times.spent("policy"):
            clock.now += 120
            raise EngineError("no engine is ready")

    with pytest.raises(EngineError):
        ask()
    found = times.seconds([samples.turn(generate_s=5.0)])
    assert (found.generate_s, found.engine_wait_s) == (5, 120)
