"""How many members a group has: more for easy and for hard tasks, and the same after a resume."""

import random
from collections import Counter

import pytest
from arq.connections import ArqRedis

from pipeline import queue, request_store
from pipeline.journal.rows import EpisodeRow
from pipeline.request import RolloutRequest
from tests.trainer.loop.test_recovery import forget
from tests.trainer.trainer_side import RUN, TrainerSide
from trainer.recipe import CurriculumRecipe
from trainer.records.journal_writer import Journal
from trainer.rollouts.curriculum import Curriculum, TaskOrder, fitting_size

TASKS = ("t0", "t1", "t2")
RESUMED = CurriculumRecipe(max_group_size=8, signal_share=0.6)


def episode(task_id: str, reward: float) -> EpisodeRow:
    return EpisodeRow(
        request_id="r", group_id="g", task_id=task_id, purpose="train", member=0, group_size=4, fate="trained", reward=reward
    )  # fmt: skip


def curriculum(recipe: CurriculumRecipe, rows: list[EpisodeRow], num_tasks: int = 5) -> Curriculum:
    order = TaskOrder([f"t{number}" for number in range(num_tasks)], seed=1)
    return Curriculum(order, recipe, seed=1, group_size=4, rows=rows)


@pytest.mark.parametrize(
    ("rate", "share", "size"),
    [
        (0.5, 0.875, 4),  # 2 * 0.5^4 = 0.125
        (0.5, 0.9, 5),  # 2 * 0.5^5 = 0.0625
        (0.3, 0.9, 7),  # 0.7^6 = 0.118, 0.7^7 + 0.3^7 = 0.0826
        (0.2, 0.9, 11),  # 0.8^10 = 0.107, 0.8^11 = 0.086
        (0.8, 0.9, 11),
        # 0.9^16 = 0.185, and two different rewards are expected in 1 / 0.09 - 1 = 10.1 episodes
        (0.1, 0.9, 16),
        (0.07, 0.9, 16),  # expected in 1 / 0.0651 - 1 = 14.4 episodes
        (0.06, 0.9, 4),  # expected in 1 / 0.0564 - 1 = 16.7 episodes
        (0.94, 0.9, 4),
        (0.05, 0.5, 14),  # 0.95^13 = 0.513, 0.95^14 = 0.488
        (0.0, 0.9, 4),
        (1.0, 0.9, 4),
    ],
)
def test_a_group_has_the_fewest_members_whose_rewards_probably_differ(
    rate: float, share: float, size: int
) -> None:
    assert fitting_size(rate, range(4, 17), share=share) == size


@pytest.mark.parametrize("kind", ["plain", "signal"])
def test_hard_tasks_have_larger_groups_and_those_of_one_result_the_smallest(kind: str) -> None:
    rows = [
        episode(f"t{number}", reward)
        for played in range(400)
        for number, reward in enumerate((played % 2, played % 8 == 0, 0, 1))
    ]
    recipe = CurriculumRecipe(kind="signal" if kind == "signal" else "plain", max_group_size=16)
    sized = curriculum(recipe, rows)
    # Solved every other time, one time in eight, never, always, and not played yet
    assert [sized.size(f"t{number}") for number in range(5)] == [5, 16, 4, 4, 5]
    without = curriculum(CurriculumRecipe(kind=recipe.kind), rows)
    assert {without.size(f"t{number}") for number in range(5)} == {4}


def test_a_curriculum_made_of_the_journal_gives_the_sizes_of_the_one_that_observed_it() -> None:
    recipe, chance = CurriculumRecipe(max_group_size=16), random.Random(0)
    observing, rows, sizes = curriculum(recipe, []), list[EpisodeRow](), Counter[int]()
    for number in range(150):
        task_id = f"t{chance.randrange(5)}"
        size = observing.size(task_id)
        assert curriculum(recipe, rows).size(task_id) == size
        sizes[size] += 1
        rows.append(episode(task_id, float(chance.random() < (number % 5) / 20)))
        observing.observe(rows[-1])
    assert len(sizes) > 4


async def enqueued(pool: ArqRedis) -> list[RolloutRequest]:
    found = [await request_store.read(pool, one) for one in await queue.open_ids(pool, RUN)]
    return sorted((one for one in found if one is not None), key=lambda one: (one.cursor, one.member))


def side(pool: ArqRedis, journal: Journal) -> TrainerSide:
    return TrainerSide(pool, journal, tasks=TASKS, group_size=2, curriculum=RESUMED)


def make_hard(journal: Journal) -> None:
    for played in range(400):
        for task_id in TASKS:
            journal.append(episode(task_id, float(played % 4 == 0)))


async def test_a_group_is_as_large_as_its_task_needs_when_it_is_enqueued(
    pool: ArqRedis, journal: Journal
) -> None:
    first = side(pool, journal)
    await first.dispatcher.open_groups(1, version=0)
    for row in [episode(task_id, float(played % 4 == 0)) for played in range(400) for task_id in TASKS]:
        first.books.sources.observe(row)
    await first.dispatcher.open_groups(1, version=0)
    # 3 members are enough for 0.6 at p = 1/2 (0.75), and not at p = 1/4 (0.5625).
    larger = first.book.open_groups[1].size
    assert larger > 3
    assert [(one.cursor, one.member, one.group_size) for one in await enqueued(pool)] == [
        *((0, member, 3) for member in range(3)),
        *((1, member, larger) for member in range(larger)),
    ]
    assert first.book.num_awaited == 3 + larger


@pytest.mark.parametrize("is_redis_empty", [False, True], ids=["a request is lost", "Redis lost everything"])
async def test_an_open_group_keeps_its_size_after_a_resume_whatever_has_been_learned_of_its_task(
    pool: ArqRedis, journal: Journal, is_redis_empty: bool
) -> None:
    first = side(pool, journal)
    await first.dispatcher.open_groups(3, version=0)
    state = first.ledger.state(step=0, version=0, cursor=3, open_groups=first.book.open_groups)
    before = [(one.cursor, one.member, one.group_size) for one in await enqueued(pool)]
    assert before == [(cursor, member, 3) for cursor in range(3) for member in range(3)]
    make_hard(journal)
    if is_redis_empty:
        await pool.flushall()
    else:
        await forget(pool, (await enqueued(pool))[4].id)
    resumed = TrainerSide(pool, journal, tasks=TASKS, group_size=2, curriculum=RESUMED, restored=state)
    assert {resumed.books.sources.at(0).curriculum.size(task_id) for task_id in TASKS}.isdisjoint({2, 3})
    await resumed.recovery.restore(state)
    await resumed.recovery.enqueue_missing(version=0)
    assert [(one.cursor, one.member, one.group_size) for one in await enqueued(pool)] == before
    await resumed.dispatcher.open_groups(1, version=0)
    *kept, following = [group.size for group in resumed.book.open_groups.values()]
    assert (kept, following > 3) == ([3, 3, 3], True)


async def test_a_group_enqueued_after_the_checkpoint_is_lost_with_redis_and_sized_as_the_first_time(
    pool: ArqRedis, journal: Journal
) -> None:
    make_hard(journal)
    first = side(pool, journal)
    state = first.ledger.state(step=0, version=0, cursor=0)
    await first.dispatcher.open_groups(2, version=0)
    before = [(one.cursor, one.task.id, one.member, one.group_size) for one in await enqueued(pool)]
    await pool.flushall()
    resumed = side(pool, journal)
    await resumed.recovery.restore(state)
    await resumed.recovery.enqueue_missing(version=0)
    await resumed.dispatcher.open_groups(2, version=0)
    assert [(one.cursor, one.task.id, one.member, one.group_size) for one in await enqueued(pool)] == before
    assert len(before) > 6


async def test_an_open_group_keeps_its_task_after_a_resume_whatever_has_been_learned(
    pool: ArqRedis, journal: Journal
) -> None:
    signal, tasks = CurriculumRecipe(kind="signal"), [f"t{number}" for number in range(9)]
    first = TrainerSide(pool, journal, tasks=tasks, group_size=2, curriculum=signal)
    await first.dispatcher.open_groups(3, version=0)
    state = first.ledger.state(step=0, version=0, cursor=3, open_groups=first.book.open_groups)
    before = [(one.cursor, one.task.id) for one in await enqueued(pool)]
    played = {task_id for _, task_id in before}
    for task_id in tasks:
        for number in range(200):
            journal.append(episode(task_id, float(task_id in played or number % 2)))
    await pool.flushall()
    resumed = TrainerSide(pool, journal, tasks=tasks, group_size=2, curriculum=signal, restored=state)
    await resumed.recovery.restore(state)
    await resumed.recovery.enqueue_missing(version=0)
    assert [(one.cursor, one.task.id) for one in await enqueued(pool)] == before
