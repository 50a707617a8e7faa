"""A few tries of the fuzzer, on the scenes whose tasks other tests have calibrated. The command makes hundreds."""

import pytest

from tests.workers.attacks.fuzz import Result, fuzz, make_bends, make_combination, play, told
from tests.workers.attacks.stage import Stage

pytestmark = pytest.mark.docker

SCENES = ("asserts", "unittest")
TRIES = range(12)
AT_ONCE = 3


@pytest.mark.slow
async def test_no_runner_bent_at_random_is_paid(stage: Stage) -> None:
    seen: list[Result] = []
    await fuzz(
        lambda tried: play(stage, tried), (make_bends(seed, SCENES) for seed in TRIES), AT_ONCE, seen.append
    )
    assert len(seen) == len(TRIES)
    assert [told(result) for result in seen if result.stopped_by == "PAID"] == []
    assert any(result.bent for result in seen)


@pytest.mark.slow
async def test_no_combination_drawn_at_random_is_paid(stage: Stage) -> None:
    seen: list[Result] = []
    tries = (make_combination(seed, SCENES, by_chance=False) for seed in TRIES)
    await fuzz(lambda tried: play(stage, tried), tries, AT_ONCE, seen.append)
    assert len({result.tried.parts for result in seen}) == len(TRIES)
    assert [told(result) for result in seen if result.stopped_by == "PAID"] == []


@pytest.mark.slow
async def test_a_seed_bends_the_same_attributes_each_time(stage: Stage) -> None:
    tried = make_bends(3, SCENES)
    first, second = [await play(stage, tried, controls=False) for _ in range(2)]
    assert first.bent == second.bent != ()
