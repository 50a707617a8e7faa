"""Which contradiction a control run has."""

import random
from collections import Counter

from msgspec.structs import replace

from pipeline.task import Calibration, Contradiction
from tests.workers.contradictions import changing
from workers.grading.controls.drawing import ChangedText, draw, has_others


def contradiction(offset: int, *fails: str, path: str = "test_a.py", was: str = "4") -> Contradiction:
    return changing(path, offset, was, "5", *fails)


def draws(calibration: Calibration, num_draws: int, *, needing_fix: bool = True) -> Counter[int]:
    """How often each contradiction was drawn, by its offset."""
    chance = random.Random(0)
    drawn = (draw(calibration, chance, needing_fix=needing_fix) for _ in range(num_draws))
    return Counter(one.changes[0].offset_bytes for one, *_ in drawn)


def test_each_contradiction_of_a_test_may_be_drawn() -> None:
    two = (contradiction(0, "a"), contradiction(10, "a"))
    found = draws(Calibration(contradictions=two, needing_fix=("a",)), 400)
    assert min(found[0], found[10]) > 120


def test_a_test_that_needs_the_fix_is_drawn_or_one_that_does_not() -> None:
    ones = (contradiction(0, "a"), contradiction(10, "b"), contradiction(20, "c"), contradiction(30, "d"))
    calibration = Calibration(contradictions=ones, needing_fix=("a", "b", "uncontrolled"))
    assert set(draws(calibration, 50)) == {0, 10}
    assert set(draws(calibration, 50, needing_fix=False)) == {20, 30}
    assert has_others(calibration)


def test_a_test_is_as_likely_as_another_however_many_contradictions_it_has() -> None:
    many = tuple(contradiction(10 * number, "a") for number in range(1, 9))
    found = draws(Calibration(contradictions=(contradiction(0, "b"), *many), needing_fix=("a", "b")), 400)
    assert 140 < found[0] < 260


def test_where_no_test_that_needs_the_fix_has_a_contradiction_any_is_drawn() -> None:
    ones = Calibration(contradictions=(contradiction(0, "a"), contradiction(10, "b")), needing_fix=("c",))
    assert set(draws(ones, 50)) == {0, 10}
    assert not has_others(ones)


def test_what_tests_that_pass_without_the_fix_expect_too_is_drawn_only_for_a_test_that_has_no_other() -> None:
    ones = (contradiction(0, "a"), contradiction(10, "a", "old"), contradiction(20, "b", "old"))
    calibration = Calibration(contradictions=ones, needing_fix=("a", "b"))
    assert set(draws(calibration, 100)) == {0, 20}
    assert set(draws(calibration, 100, needing_fix=False)) == {10, 20}


def seconds(calibration: Calibration) -> set[int]:
    """The offsets of the contradictions that were drawn second."""
    chance = random.Random(0)
    drawn = [draw(calibration, chance) for _ in range(200)]
    return {second.changes[0].offset_bytes for _, *others in drawn for second in others}


def test_without_a_witness_a_second_contradiction_of_any_other_test_is_drawn() -> None:
    ones = (contradiction(0, "a"), contradiction(10, "b"), contradiction(20, "c"), contradiction(30, "d"))
    may_be_paired = tuple(replace(one, may_be_paired=number < 3) for number, one in enumerate(ones))
    calibration = Calibration(contradictions=may_be_paired, needing_fix=("a",))
    assert seconds(calibration) == {10, 20}
    assert seconds(replace(calibration, needing_fix=("d",))) == set()
    assert seconds(replace(calibration, witnessed=True)) == set()
    assert seconds(replace(calibration, stops_early=True)) == set()


def test_a_second_contradiction_concerns_no_test_and_no_text_of_the_first() -> None:
    first = replace(contradiction(0, "a"), may_fail=("b",), renamed={"c": "c2"}, may_be_paired=True)
    others = (contradiction(10, "b"), contradiction(20, "c"), contradiction(0, "d"), contradiction(30, "e"))
    may_be_paired = tuple(replace(one, may_be_paired=True) for one in others)
    assert seconds(Calibration(contradictions=(first, *may_be_paired), needing_fix=("a",))) == {30}


def test_texts_that_touch_do_not_overlap() -> None:
    changed = ChangedText()
    changed.add(contradiction(0, "b", was="name"))
    assert not changed.overlaps(contradiction(4, "a"))
    assert changed.overlaps(contradiction(3, "a"))
    assert not changed.overlaps(contradiction(3, "a", path="test_b.py"))


def test_each_change_of_a_contradiction_takes_its_text() -> None:
    changed = ChangedText()
    two = contradiction(0, "a")
    changed.add(replace(two, changes=(*two.changes, *contradiction(50, "a").changes)))
    assert changed.overlaps(contradiction(50, "b"))
    assert not changed.overlaps(contradiction(25, "b"))
