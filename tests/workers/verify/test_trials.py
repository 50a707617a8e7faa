"""Which contradictions are tried on the known fix, and which are kept."""

import random

from pipeline.calibration import Contradiction
from workers.grading.controls.outcomes import Outcomes
from workers.verify.trials import Trial, Trials


def trial(offset: int, *names: str) -> Trial:
    one = Contradiction(path="test_a.py", offset_bytes=offset, was="4", becomes="5", fails=names)
    return Trial(one, frozenset(names))


def trials(*these: Trial) -> Trials:
    return Trials(list(these), random.Random(0))


def offsets(chosen: list[Trial]) -> list[int]:
    return sorted(one.contradiction.offset_bytes for one in chosen)


def run(**by_name: str) -> Outcomes:
    return Outcomes(by_name, witnessed=True, finished=True)


def test_a_contradiction_is_kept_once_its_tests_failed_twice() -> None:
    one = trial(0, "a")
    both = trials(one)
    for kept in (False, True):
        assert one.enter(run(a="FAILED"))
        assert bool(both.kept()) is kept
    assert both.kept()[0].fails == ("a",)


def test_only_tests_that_failed_both_times_count() -> None:
    one = trial(0, "a", "b", "c")
    one.enter(run(a="FAILED", b="FAILED", c="PASSED"))
    one.enter(run(a="PASSED", b="ERROR", c="FAILED"))
    assert trials(one).kept()[0].fails == ("b",)


def test_a_contradiction_that_a_test_passes_is_dropped() -> None:
    one = trial(0, "a")
    one.enter(run(a="PASSED"))
    assert one.dropped
    assert trials(one).choose(3, confirm=False, shared_first=False) == []


def test_a_run_without_the_tests_says_nothing() -> None:
    one = trial(0, "a")
    assert not one.enter(run(b="PASSED"))
    assert one.is_new


def test_no_two_contradictions_of_a_run_concern_one_test() -> None:
    all_of_them = trials(trial(0, "a"), trial(10, "a"), trial(20, "a", "b"), trial(30, "b"))
    chosen = all_of_them.choose(3, confirm=False, shared_first=False)
    names = [name for one in chosen for name in one.names]
    assert len(names) == len(set(names))
    assert set(names) == {"a", "b"}


def test_tests_that_share_their_only_contradiction_come_first_or_last() -> None:
    all_of_them = trials(trial(0, "a"), trial(10, "b"), trial(20, "a", "b", "c"))
    assert offsets(all_of_them.choose(3, confirm=False, shared_first=False)) == [0, 10]
    assert offsets(all_of_them.choose(3, confirm=False, shared_first=True)) == [20]


def test_what_failed_once_is_tried_again_before_anything_new_is_kept() -> None:
    once, new = trial(0, "a"), trial(10, "a")
    once.enter(run(a="FAILED"))
    both = trials(once, new)
    assert offsets(both.choose(3, confirm=True, shared_first=False)) == [0]
    assert offsets(both.choose(3, confirm=False, shared_first=False)) == [10]
    assert offsets(both.choose(1, confirm=False, shared_first=False)) == [0]


def test_enough_is_enough() -> None:
    kept = trial(0, "a")
    for _ in range(2):
        kept.enter(run(a="FAILED"))
    assert trials(kept, trial(10, "a")).choose(1, confirm=False, shared_first=False) == []


def test_of_tests_to_be_tried_alone_each_has_one() -> None:
    dropped = trial(0, "a")
    dropped.enter(run(a="PASSED"))
    all_of_them = trials(dropped, trial(10, "a"), trial(20, "b"), trial(30, "b"), trial(40, "c"))
    assert len(all_of_them.apart(2)) == 2
    alone = offsets(all_of_them.apart(10))
    assert len(alone) == 3
    assert {10, 40} <= set(alone)
