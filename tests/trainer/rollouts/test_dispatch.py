"""The order of tasks, the ids, and what requests say."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from arq.connections import ArqRedis

from benchmarks.scripted_fleet import task
from pipeline import keys, queue, request_store
from pipeline.journal.reading import read
from pipeline.journal.rows import SkippedRow
from pipeline.request import Limits, Sampling
from pipeline.tokenizer import read_bundle
from trainer.inputs import Inputs
from trainer.loop.run import request_form
from trainer.recipe import CurriculumRecipe, Recipe, load_recipe
from trainer.records.journal_writer import Journal
from trainer.rollouts.admission import Admission
from trainer.rollouts.curriculum import Curriculum, SourceOrder, TaskOrder
from trainer.rollouts.dispatch import (
    Dispatcher,
    GroupSource,
    GroupSources,
    Quarantine,
    RequestForm,
    new_ids,
)
from trainer.rollouts.groups import GroupBook
from trainer.rollouts.ledger import Ledger

RECIPE = """
name = "r"
model = "m"
num_steps = 3
tasks.train = "train.jsonl"
rollout = { group_size = 4, agent = "agent.yaml" }
batch.groups_per_step = 2
learner = { lr = 1e-6, micro_batch_tokens = 32768 }
"""


def dispatcher(pool: ArqRedis, journal: Journal) -> Dispatcher:
    form = RequestForm(run_id="run", limits=Limits(), agent_config="", tokenizer="", ids=new_ids())
    admission = Admission(max_lag_versions=1, groups_per_step=2, num_steps=9)
    book = GroupBook(admission, min_valid_of=lambda size: 2, stragglers="wait")
    tasks = {f"t{i}": task(f"t{i}") for i in range(3)}
    curriculum = Curriculum(TaskOrder([*tasks], seed=5), CurriculumRecipe(), seed=5, group_size=3)
    source = GroupSource("", recipe_of(journal.directory, "rollout.group_size=3"), form, tasks, curriculum)
    sources = GroupSources([source], SourceOrder({"": 1.0}))
    return Dispatcher(pool, sources, book, ledger=Ledger(journal), quarantine=Quarantine(journal))


def recipe_of(directory: Path, *overrides: str) -> Recipe:
    (directory / "recipe.toml").write_text(RECIPE)
    return load_recipe(directory / "recipe.toml", overrides)


def test_every_epoch_plays_every_task_once_in_an_order_of_its_own() -> None:
    order = TaskOrder([f"t{i}" for i in range(20)], seed=1)
    epochs = [[order[cursor] for cursor in range(start, start + 20)] for start in (0, 20, 40)]
    assert all(Counter(epoch) == Counter(f"t{i}" for i in range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_seed_and_cursor_alone() -> None:
    tasks = [f"t{i}" for i in range(20)]
    backwards = [TaskOrder(tasks, seed=1)[cursor] for cursor in reversed(range(40))]
    assert [TaskOrder(tasks, seed=1)[cursor] for cursor in range(40)] == backwards[::-1]
    assert [TaskOrder(tasks, seed=2)[cursor] for cursor in range(40)] != backwards[::-1]


def test_a_task_file_without_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tasks\.train holds no task"):
        TaskOrder([], seed=1)


def test_ids_are_unique_and_sort_as_they_were_made() -> None:
    made = list(islice(new_ids(), 1000))
    assert made == sorted(set(made))
    assert {len(one) for one in made} == {26}


async def test_a_group_is_one_task_enqueued_once_per_member(pool: ArqRedis, journal: Journal) -> None:
    asking = dispatcher(pool, journal)
    await asking.open_groups(2, version=4)
    requests = [await request_store.read(pool, one) for one in await queue.open_ids(pool, "run")]
    enqueued = [(r.group_id, r.cursor, r.member, r.version_at_enqueue) for r in requests if r is not None]
    assert enqueued == [(f"g0000000{g}", g, m, 4) for g in (0, 1) for m in range(3)]
    assert len({r.task.id for r in requests if r is not None}) == 2
    assert await pool.zcard(keys.queue()) == 6


async def test_requests_say_which_share_of_passes_gets_a_control_run(
    pool: ArqRedis, journal: Journal, tiny_model: Path, tmp_path: Path
) -> None:
    inputs = Inputs(
        sources=(),
        heldout=[],
        heldout_sets={},
        agent_config="",
        tokenizer=read_bundle(tiny_model),
        num_unverified=0,
        num_uncontrolled=0,
        num_too_weak=0,
    )
    for controls, share in (("always", 1.0), ("never", 0.0), ("0.25", 0.25)):
        recipe = recipe_of(tmp_path, f"grading.controls={controls}")
        form = await request_form(pool, "run", recipe, inputs)
        request = form.fill(
            task("t0"),
            purpose="eval",
            group_id="g",
            member=0,
            group_size=1,
            version=0,
            sampling=Sampling(),
        )
        assert request.control_share == share


async def test_a_group_that_was_enqueued_in_part_is_completed_for_the_same_task(
    pool: ArqRedis, journal: Journal
) -> None:
    asking = dispatcher(pool, journal)
    asking.cursor = 7
    for member in (1, 2, 1):
        asking.refill(5, member)
    await asking.open_groups(0, version=3)
    requests = [await request_store.read(pool, one) for one in await queue.open_ids(pool, "run")]
    expected = TaskOrder([f"t{i}" for i in range(3)], seed=5)[5]
    assert [(r.cursor, r.member, r.task.id) for r in requests if r is not None] == [
        (5, 1, expected),
        (5, 2, expected),
    ]
    assert asking.cursor == 7, "the order goes on where it was"


def put_in_quarantine(journal: Journal, *cursors: int) -> None:
    quarantine = Quarantine(journal)
    order = TaskOrder([f"t{i}" for i in range(3)], seed=5)
    for cursor in cursors:
        quarantine.put(order[cursor], "flaky", request_id="r")


async def test_places_of_a_task_in_quarantine_are_passed_over_and_the_others_stay_where_they_were(
    pool: ArqRedis, journal: Journal
) -> None:
    put_in_quarantine(journal, 1)
    asking = dispatcher(pool, journal)
    await asking.open_groups(4, version=0)
    requests = [await request_store.read(pool, one) for one in await queue.open_ids(pool, "run")]
    order = TaskOrder([f"t{i}" for i in range(3)], seed=5)
    skipped = [row.cursor for row in read(journal.directory, SkippedRow)]
    enqueued = sorted({(r.cursor, r.task.id) for r in requests if r is not None})
    assert len(enqueued) == 4
    assert all(order[cursor] == task_id for cursor, task_id in enqueued)
    assert all(order[cursor] == order[1] for cursor in skipped)
    assert sorted([*skipped, *(cursor for cursor, _ in enqueued)]) == list(range(asking.cursor))


async def test_with_every_task_in_quarantine_nothing_is_enqueued(pool: ArqRedis, journal: Journal) -> None:
    put_in_quarantine(journal, 0, 1, 2)
    asking = dispatcher(pool, journal)
    await asking.open_groups(2, version=0)
    assert asking.is_exhausted
    assert await queue.open_ids(pool, "run") == []
