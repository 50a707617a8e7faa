"""Several sources of tasks: in which order they take turns, and what each source's requests, groups and batches say."""

from collections import Counter
from fractions import Fraction
from itertools import islice
from pathlib import Path
from random import Random

import pytest
from arq.connections import ArqRedis

from benchmarks import chat_tokenizer
from benchmarks.scripted_fleet import task
from pipeline import queue, request_store
from pipeline.harness import read_harness
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow
from pipeline.request import RolloutRequest
from trainer.inputs import Inputs, TaskSource
from trainer.loop.run import request_form
from trainer.recipe import Recipe, load_recipe
from trainer.records.journal_writer import Journal
from trainer.rollouts.books import Books
from trainer.rollouts.curriculum import SourceOrder, TaskOrder, context_limits
from trainer.rollouts.groups import group_id_of
from trainer.rollouts.ledger import LedgerState
from trainer.rollouts.open_requests import OpenRequests, RunRecovery

RECIPE = """
name = "r"
model = "m"
num_steps = 100
seed = 3
batch.groups_per_step = 2
learner = { lr = 1e-6, micro_batch_tokens = 32768 }
[rollout]
group_size = 2
agent = "agent.yaml"
limits = { turns = 50, wall_s = 600, grade_wall_s = 60 }
[[sources]]
name = "small"
tasks = "small.jsonl"
share = 2
[[sources]]
name = "large"
tasks = "large.jsonl"
share = 1
harness = "mini"
group_size = 5
limits = { turns = 9, context_tokens = 20000, wall_s = 6000 }
context = { policy = "stop" }
sampling.max_new_tokens = 100
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return recipe_of(tmp_path)


def recipe_of(directory: Path, *overrides: str) -> Recipe:
    (directory / "recipe.toml").write_text(RECIPE)
    return load_recipe(directory / "recipe.toml", overrides)


def names(order: SourceOrder, num_groups: int) -> list[str]:
    return [order[cursor][0] for cursor in range(num_groups)]


def test_each_source_has_its_share_of_the_groups_to_within_one_over_any_first_part_of_a_run() -> None:
    draws = Random(1)
    for _ in range(100):
        shares = {
            f"s{place}": draws.choice([1, 2.5, 0.1, 7, draws.random()])
            for place in range(draws.randint(1, 6))
        }
        total = sum(Fraction(str(share)) for share in shares.values())
        counts, order = Counter[str](), SourceOrder(shares)
        for number, name in enumerate(names(order, 200), start=1):
            counts[name] += 1
            owed = {one: Fraction(str(share)) / total * number for one, share in shares.items()}
            assert all(abs(counts[one] - owed[one]) < 1 for one in shares), (shares, number)


def test_the_source_of_a_group_depends_on_its_cursor_and_the_shares_alone() -> None:
    shares = {"a": 0.5, "b": 0.3, "c": 1.7}
    expected = names(SourceOrder(shares), 300)
    fresh = [SourceOrder(dict(reversed(shares.items())))[cursor][0] for cursor in reversed(range(300))]
    assert fresh[::-1] == expected
    assert names(SourceOrder({name: 10 * share for name, share in shares.items()}), 300) == expected
    assert names(SourceOrder({**shares, "b": 0.4}), 300) != expected


def test_a_group_far_into_a_run_costs_no_look_at_those_before_it() -> None:
    assert SourceOrder({"a": 2, "b": 1})[3 * 10**15][1] in (2 * 10**15, 10**15)
    assert SourceOrder({"": 1.0})[10**15] == ("", 10**15)


async def run_of(pool: ArqRedis, journal: Journal, recipe: Recipe, state: LedgerState | None = None) -> Books:
    inputs = Inputs(
        sources=(
            TaskSource("small", [task(f"small-{number}") for number in range(4)], "small's agent"),
            TaskSource(
                "large",
                [task(f"large-{number}") for number in range(3)],
                "unused",
                read_harness("mini").harness,
            ),
        ),
        heldout=[],
        heldout_sets={},
        agent_config="the agent of held-out tasks",
        tokenizer=chat_tokenizer.bundle(),
        num_unverified=0,
        num_uncontrolled=0,
        num_too_weak=0,
    )
    form = await request_form(pool, "run", recipe, inputs)
    state = state or LedgerState()
    return Books(pool, recipe, inputs, form, None, restored=state, rows=journal, journal=journal, say=print)


async def enqueued(pool: ArqRedis) -> list[RolloutRequest]:
    found = [await request_store.read(pool, one) for one in await queue.open_ids(pool, "run")]
    return sorted((one for one in found if one is not None), key=lambda one: (one.cursor, one.member))


async def test_requests_of_a_source_have_its_agent_limits_and_group_size(
    pool: ArqRedis, journal: Journal, recipe: Recipe
) -> None:
    books = await run_of(pool, journal, recipe)
    await books.dispatcher.open_groups(9, version=0)
    requests = await enqueued(pool)
    by_source = {
        name: [one for one in requests if one.task.id.startswith(name)] for name in ("small", "large")
    }
    assert {name: len({one.cursor for one in found}) for name, found in by_source.items()} == {
        "small": 6,
        "large": 3,
    }
    for one in by_source["small"]:
        assert (one.agent_config, one.harness, one.group_size) == ("small's agent", None, 2)
        assert (one.limits.turns, one.limits.wall_s, one.limits.context_tokens) == (50, 600, 32768)
        assert (one.context.policy, one.sampling.max_new_tokens) == ("head_tail", 4096)
    for one in by_source["large"]:
        assert one.harness is not None
        assert (one.harness.name, one.group_size, one.context.policy) == ("mini", 5, "stop")
        assert (one.limits.turns, one.limits.wall_s, one.limits.context_tokens) == (9, 6000, 20000)
        assert (one.limits.grade_wall_s, one.sampling.max_new_tokens) == (60, 100)
    assert Counter(one.cursor for one in requests) == {
        cursor: books.sources.at(cursor).recipe.rollout.group_size for cursor in range(9)
    }


async def test_each_source_has_a_smallest_size_of_its_own_and_its_hard_tasks_have_larger_groups(
    pool: ArqRedis, journal: Journal, tmp_path: Path
) -> None:
    for number in range(400):
        journal.append(episode("small-1", float(number % 4 == 0)))
        journal.append(episode("large-1", float(number % 4 == 0)))
    recipe = recipe_of(tmp_path, "curriculum={max_group_size=16, signal_share=0.8}")
    books = await run_of(pool, journal, recipe)
    assert recipe.largest_group_size == 16
    await books.dispatcher.open_groups(18, version=0)
    # 4 members are enough for 0.8 near p = 1/2 (0.875), and not even 5 at p = 1/4 (0.762).
    sizes = {one.task.id: one.group_size for one in await enqueued(pool)}
    assert min(sizes["small-1"], sizes["large-1"]) > 5
    assert {sizes["large-0"], sizes["large-2"]} == {5}
    assert {sizes["small-0"], sizes["small-2"], sizes["small-3"]} == {4}


async def test_each_source_plays_each_of_its_tasks_once_per_epoch(
    pool: ArqRedis, journal: Journal, recipe: Recipe
) -> None:
    books = await run_of(pool, journal, recipe)
    played = [books.sources.task_at(cursor, live=(), quarantined=()).id for cursor in range(36)]
    for name, size in (("small", 4), ("large", 3)):
        own = iter([one for one in played if one.startswith(name)])
        while epoch := list(islice(own, size)):
            assert sorted(epoch) == [f"{name}-{number}" for number in range(size)]


async def test_a_signal_is_looked_for_among_the_tasks_of_the_source_whose_turn_it_is(
    pool: ArqRedis, journal: Journal, tmp_path: Path
) -> None:
    for reward in (1.0, 0.0) * 20:
        journal.append(episode("small-1", reward))
    for task_id, reward in [("small-0", 1.0), ("small-2", 0.0), ("small-3", 1.0)] * 20:
        journal.append(episode(task_id, reward))
    signal = recipe_of(tmp_path, "curriculum.kind=signal")
    books = await run_of(pool, journal, signal)
    played = Counter(books.sources.task_at(cursor, live=(), quarantined=()).id for cursor in range(150))
    assert played["small-1"] > 60
    assert sum(count for task_id, count in played.items() if task_id.startswith("large")) == 50


def episode(task_id: str, reward: float) -> EpisodeRow:
    return EpisodeRow(
        request_id="r", group_id="g", task_id=task_id, purpose="train", member=0, group_size=2, fate="trained", reward=reward
    )  # fmt: skip


async def test_a_resumed_run_goes_on_with_the_source_and_the_task_that_come_next(
    pool: ArqRedis, journal: Journal, recipe: Recipe
) -> None:
    whole = await run_of(pool, journal, recipe)
    await whole.dispatcher.open_groups(12, version=0)
    expected = [(one.cursor, one.member, one.task.id, one.limits.turns) for one in await enqueued(pool)]
    await pool.flushall()
    first = await run_of(pool, journal, recipe)
    await first.dispatcher.open_groups(5, version=0)
    resumed = await run_of(pool, journal, recipe, LedgerState(cursor=5))
    resumed.dispatcher.cursor = 5
    await resumed.dispatcher.open_groups(7, version=0)
    assert [
        (one.cursor, one.member, one.task.id, one.limits.turns) for one in await enqueued(pool)
    ] == expected


async def test_members_that_were_never_enqueued_are_as_many_as_their_source_has(
    pool: ArqRedis, journal: Journal, recipe: Recipe
) -> None:
    books = await run_of(pool, journal, recipe)
    books.dispatcher.cursor = 3
    recovery = RunRecovery(books, streams=None, requests=OpenRequests(books))  # type: ignore[arg-type]
    await recovery.enqueue_missing(version=0)
    sizes = {cursor: books.sources.at(cursor).recipe.rollout.group_size for cursor in range(3)}
    assert Counter(one.cursor for one in await enqueued(pool)) == sizes
    assert sorted(sizes.values()) == [2, 2, 5]


async def test_rows_of_episodes_name_the_source(pool: ArqRedis, journal: Journal, recipe: Recipe) -> None:
    books = await run_of(pool, journal, recipe)
    await books.dispatcher.open_groups(3, version=0)
    requests = OpenRequests(books)
    await requests.withdraw_training()
    rows = list(read(journal.directory, EpisodeRow))
    assert Counter((row.source, row.task_id.partition("-")[0]) for row in rows) == {
        ("small", "small"): 4,
        ("large", "large"): 5,
    }


async def test_tasks_in_quarantine_are_skipped_and_the_other_source_keeps_its_places(
    pool: ArqRedis, journal: Journal, recipe: Recipe
) -> None:
    books = await run_of(pool, journal, recipe)
    for number in range(3):
        books.quarantine.put(f"large-{number}", "flaky", request_id="r")
    await books.dispatcher.open_groups(6, version=0)
    assert not books.dispatcher.is_exhausted
    order = SourceOrder({"small": 2, "large": 1})
    assert {order[one.cursor][0] for one in await enqueued(pool)} == {"small"}
    assert books.dispatcher.cursor >= 8, "three places of the other source lie between"


async def test_a_group_needs_valid_members_and_gets_time_as_its_source_says(
    pool: ArqRedis, journal: Journal, recipe: Recipe
) -> None:
    books = await run_of(pool, journal, recipe)
    small, large = (
        next(c for c in range(9) if books.sources.name_at(c) == name) for name in ("small", "large")
    )
    of = {name: books.sources.at(cursor).recipe for name, cursor in (("small", small), ("large", large))}
    assert {name: one.group_deadline_s for name, one in of.items()} == {"small": 660, "large": 6060}
    assert {name: one.min_valid_members for name, one in of.items()} == {"small": 2, "large": 3}
    assert {name: one.refills_of(one.rollout.group_size) for name, one in of.items()} == {
        "small": 1,
        "large": 2,
    }
    assert {one.refills_of(8) for one in of.values()} == {4}, "half of a larger group"
    limit = context_limits(recipe)
    assert (limit(group_id_of(small)), limit(group_id_of(large))) == (32768, 20000)


def test_without_sources_the_order_of_tasks_is_that_of_the_whole_file(tmp_path: Path) -> None:
    order, tasks = SourceOrder({"": 1.0}), TaskOrder([f"t{number}" for number in range(5)], seed=1)
    assert [tasks[order[cursor][1]] for cursor in range(20)] == [tasks[cursor] for cursor in range(20)]
