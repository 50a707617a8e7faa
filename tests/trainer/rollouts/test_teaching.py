"""A teacher's judgements on the trainer's side: what joins, what is trained without them, and what a resume keeps."""

import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from benchmarks.scripted_fleet import work_off
from pipeline import connection
from pipeline.judge import Judgement
from pipeline.message import pack_float32s, unpack_float32s
from tests.pipeline.judging import fail_all, teach_all
from tests.trainer.trainer_side import TrainerSide
from tests.trainer.trajectories import behind
from trainer.batching.batch import Batch
from trainer.batching.collate import make_batch
from trainer.loop.step import Steps
from trainer.recipe import CreditRecipe, JudgeRecipe
from trainer.records.journal_writer import Journal
from trainer.rollouts.groups import Group

TEACHER = JudgeRecipe(method="teacher", name="big", tokenizer="t", required=True)
DISTILL = CreditRecipe(method="distill", coefficient=1.0)
SAMPLED = -6.2  # the log-prob of every token of the scripted fleet


@pytest.fixture
async def side(redis_url: str, redis: Redis, tmp_path: Path) -> AsyncIterator[TrainerSide]:
    pool = await connection.connect(redis_url)
    with Journal(tmp_path) as journal:
        made = TrainerSide(pool, journal, judge=TEACHER, credit=DISTILL)
        await made.streams.recover()
        yield made
    await pool.aclose()


async def read(side: TrainerSide) -> None:
    await side.streams.read(block_ms=1)
    await side.judging.tend()


async def ready_group(side: TrainerSide) -> list[str]:
    """A group of three that nobody solved, and that waits for its teacher; returns the ids of its rollouts."""
    await side.dispatcher.open_groups(1, version=0)
    ids = await work_off(side.pool, lambda request: 0.0)
    await read(side)
    return ids


def take(side: TrainerSide) -> Group:
    (group,) = side.book.take(behind(0)) or []
    return group


def trained(group: Group) -> tuple[Batch, dict[str, str]]:
    batch, fates = make_batch(
        [group],
        step=1,
        lag_of=behind(0),
        temperature=1.0,
        kind="leave_one_out",
        credit=DISTILL,
        withhold_beyond=None,
    )
    return batch, {name: str(fate) for name, fate in fates.items()}


def settle(side: TrainerSide, group: Group) -> None:
    side.ledger.close_group(group, group.fates("trained"))


async def test_a_group_of_failures_waits_for_its_teacher_and_is_trained_on_its_log_probs(
    side: TrainerSide,
) -> None:
    ids = await ready_group(side)
    assert side.book.take(behind(0)) is None
    assert await teach_all(side.pool, logprob=-5.0) == ids
    await read(side)
    batch, fates = trained(group := take(side))
    assert fates == dict.fromkeys(ids, "trained")
    for sample in batch.samples:
        np.testing.assert_allclose(sample.advantages_T[sample.trained_T], -5.0 - SAMPLED, rtol=1e-6)
    settle(side, group)
    rows = side.judgements_made()
    assert [(row.fate, row.judge) for row in rows] == [("joined", "big@7")] * 3
    assert sum(row.num_taught_tokens for row in rows) == batch.num_trained_tokens
    for row in rows:
        assert row.reverse_kl_sum / row.num_taught_tokens == pytest.approx(SAMPLED + 5.0)


def with_step(change: Callable[[list[float]], list[float]]) -> Callable[[Judgement], Judgement]:
    """The judgement with the log-probs of its last turn changed."""

    def changed(made: Judgement) -> Judgement:
        *others, last = made.steps
        logprobs = change(list(unpack_float32s(last.logprobs)))
        return replace(made, steps=(*others, replace(last, logprobs=pack_float32s(logprobs))))

    return changed


def with_odd_bytes(made: Judgement) -> Judgement:
    *others, last = made.steps
    return replace(made, steps=(*others, replace(last, logprobs=last.logprobs[:-1])))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (with_step(lambda given: [*given[:-1], math.nan]), "a log-prob that is not finite"),
        (with_step(lambda given: [*given[:-1], -math.inf]), "a log-prob that is not finite"),
        (with_step(lambda given: [*given[:-1], 0.01]), "a log-prob of 0.0100, above 0"),
        (with_step(lambda given: given[:-1]), "log-probs for"),
        (with_step(lambda given: []), "0 log-probs for"),
        (with_odd_bytes, "0 log-probs for"),
        (lambda made: replace(made, steps=made.steps[:-1]), "0 log-probs for"),
        (lambda made: replace(made, steps=(made.steps[0], *made.steps)), "names a turn twice"),
    ],
)
async def test_a_judgement_that_lacks_a_usable_log_prob_fails_and_its_member_is_left_out(
    side: TrainerSide, change: Callable[[Judgement], Judgement], complaint: str
) -> None:
    ids = await ready_group(side)
    (first,) = await teach_all(side.pool, change, limit=1)
    await teach_all(side.pool)
    await read(side)
    batch, fates = trained(group := take(side))
    assert fates == {one: "unjudged" if one == first else "trained" for one in ids}
    assert {*batch.request_ids} == {*ids} - {first}
    settle(side, group)
    (failed,) = [row for row in side.judgements_made() if row.fate == "failed"]
    assert (failed.rollout_id, failed.num_taught_tokens) == (first, 0)
    assert complaint in failed.error


async def test_the_memory_of_log_probs_is_counted_before_they_arrive(side: TrainerSide) -> None:
    await ready_group(side)
    (group,) = side.book.unjudged
    samples = [sample for member in group.members.values() for sample in member.samples]
    expected = sum(sample.num_bytes + 4 * sample.num_trained_tokens for sample in samples)
    assert side.book.held_bytes == expected
    await teach_all(side.pool)
    await read(side)
    assert side.book.held_bytes == expected
    logprobs = [one for member in group.members.values() for one in (member.logprobs or {}).values()]
    assert sum(sample.num_bytes for sample in samples) + sum(one.nbytes for one in logprobs) == expected
    take(side)
    assert side.book.held_bytes == 0


async def test_a_teacher_that_fails_for_good_trains_nothing(side: TrainerSide) -> None:
    ids = await ready_group(side)
    await fail_all(side.pool)
    await read(side)
    batch, fates = trained(take(side))
    assert fates == dict.fromkeys(ids, "unjudged")
    assert batch.samples == ()


async def test_a_group_waits_for_its_teacher_however_long_it_takes(side: TrainerSide) -> None:
    await ready_group(side)
    (group,) = side.book.unjudged
    side.judging.waits.release(side.judging.waits._since[group.cursor] + 1e6)
    assert side.book.take(behind(100)) is None, "not even where it becomes too late"


async def test_a_run_whose_teacher_judges_nothing_ends_as_failing(side: TrainerSide) -> None:
    nothing = cast(Any, None)
    recipe = side.run.recipe
    side.books.recipe = replace(recipe, batch=replace(recipe.batch, max_failed_groups=2))
    steps = Steps(side.run, nothing, nothing, nothing)
    assert steps._end() is None
    for end in (None, "failing"):
        await ready_group(side)
        await fail_all(side.pool)
        await read(side)
        assert await steps._take([take(side)]) is None
        assert steps._end() == end
    assert side.said[-1] == "a whole batch was withheld or empty; enqueuing other groups"
    assert side.fates() == ["unjudged"] * 6


class Accumulating:
    """A learner that keeps the batches whose gradient it is to accumulate."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    async def call(self, name: str, batch: Batch) -> None:
        assert name == "accumulate"
        self.batches.append(batch)


async def test_a_streaming_step_accumulates_each_group_with_the_advantages_of_the_whole_batch(
    side: TrainerSide,
) -> None:
    nothing, learner = cast(Any, None), Accumulating()
    side.run.learner = cast(Any, learner)
    side.run.state.timeline.add(0, step=0)
    steps, groups = Steps(side.run, nothing, nothing, nothing), list[Group]()
    for logprob in (-5.0, None, -7.5):
        await ready_group(side)
        await (fail_all(side.pool) if logprob is None else teach_all(side.pool, logprob=logprob))
        await read(side)
        groups.append(take(side))
        await steps._accumulate(groups[-1:])
    whole, fates = steps._make_batch(groups)
    accumulated = [sample for batch in learner.batches for sample in batch.samples]
    assert [*fates.values()].count("unjudged") == 3
    assert len(learner.batches) == 2, "a group without its teacher has no gradient"
    for part, sample in zip(accumulated, whole.samples, strict=True):
        assert part.request_id == sample.request_id
        np.testing.assert_array_equal(part.advantages_T, sample.advantages_T)


async def test_a_restarted_trainer_has_the_log_probs_of_unsettled_members(side: TrainerSide) -> None:
    await ready_group(side)
    await teach_all(side.pool, limit=2, logprob=-5.0)
    await read(side)
    other = await side.restarted()
    await other.judging.tend()
    assert other.book.take(behind(0)) is None, "one has none yet"
    await teach_all(other.pool, logprob=-5.0)
    await read(other)
    batch, _ = trained(take(other))
    assert batch.num_trajectories == 3
    for sample in batch.samples:
        np.testing.assert_allclose(sample.advantages_T[sample.trained_T], -5.0 - SAMPLED, rtol=1e-6)
