"""Which task a group plays: those whose groups are likely to have a signal, and none forgotten."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

import pytest
from msgspec.structs import replace

from pipeline.journal.rows import EpisodeRow
from pipeline.request import Purpose
from trainer.recipe import CurriculumRecipe
from trainer.rollouts.curriculum import Curriculum, TaskOrder

SIGNAL = CurriculumRecipe(kind="signal")
GROUP_SIZE = 8


def episode(
    task_id: str, reward: float | None, purpose: Purpose = "train", *, group_id: str = "g00000000"
) -> EpisodeRow:
    return EpisodeRow(
        request_id="r",
        group_id=group_id,
        task_id=task_id,
        purpose=purpose,
        member=0,
        group_size=GROUP_SIZE,
        fate="failed" if reward is None else "trained",
        cursor=0,
        version_at_enqueue=0,
        enqueued_at=0.0,
        reward=reward,
    )


def curriculum(
    num_tasks: int, recipe: CurriculumRecipe = SIGNAL, rows: Iterable[EpisodeRow] = (), seed: int = 1
) -> Curriculum:
    order = TaskOrder([f"t{number}" for number in range(num_tasks)], seed=seed)
    return Curriculum(order, recipe, seed=seed, group_size=GROUP_SIZE, rows=rows)


def drawn(
    chosen: Curriculum, num_groups: int, live: Sequence[str] = (), quarantined: Sequence[str] = ()
) -> list[str]:
    return [chosen.choose(cursor, live=live, quarantined=quarantined) for cursor in range(num_groups)]


def groups_of(task_id: str, num_groups: int, rewards: Sequence[float]) -> list[EpisodeRow]:
    return [episode(task_id, reward) for reward in [*rewards] * num_groups]


def test_the_plain_order_ignores_rewards() -> None:
    plain = CurriculumRecipe()
    rows = groups_of("t0", 20, [1.0] * GROUP_SIZE)
    assert drawn(curriculum(5, plain, rows), 40) == drawn(curriculum(5, plain), 40)
    assert Counter(drawn(curriculum(5, plain), 40)) == dict.fromkeys([f"t{i}" for i in range(5)], 8)


def test_a_task_that_is_solved_now_and_then_is_drawn_more_often_than_one_always_or_never_solved() -> None:
    rows = chain(
        groups_of("t0", 8, [1.0] * GROUP_SIZE),
        groups_of("t1", 8, [0.0] * GROUP_SIZE),
        groups_of("t2", 8, [1.0, 0.0] * (GROUP_SIZE // 2)),
    )
    counts = Counter(drawn(curriculum(3, rows=rows), 400))
    assert counts["t2"] > 3 * (counts["t0"] + counts["t1"])
    assert min(counts.values()) > 0, "each has a share of the plain order"


def test_a_task_without_episodes_is_preferred_to_one_that_is_always_solved() -> None:
    rows = groups_of("t0", 8, [1.0] * GROUP_SIZE)
    counts = Counter(drawn(curriculum(2, rows=rows), 200))
    assert counts["t1"] > 3 * counts["t0"]


def test_only_the_newest_episodes_count() -> None:
    now_solved = [*groups_of("t0", 8, [1.0, 0.0] * 4), *groups_of("t0", 30, [1.0] * GROUP_SIZE)]
    now_split = [*groups_of("t1", 30, [1.0] * GROUP_SIZE), *groups_of("t1", 8, [1.0, 0.0] * 4)]
    counts = Counter(drawn(curriculum(2, rows=[*now_solved, *now_split]), 200))
    assert counts["t1"] > 3 * counts["t0"]


def test_evaluations_and_what_was_withdrawn_are_no_evidence() -> None:
    withdrawn = [replace(episode("t0", None), fate="withdrawn")] * 50
    rows = [*withdrawn, *[episode("t0", 1.0, "eval")] * 50, episode("unknown", 1.0)]
    assert drawn(curriculum(3, rows=rows), 50) == drawn(curriculum(3), 50)


@pytest.mark.parametrize(("live", "quarantined"), [(["t0", "t1"], []), (["t0"], ["t1"]), ([], ["t0", "t1"])])
def test_tasks_in_quarantine_are_not_drawn_nor_those_with_a_group_unless_all_have_one(
    live: list[str], quarantined: list[str]
) -> None:
    never_plain = CurriculumRecipe(kind="signal", plain_share=0.0)
    assert set(drawn(curriculum(3, never_plain), 60, live, quarantined)) == {"t2"}
    everything = [f"t{number}" for number in range(3)]
    assert set(drawn(curriculum(3, never_plain), 60, everything, ["t0"])) == {"t1", "t2"}


def test_a_curriculum_made_of_the_journal_draws_as_the_one_that_observed_it() -> None:
    chance = random.Random(0)
    observing, rows = curriculum(6), list[EpisodeRow]()
    for cursor in range(60):
        chosen = observing.choose(cursor, live=(), quarantined=())
        restored = curriculum(6, rows=rows)
        assert restored.choose(cursor, live=(), quarantined=()) == chosen
        for _ in range(GROUP_SIZE):
            rows.append(episode(chosen, float(chance.random() < 0.3)))
            observing.observe(rows[-1])


@pytest.mark.parametrize(
    ("rates", "plain_above", "at_most"),
    [
        ([0.0] * 20 + [1.0] * 20 + [0.1, 0.3, 0.5, 0.7, 0.9] * 12, 0.45, 0.1),
        ([0.0] * 70 + [1.0] * 10 + [0.2, 0.4, 0.6, 0.8] * 5, 0.75, 0.15),
    ],
    ids=["two of five tasks teach nothing", "four of five tasks teach nothing"],
)
def test_few_groups_are_without_signal_where_many_of_the_plain_order_are(
    rates: list[float], plain_above: float, at_most: float
) -> None:
    def share_without_signal(recipe: CurriculumRecipe) -> float:
        chance, chosen = random.Random(3), curriculum(len(rates), recipe)
        num_without = 0
        for cursor in range(2000):
            task_id = chosen.choose(cursor, live=(), quarantined=())
            rewards = [float(chance.random() < rates[int(task_id[1:])]) for _ in range(GROUP_SIZE)]
            for reward in rewards:
                chosen.observe(episode(task_id, reward))
            num_without += cursor >= 1000 and len(set(rewards)) == 1
        return num_without / 1000

    assert share_without_signal(CurriculumRecipe()) > plain_above
    assert share_without_signal(SIGNAL) < at_most


def test_a_task_whose_episodes_only_fail_is_drawn_less_and_less_until_one_of_them_has_a_reward() -> None:
    known = groups_of("t0", 8, [1.0, 0.0] * (GROUP_SIZE // 2))
    one_group = [episode("t1", None, group_id="g1")] * GROUP_SIZE
    failing = [episode("t1", None, group_id=f"g{number}") for number in range(12) for _ in range(GROUP_SIZE)]
    new, once, often = (
        Counter(drawn(curriculum(2, rows=[*known, *rows]), 400))["t1"] for rows in ((), one_group, failing)
    )
    # Ever less, but not never: a twentieth of the groups follows the plain order.
    assert new > 2 * once > 2 * often > 0
    assert often < 20
    solved = [*failing, episode("t1", 0.0, group_id="g12"), episode("t1", None, group_id="g12")]
    again = curriculum(2, rows=[*known, *solved])
    assert Counter(drawn(again, 400))["t1"] > 2 * often


@pytest.mark.parametrize("sharpness", [16.0, 1e6])
def test_the_best_task_is_drawn_whatever_the_exponent(sharpness: float) -> None:
    recipe = CurriculumRecipe(kind="signal", plain_share=0.0, sharpness=sharpness)
    rows = [*groups_of("t0", 60, [1.0] * GROUP_SIZE), *groups_of("t1", 60, [1.0, 0.0] * 4)]
    assert {*drawn(curriculum(2, recipe, rows), 50)} == {"t1"}
