"""Which contradictions are tried on the known fix, and which are kept."""

import random

from msgspec.structs import replace

from tests.workers.contradictions import changing
from workers.grading.controls.drawing import Outcomes
from workers.verify.trials import Trial, Trials


def trial(offset: int, *names: str) -> Trial:
    one = changing("test_a.py", offset, "4", "5", *names)
    return Trial(one, frozenset(names))


def trials(*these: Trial) -> Trials:
    return Trials(list(these), random.Random(0))


def offsets(chosen: list[Trial]) -> list[int]:
    return sorted(one.contradiction.changes[0].offset_bytes for one in chosen)


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


def test_contradictions_of_some_tests_can_be_tried_before_others() -> None:
    all_of_them = trials(trial(0, "a"), trial(10, "b"), trial(20, "b", "c"))
    assert offsets(all_of_them.choose(3, confirm=False, shared_first=False, among=["b"])) == [10]


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
    assert len(all_of_them.apart(2, ())) == 2
    alone = offsets(all_of_them.apart(10, ()))
    assert len(alone) == 3
    assert {10, 40} <= set(alone)
    assert offsets(all_of_them.apart(1, {"c"})) == [40]


def test_kinds_that_a_test_has_none_of_come_first_and_what_equals_nothing_last() -> None:
    held = trial(0, "a")
    for _ in range(2):
        held.enter(run(a="FAILED"))
    others = [trial(offset, "a") for offset in (10, 20, 30)]
    for one, kind in zip(others, ("value", "opposite", "nothing"), strict=True):
        one.contradiction = replace(one.contradiction, kind=kind)
    assert offsets(trials(held, *others).choose(3, confirm=False, shared_first=False)) == [20]
    assert offsets(trials(*others).choose(3, confirm=False, shared_first=False)) != [30]
    assert offsets(trials(others[2]).choose(3, confirm=False, shared_first=False)) == [30]


def test_a_test_that_has_another_name_under_a_contradiction_is_known_by_it() -> None:
    one = trial(0, "a4", "b")
    one.contradiction = replace(one.contradiction, renamed={"a4": "a5"})
    for _ in range(2):
        assert one.enter(run(a5="FAILED", b="PASSED"))
    (kept,) = trials(one).kept()
    assert (kept.fails, kept.may_fail) == (("a4",), ("b",))


def test_a_test_of_another_file_that_fails_under_a_contradiction_may_fail() -> None:
    one, other = trial(0, "a"), trial(10, "b")
    one.others = frozenset({"b", "c"})
    assert len(trials(one, other).choose(3, confirm=False, shared_first=False)) == 1
    for c in ("FAILED", "PASSED"):
        one.enter(run(a="FAILED", b="PASSED", c=c))
    (kept,) = trials(one).kept()
    assert (kept.fails, kept.may_fail) == (("a",), ("c",))


def test_what_comes_last_is_kept_only_for_tests_without_another() -> None:
    first, last, alone = trial(0, "a"), trial(10, "a"), trial(20, "b")
    last.is_last = alone.is_last = True
    for _ in range(2):
        for one in (first, last, alone):
            one.enter(run(a="FAILED", b="FAILED"))
    assert [one.changes[0].offset_bytes for one in trials(first, last, alone).kept()] == [0, 20]


def test_no_two_contradictions_of_a_run_give_tests_one_name() -> None:
    pair = [trial(0, "a3"), trial(10, "a4")]
    for one in pair:
        renamed = {name: "a5" for name in one.names}
        one.contradiction = replace(one.contradiction, renamed=renamed)
    assert len(trials(*pair).choose(3, confirm=False, shared_first=False)) == 1
