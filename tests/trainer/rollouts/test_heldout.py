"""Held-out evaluation: what is enqueued, counted and left out."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from arq.connections import ArqRedis
from redis.asyncio import Redis

from benchmarks.scripted_fleet import Verdict, task, work_off
from pipeline import connection, keys, queue, stream
from pipeline.journal.reading import read
from pipeline.journal.rows import EpisodeRow, EvaluationRow
from pipeline.request import Limits, RolloutRequest, Sampling
from pipeline.task import Task
from trainer.recipe import EvaluationRecipe
from trainer.records.journal_writer import Journal
from trainer.rollouts.dispatch import RequestForm, enqueue, new_ids
from trainer.rollouts.heldout import HeldOut
from trainer.rollouts.ledger import Ledger

RECIPE = EvaluationRecipe(episodes=8, samples_per_task=2, greedy_episodes=3)


@pytest.fixture
async def pool(redis_url: str, redis: Redis) -> AsyncIterator[ArqRedis]:
    pool = await connection.connect(redis_url)
    await stream.open_reader(pool, "run")
    yield pool
    await pool.aclose()


def form() -> RequestForm:
    return RequestForm(run_id="run", limits=Limits(), agent_config="", tokenizer="", ids=new_ids())


def held_out(
    pool: ArqRedis,
    journal: Journal,
    rows: list[EvaluationRow],
    sets: dict[str, list[Task]] | None = None,
) -> HeldOut:
    return HeldOut(
        pool,
        form(),
        [task(f"h{i}") for i in range(6)],
        sets or {},
        RECIPE,
        sampling=Sampling(temperature=0.9),
        seed=0,
        ledger=Ledger(journal),
        report=rows.append,
    )


async def play(pool: ArqRedis, heldout: HeldOut, verdict: Verdict) -> None:
    await heldout.send()
    await work_off(pool, verdict)
    for delivery in await stream.read_new(pool, "run", block_ms=10):
        assert heldout.awaits(delivery.head.request_id)
        heldout.accept(delivery)


async def test_an_evaluation_is_counted_by_mode_and_its_failures_left_out(
    pool: ArqRedis, tmp_path: Path
) -> None:
    rows: list[EvaluationRow] = []
    with Journal(tmp_path) as journal:
        heldout = held_out(pool, journal, rows)
        heldout.start("heldout_before", version=0, step=0)

        def verdict(request: RolloutRequest) -> float | None:
            if request.sampling.temperature == 0:
                return 1.0
            return None if request.group_id.endswith(":0") else float(request.member)

        await play(pool, heldout, verdict)
        assert heldout.progress == ""
    sampled, greedy = rows
    assert (sampled.success, sampled.num_episodes, sampled.num_failed) == (0.5, 6, 2)
    assert sorted(sampled.rewards.values()) == [(0.0, 1.0)] * 3, "in the order of members"
    assert 0 < sampled.success_low < sampled.success < sampled.success_high < 1
    assert greedy.success_low == pytest.approx(3 / (3 + 1.96**2), abs=1e-4), "Wilson's interval of 3 of 3"
    assert (greedy.success, greedy.num_episodes, greedy.greedy) == (1.0, 3, True)
    assert (sampled.pass_at, greedy.pass_at) == ({"1": 0.5, "2": 1.0}, {"1": 1.0})
    assert sampled.outcomes == {"submitted": 6, "failed:sandbox": 2}
    assert (sampled.mean_turns, sampled.tasks) == (2.0, "")
    assert sampled.mean_sampled_tokens == 9.0, "members sample 8 and 10 tokens in two turns"
    fates = [row.fate for row in read(tmp_path, EpisodeRow)]
    assert sorted(fates) == ["evaluated"] * 9 + ["failed"] * 2


async def test_the_same_tasks_are_played_before_and_after(pool: ArqRedis, tmp_path: Path) -> None:
    played: dict[str, list[str]] = {"before": [], "after": []}
    with Journal(tmp_path) as journal:
        heldout = held_out(pool, journal, [])
        for name, seen in played.items():

            def verdict(request: RolloutRequest, seen: list[str] = seen) -> float:
                seen.append(request.task.id)
                return 1.0

            heldout.start(name, version=0, step=0)
            await play(pool, heldout, verdict)
    assert played["before"] == played["after"]
    assert len(set(played["before"])) == 4


async def test_each_held_out_set_is_a_row_of_its_own(pool: ArqRedis, tmp_path: Path) -> None:
    rows: list[EvaluationRow] = []
    sets = {"easy": [task(f"e{i}") for i in range(9)], "few": [task("f0")]}
    with Journal(tmp_path) as journal:
        heldout = held_out(pool, journal, rows, sets)
        heldout.start("heldout_step_4", version=4, step=4)
        await play(pool, heldout, lambda request: float(request.task.id.startswith("e")))
    assert [(row.tasks, row.greedy, row.success, row.num_episodes) for row in rows] == [
        ("", False, 0.0, 8),
        ("", True, 0.0, 3),
        ("easy", False, 1.0, 8),
        ("easy", True, 1.0, 3),
        ("few", False, 0.0, 2),
        ("few", True, 0.0, 1),
    ]
    assert {row.evaluation for row in read(tmp_path, EpisodeRow)} == {"heldout_step_4"}
    assert list(read(tmp_path, EvaluationRow)) == [], "the reporter writes them"


async def test_evaluations_are_claimed_before_training_that_waited_longer(
    pool: ArqRedis, tmp_path: Path
) -> None:
    request = form().fill(
        task("t"),
        purpose="train",
        group_id="g00000000",
        member=0,
        group_size=2,
        version=0,
        sampling=Sampling(),
    )
    await enqueue(pool, request)
    with Journal(tmp_path) as journal:
        heldout = held_out(pool, journal, [])
        heldout.start("heldout_before", version=0, step=0)
        await heldout.send()
    assert (await pool.zrange(keys.queue(), -1, -1))[0].decode() == request.id


async def test_while_an_evaluation_is_under_way_it_says_how_far_it_is(pool: ArqRedis, tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        heldout = held_out(pool, journal, [])
        heldout.start("heldout_before", version=0, step=0)
        await heldout.send()
        await work_off(pool, limit=4)
        for delivery in await stream.read_new(pool, "run", block_ms=10):
            heldout.accept(delivery)
        assert heldout.progress == "heldout_before: 4 of 11 held-out episodes"
        assert list(read(tmp_path, EpisodeRow)) == [], "an unfinished evaluation settles nothing"


async def test_what_redis_forgot_of_an_evaluation_is_enqueued_anew_under_new_ids(
    pool: ArqRedis, tmp_path: Path
) -> None:
    rows: list[EvaluationRow] = []
    with Journal(tmp_path) as journal:
        heldout = held_out(pool, journal, rows)
        heldout.start("heldout_before", version=0, step=0)
        assert heldout.replace(()) == 0, "nothing was sent yet"
        await heldout.send()
        await work_off(pool, lambda _: 1.0, limit=4)
        for delivery in await stream.read_new(pool, "run", block_ms=10):
            heldout.accept(delivery)
        before = {request.request_id for request in heldout.outstanding}
        await pool.flushdb()
        await stream.open_reader(pool, "run")
        assert heldout.replace(await queue.open_ids(pool, "run")) == len(before) == 7
        assert before.isdisjoint(request.request_id for request in heldout.outstanding)
        await play(pool, heldout, lambda _: 1.0)
        assert heldout.progress == ""
    assert [(row.num_episodes, row.num_failed, row.greedy) for row in rows] == [(8, 0, False), (3, 0, True)]
    fates = [row.fate for row in read(tmp_path, EpisodeRow)]
    assert sorted(fates) == ["evaluated"] * 11 + ["withdrawn"] * 7
