"""Which contradictions a control run has."""

import random

from hypothesis import given
from hypothesis import strategies as st

from pipeline.calibration import Calibration, Contradiction
from workers.grading.controls.drawing import ChangedText, draw


def contradiction(offset: int, *fails: str, path: str = "test_a.py", was: str = "4") -> Contradiction:
    return Contradiction(path=path, offset_bytes=offset, was=was, becomes="5", fails=fails)


CONTRADICTIONS = st.builds(
    contradiction,
    st.integers(0, 20),
    st.sampled_from("abcdefgh"),
    st.sampled_from("abcdefgh"),
    path=st.sampled_from(["test_a.py", "test_b.py"]),
    was=st.sampled_from(["4", "name", "é"]),
)


def overlap(contradiction: Contradiction, others: list[Contradiction]) -> bool:
    ours = {
        (contradiction.path, contradiction.offset_bytes + n) for n in range(len(contradiction.was.encode()))
    }
    theirs = {(one.path, one.offset_bytes + n) for one in others for n in range(len(one.was.encode()))}
    return not ours.isdisjoint(theirs)


@given(st.lists(CONTRADICTIONS), st.randoms(use_true_random=False))
def test_every_test_with_a_contradiction_gets_one_unless_its_text_is_taken(
    contradictions: list[Contradiction], chance: random.Random
) -> None:
    drawn = draw(Calibration(contradictions=tuple(contradictions)), chance)
    covered = {name for one in drawn for name in one.fails}
    for left in set(contradictions) - set(drawn):
        assert covered.issuperset(left.fails) or overlap(left, drawn)
    for number, one in enumerate(drawn):
        assert not overlap(one, drawn[:number])


def test_another_draw_may_be_another_one() -> None:
    calibration = Calibration(contradictions=(contradiction(0, "a"), contradiction(10, "a")))
    draws = {draw(calibration, random.Random(seed))[0].offset_bytes for seed in range(20)}
    assert draws == {0, 10}


def test_where_the_script_ends_at_the_first_failure_one_is_enough() -> None:
    several = tuple(contradiction(10 * number, name) for number, name in enumerate("abc"))
    calibration = Calibration(stops_early=True, contradictions=several)
    assert len(draw(calibration, random.Random(0))) == 1


def test_where_many_failures_take_too_long_those_that_need_the_fix_come_first() -> None:
    several = tuple(contradiction(10 * number, name) for number, name in enumerate("abcdef"))
    calibration = Calibration(contradictions=several, most_controlled=3, needing_fix=("c", "e"))
    for seed in range(10):
        controlled = {name for one in draw(calibration, random.Random(seed)) for name in one.fails}
        assert len(controlled) == 3
        assert {"c", "e"} < controlled


def test_texts_that_touch_do_not_overlap() -> None:
    changed = ChangedText()
    changed.add(contradiction(0, "b", was="name"))
    assert not changed.overlaps(contradiction(4, "a"))
    assert changed.overlaps(contradiction(3, "a"))
    assert not changed.overlaps(contradiction(3, "a", path="test_b.py"))
