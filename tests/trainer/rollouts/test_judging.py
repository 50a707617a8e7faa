"""Judgements on the trainer's side: who is judged, what joins, and what changes nothing any more."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from benchmarks.scripted_fleet import work_off
from pipeline import census, connection, deadletters, keys, queue, request_store, stream, telemetry
from pipeline.judge import judge_request_id
from pipeline.kinds import JUDGE
from pipeline.message import encode
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from tests.pipeline.judging import fail_all, judge_all
from tests.trainer.trainer_side import RUN, TrainerSide
from tests.trainer.trajectories import behind
from trainer.recipe import CreditRecipe, JudgeRecipe
from trainer.records.journal_writer import Journal
from trainer.rollouts.groups import Group
from trainer.rollouts.judging import OUTAGE_S

RULE = JudgeRecipe(method="rule", name="commands")


@pytest.fixture
async def side(redis_url: str, redis: Redis, tmp_path: Path) -> AsyncIterator[TrainerSide]:
    pool = await connection.connect(redis_url)
    with Journal(tmp_path) as journal:
        made = TrainerSide(pool, journal, judge=RULE)
        await made.streams.recover()
        yield made
    await pool.aclose()


async def read(side: TrainerSide) -> None:
    await side.streams.read(block_ms=1)
    await side.judging.tend()


def take(side: TrainerSide) -> Group:
    (group,) = side.book.take(behind(0)) or []
    return group


def settle(side: TrainerSide, group: Group) -> None:
    side.ledger.close_group(group, group.fates("trained"))


async def ready_group(side: TrainerSide) -> list[str]:
    """A group of three that waits for its judgements; returns the ids of its rollouts."""
    await side.dispatcher.open_groups(1, version=0)
    ids = await work_off(side.pool)
    await read(side)
    return ids


async def test_each_graded_member_is_judged_in_the_trace_and_place_of_its_rollout(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    ids = await work_off(
        side.pool, lambda request: None if request.member == 0 else float(request.member == 1)
    )
    await read(side)
    open_ids = await queue.open_ids(side.pool, RUN, JUDGE)
    assert sorted(open_ids) == sorted(judge_request_id(one) for one in ids[1:]), (
        "the failed member is not judged"
    )
    request = await request_store.read(side.pool, open_ids[0], JUDGE)
    head = side.book.unjudged[0].members[1].head
    assert request is not None
    assert (request.rollout_id, request.task_id) == (head.request_id, head.task_id)
    assert request.traceparent == telemetry.group_wait(head.request_id)
    assert 0 < request.group_asked_at == side.book.enqueued_at(0)


async def test_a_group_waits_for_its_judgements_and_is_taken_with_them(side: TrainerSide) -> None:
    ids = await ready_group(side)
    assert side.book.take(behind(0)) is None
    await judge_all(side.pool, 1.0, None, limit=2)
    await read(side)
    assert side.book.take(behind(0)) is None, "one is not judged yet"
    await judge_all(side.pool, 1.0, None)
    await read(side)
    group = take(side)
    assert [member.scores for member in group.members.values()] == [{0: 1.0}] * 3, "an abstention is no score"
    assert side.judgements_made() == [], "they are settled with their group"
    settle(side, group)
    rows = side.judgements_made()
    assert [(row.rollout_id, row.fate) for row in rows] == [(one, "joined") for one in ids]
    assert [(turn.turn, turn.score, turn.unscored) for turn in rows[0].turns] == [
        (0, 1.0, None),
        (1, None, "abstained"),
    ]
    assert (rows[0].num_turns, rows[0].version_first) == (2, 0)
    pending = side.ledger.state(step=1, version=1, cursor=1).pending_judgements
    assert [request_id for _, request_id in pending] == [judge_request_id(one) for one in ids]


async def test_a_group_that_waited_long_enough_goes_on_without_and_says_so(side: TrainerSide) -> None:
    await ready_group(side)
    await judge_all(side.pool, 1.0, limit=1)
    await read(side)
    (group,) = side.book.unjudged
    since = side.judging.waits._since[group.cursor]
    side.judging.waits.release(since + RULE.wait_s - 1)
    assert side.book.take(behind(0)) is None
    side.judging.waits.release(since + RULE.wait_s + 0.1)  # the difference of two clock readings is rounded
    assert side.said == ["group 0 (t) waited 600 s for its judgements and goes on without 2 of 3"]
    group = take(side)
    assert [member.scores for member in group.members.values()] == [{0: 1.0}, None, None]


async def test_a_judgement_that_comes_after_a_step_took_its_group_changes_nothing(side: TrainerSide) -> None:
    ids = await ready_group(side)
    await judge_all(side.pool, 1.0)
    side.book.release(0)
    group = take(side)
    await read(side)
    assert [member.scores for member in group.members.values()] == [None] * 3
    assert side.judgements_made() == [], "the group is not settled"
    settle(side, group)
    rows = side.judgements_made()
    assert [(row.rollout_id, row.fate, row.scores) for row in rows] == [
        (one, "late", {0: 1.0}) for one in ids
    ]
    await read(side)
    assert len(side.judgements_made()) == 3
    assert len(side.ledger.state(step=1, version=1, cursor=1).pending_judgements) == 3


async def test_requests_of_a_group_that_is_trained_without_them_are_withdrawn(side: TrainerSide) -> None:
    await ready_group(side)
    side.book.release(0)
    group = take(side)
    await read(side)
    assert await queue.open_ids(side.pool, RUN, JUDGE) == []
    assert await judge_all(side.pool, 1.0) == []
    settle(side, group)
    assert [(row.fate, row.turns) for row in side.judgements_made()] == [("late", ())] * 3


async def test_nobody_needs_the_judgements_of_a_dropped_group(side: TrainerSide) -> None:
    await side.dispatcher.open_groups(1, version=0)
    await work_off(side.pool, lambda request: 1.0, limit=2)
    await read(side)
    await judge_all(side.pool, 1.0, limit=1)
    await work_off(side.pool, lambda request: 1.0)
    await read(side)
    assert side.fates() == ["zero_variance"] * 3
    assert await queue.open_ids(side.pool, RUN, JUDGE) != [], "one is answered, and not acknowledged"
    await read(side)
    assert sorted(row.fate for row in side.judgements_made()) == ["unneeded"] * 3
    assert len(side.ledger.state(step=1, version=1, cursor=1).pending_judgements) == 1


async def test_a_member_whose_judge_failed_for_good_has_no_scores_and_holds_nobody_up(
    side: TrainerSide,
) -> None:
    await ready_group(side)
    await fail_all(side.pool)
    await read(side)
    group = take(side)
    assert [member.scores for member in group.members.values()] == [None] * 3
    settle(side, group)
    assert {(row.fate, row.error) for row in side.judgements_made()} == {("failed", "request: no such rule")}


async def test_a_dead_letter_that_is_judged_after_all_joins_while_its_group_is_there(
    side: TrainerSide,
) -> None:
    await ready_group(side)
    (first, *_) = await queue.open_ids(side.pool, RUN, JUDGE)
    await fail_all(side.pool)
    await read(side)
    await deadletters.requeue(side.pool, RUN, first, JUDGE)
    await judge_all(side.pool, -1.0)
    await read(side)
    group = take(side)
    assert group.members[0].scores == {0: -1.0}
    judgement = group.members[0].judgement
    assert judgement is not None
    assert len(judgement.entries) == 2, "both entries are acknowledged with it"


async def test_a_judgement_delivered_twice_joins_once(side: TrainerSide) -> None:
    await ready_group(side)
    await judge_all(side.pool, 1.0, limit=1)
    (original,) = await stream.newest_heads(side.pool, RUN, 1, JUDGE)
    await side.pool.xadd(keys.stream(RUN, JUDGE), {"head": encode(original.head)})
    await judge_all(side.pool, 1.0)
    await read(side)
    group = take(side)
    copy = (await side.pool.xadd(keys.stream(RUN, JUDGE), {"head": encode(original.head)})).decode()
    settle(side, group)
    await read(side)
    assert len(side.judgements_made()) == 3, "a copy has no row"
    pending = side.ledger.state(step=1, version=1, cursor=1).pending_judgements
    assert len(pending) == 5, "but every entry is acknowledged"
    assert (copy, original.head.request_id) in pending


async def test_a_restarted_trainer_has_the_judgements_of_unsettled_members_and_no_others(
    side: TrainerSide,
) -> None:
    ids = await ready_group(side)
    await judge_all(side.pool, 0.5, limit=2)
    await read(side)
    other = await side.restarted()
    await other.judging.tend()
    assert other.book.take(behind(0)) is None
    await judge_all(other.pool, 0.5)
    await read(other)
    group = take(other)
    assert [member.scores for member in group.members.values()] == [{0: 0.5}] * 3
    settle(other, group)
    assert [row.rollout_id for row in other.judgements_made()] == ids


async def test_what_redis_forgot_is_enqueued_again_and_a_lost_place_in_the_queue_is_found(
    side: TrainerSide,
) -> None:
    await ready_group(side)
    first, second, _ = await queue.open_ids(side.pool, RUN, JUDGE)
    await side.pool.delete(keys.request(first, JUDGE))
    await side.pool.zrem(keys.open_requests(RUN, JUDGE), first)
    await side.pool.zrem(keys.queue(JUDGE), first, second)
    assert await side.recovery.replace_forgotten() == 1
    assert await side.judging.requests.sweep() == 1
    await side.judging.tend()
    assert len(await judge_all(side.pool, 1.0)) == 3


async def test_a_request_that_no_judge_can_read_fails_its_member_only(side: TrainerSide) -> None:
    await ready_group(side)
    (first, *_) = await queue.open_ids(side.pool, RUN, JUDGE)
    await side.pool.set(keys.request(first, JUDGE), b"\xc1")
    await queue.take(side.pool, "judge", 1, JUDGE)
    await side.judging.requests.sweep()
    await judge_all(side.pool, 1.0)
    await read(side)
    scores = [member.scores for member in take(side).members.values()]
    assert scores.count(None) == 1
    assert scores.count({0: 1.0}) == 2


async def test_the_end_of_a_run_leaves_no_judge_request_open(side: TrainerSide) -> None:
    await ready_group(side)
    await judge_all(side.pool, 1.0, limit=1)
    await side.requests.withdraw_training()
    await side.judging.requests.withdraw_unneeded()
    await side.streams.read(block_ms=1)
    assert [row.fate for row in side.judgements_made()] == ["unneeded"] * 3
    state = side.ledger.state(step=0, version=0, cursor=1)
    await side.streams.acknowledge(state)
    assert await queue.open_ids(side.pool, RUN, JUDGE) == []
    assert await stream.unacknowledged_bytes(side.pool, RUN, JUDGE) == 0


async def test_a_judge_that_the_recipe_no_longer_has_is_withdrawn_at_the_next_start(
    side: TrainerSide,
) -> None:
    await ready_group(side)
    other = TrainerSide(side.pool, side.journal)
    await other.recovery.restore(other.restored)
    assert await queue.open_ids(side.pool, RUN, JUDGE) == []
    assert take(other).rewards == {0: 0.0, 1: 1.0, 2: 0.0}, "nothing waits"
    assert [row.fate for row in other.judgements_made()] == ["unneeded"] * 3


async def test_votes_are_on_the_disk_before_their_judgement_is_acknowledged(
    side: TrainerSide, tmp_path: Path
) -> None:
    keeping = TrainerSide(side.pool, side.journal, judge=RULE, keep="all")
    with keeping.recorder:
        await ready_group(keeping)
        await judge_all(keeping.pool, 1.0)
        await read(keeping)
        await keeping.recorder.flush()
        stored = RolloutStore(tmp_path.parent / DIRECTORY)
        found = [one.rollout.judgement for one in stored.rollouts(lambda _: True)]
    assert [one.scores for one in found if one is not None] == [{0: 1.0}] * 3


async def judge_beats(side: TrainerSide, *, paused: str = "") -> None:
    now = time.time()
    await census.beat_worker(
        side.pool,
        census.WorkerStatus(
            name="host/1",
            slots=8,
            running=(),
            finished=0,
            failed=0,
            started_at=now,
            updated_at=now,
            paused=paused,
            kind=JUDGE.name,
        ),
    )


async def test_admission_is_closed_while_no_required_judge_works(side: TrainerSide) -> None:
    required = TrainerSide(side.pool, side.journal, judge=replace(RULE, required=True))
    presence = required.judging.presence
    await presence.look()
    assert presence.closed_because == "judge.required, and no judge is alive; start `python -m workers.judge`"
    await judge_beats(side, paused="engines do not answer")
    presence._looked_at = float("-inf")
    await presence.look()
    assert presence.closed_because == "judge.required, and every judge is paused: engines do not answer"
    await judge_beats(side)
    presence._looked_at = float("-inf")
    await presence.look()
    assert presence.closed_because == ""
    await side.judging.presence.look()
    assert side.judging.presence.closed_because == "", "a judge that is not required closes nothing"


async def test_groups_go_on_at_once_when_no_judge_has_worked_for_a_while(side: TrainerSide) -> None:
    await ready_group(side)
    presence = side.judging.presence
    await presence.look()
    await side.judging.tend()
    assert side.book.num_unjudged == 1, "judges that are restarted are back before"
    presence._seen_at -= OUTAGE_S
    presence._looked_at = float("-inf")
    await presence.look()
    await side.judging.tend()
    assert side.book.num_unjudged == 0
    assert [member.scores for member in take(side).members.values()] == [None] * 3
    await judge_beats(side)
    presence._looked_at = float("-inf")
    await presence.look()
    assert side.said == [
        "no judge is alive; start `python -m workers.judge`; groups are trained without judgements until one works",
        "a judge works again",
    ]


async def test_a_required_judgement_is_waited_for_whatever_the_time(side: TrainerSide) -> None:
    required = TrainerSide(side.pool, side.journal, judge=replace(RULE, required=True))
    await required.streams.recover()
    await ready_group(required)
    required.judging.presence._is_out = True
    required.judging.waits.release(float("inf"))
    assert required.book.take(behind(0)) is None
    await judge_all(required.pool, 1.0)
    await read(required)
    assert [member.scores for member in take(required).members.values()] == [{0: 1.0}] * 3


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1.5, -1e308])
async def test_a_score_that_is_none_fails_its_judgement_and_is_not_waited_for(
    side: TrainerSide, score: float
) -> None:
    ids = await ready_group(side)
    await judge_all(side.pool, score, limit=1)
    await judge_all(side.pool, 0.5)
    await read(side)
    assert not await side.pool.exists(keys.malformed(RUN, JUDGE))
    group = take(side)
    assert [member.scores for member in group.members.values()] == [None, {0: 0.5}, {0: 0.5}]
    settle(side, group)
    first = next(row for row in side.judgements_made() if row.rollout_id == ids[0])
    assert first.fate == "failed"
    assert "Expected `float`" in first.error


@pytest.mark.parametrize(
    "credit", [CreditRecipe(), CreditRecipe(method="outcome_then_steps", coefficient=0)], ids=["outcome", "0"]
)
async def test_nothing_waits_for_scores_that_are_not_read_and_they_are_measured_all_the_same(
    side: TrainerSide, credit: CreditRecipe
) -> None:
    unread = TrainerSide(side.pool, side.journal, judge=RULE, credit=credit)
    await unread.streams.recover()
    ids = await ready_group(unread)
    group = take(unread)
    settle(unread, group)
    await unread.judging.tend()
    assert await judge_all(side.pool, 0.5, limit=2) == ids[:2]
    await read(unread)
    late = [(row.rollout_id, row.fate, row.scores) for row in unread.judgements_made()]
    assert late == [(one, "late", {0: 0.5}) for one in ids[:2]]
    await unread.judging.requests.withdraw_unneeded(is_end=True)
    assert await queue.open_ids(side.pool, RUN, JUDGE) == [judge_request_id(one) for one in ids[:2]]
    assert [row.fate for row in unread.judgements_made()] == ["late"] * 3


async def test_a_judge_that_is_too_slow_for_the_measurement_is_not_asked_any_more(side: TrainerSide) -> None:
    slow = replace(RULE, wait_s=0)
    unread = TrainerSide(side.pool, side.journal, judge=slow, credit=CreditRecipe())
    await unread.streams.recover()
    await ready_group(unread)
    settle(unread, take(unread))
    await unread.judging.tend()
    assert await queue.open_ids(side.pool, RUN, JUDGE) == []
