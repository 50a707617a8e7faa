"""A request that is out of tries, or that no worker can decode, is dead-lettered with its evidence and blocks no other."""

import time

import msgspec
import pytest
from arq.connections import ArqRedis

from pipeline import census, deadletters, keys, queue, stream
from pipeline.message import MalformedMessage
from pipeline.request import Claim
from pipeline.trajectory import Failed
from tests.pipeline import samples
from tests.pipeline.claims import (
    BROKEN,
    acknowledge_all,
    claimed,
    dead_lettered,
    enqueued,
    lapse,
    queued_ids,
    taken,
)


async def test_a_failed_try_leaves_evidence_and_goes_back(pool: ArqRedis) -> None:
    claim = await taken(pool)
    failure = deadletters.attempt_failure(claim, BROKEN, detail="x" * 30_000)
    assert len(failure.detail) == 20_000, "the end of a long log is what tells"
    assert await queue.return_to_queue(pool, claim, wait_s=30.0, failure=failure)
    assert await deadletters.failures(pool, claim.request.id) == (failure,)
    assert await queue.take(pool, "host/2", 9) == [], "it waits its back-off out in the queue"
    (waiting,) = await census.open_requests(pool, samples.RUN)
    assert isinstance(waiting, census.Queued)
    assert 0 < waiting.due_at - time.time() <= 30


async def test_claims_that_end_without_a_word_are_counted(pool: ArqRedis) -> None:
    claim = await taken(pool)
    assert claim.num_unended == 0
    for number in (1, 2):
        await lapse(pool, claim)
        claim = await claimed(pool, claim.request.id)
        assert claim.num_unended == number
    await queue.return_to_queue(pool, claim)
    assert (await claimed(pool, claim.request.id)).num_unended == 2, "an orderly end is none of them"


async def test_an_unreadable_request_is_dead_lettered_by_who_takes_it(pool: ArqRedis) -> None:
    poison, fine = await enqueued(pool, enqueued_at=1.0), await enqueued(pool, enqueued_at=2.0)
    await pool.set(keys.request(poison.id), msgspec.msgpack.encode({"run_id": samples.RUN, "task": 7}))
    bad, good = await queue.take(pool, "host/1", 2)
    assert isinstance(bad, queue.Unclaimable)
    assert isinstance(good, Claim)
    assert (bad.request_id, good.request) == (poison.id, fine)
    assert list(await deadletters.listed(pool, samples.RUN)) == [poison.id]
    assert await queued_ids(pool) == {fine.id}


@pytest.mark.parametrize("key", ["claims", "request", "events"])
async def test_a_request_whose_keys_are_of_the_wrong_kind_holds_up_nobody(pool: ArqRedis, key: str) -> None:
    await census.beat_run(pool, census.RunStatus(run_id=samples.RUN, phase="waiting"))
    bad, *fine = [await enqueued(pool, enqueued_at=float(number)) for number in range(1, 4)]
    await pool.delete(getattr(keys, key)(bad.id))
    await pool.sadd(getattr(keys, key)(bad.id), "x")
    found = await queue.take(pool, "host/1", 3)
    claims = [one.request for one in found if isinstance(one, Claim)]
    if key == "events":
        assert claims == [bad, *fine], "what is for people only breaks nothing"
        return
    assert claims == fine
    assert list(await deadletters.listed(pool, samples.RUN)) == [bad.id]
    assert await queue.sweep(pool, samples.RUN) == []
    assert await deadletters.unanswered(pool, samples.RUN) == [bad.id]


async def test_a_request_that_cannot_even_tell_its_run_is_dead_lettered_where_it_is_owed(
    pool: ArqRedis,
) -> None:
    await census.beat_run(pool, census.RunStatus(run_id=samples.RUN, phase="waiting"))
    request = await enqueued(pool)
    await pool.set(keys.request(request.id), b"\xff rubbish")
    await queue.take(pool, "host/1", 1)
    (letter,) = (await deadletters.listed(pool, samples.RUN)).values()
    assert await queue.sweep(pool, samples.RUN) == []
    assert await deadletters.listed(pool, samples.RUN) == {request.id: letter}, (
        "it is not dead-lettered again"
    )
    await deadletters.drop(pool, samples.RUN, request.id)
    assert await queue.open_ids(pool, samples.RUN) == []


async def test_a_dead_letter_keeps_its_evidence(pool: ArqRedis) -> None:
    claim = await dead_lettered(pool)
    await acknowledge_all(pool)
    letters = await deadletters.listed(pool, samples.RUN)
    (failure,) = letters[claim.request.id].failures
    assert (failure.message, failure.detail) == (BROKEN.message, "Traceback")
    for key in (keys.request, keys.claims, keys.events, keys.body):
        assert await pool.ttl(key(claim.request.id)) == -1, key


async def test_a_requeued_request_has_a_fresh_budget(pool: ArqRedis) -> None:
    dead = await dead_lettered(pool)
    await acknowledge_all(pool)
    await deadletters.requeue(pool, samples.RUN, dead.request.id)
    assert await deadletters.listed(pool, samples.RUN) == {}
    assert await queued_ids(pool) == {dead.request.id}
    again = await claimed(pool, dead.request.id)
    assert again.attempt > dead.attempt, "the fence goes on counting"
    assert again.num_unended == 0
    assert await deadletters.failures(pool, again.request.id) == ()
    assert await stream.publish(pool, samples.trajectory(again)) == "published"


async def test_a_requeued_request_is_not_held_to_the_workers_that_died_of_it(pool: ArqRedis) -> None:
    claim = await taken(pool)
    for _ in range(3):
        await lapse(pool, claim)
        claim = await claimed(pool, claim.request.id)
    assert claim.num_unended == 3
    failed = samples.trajectory(claim, turns=(), outcome=BROKEN, reward=None)
    await deadletters.dead_letter(pool, failed, [deadletters.attempt_failure(claim, BROKEN)])
    await deadletters.requeue(pool, samples.RUN, claim.request.id)
    assert (await claimed(pool, claim.request.id)).num_unended == 0


async def test_a_dead_letter_is_of_the_class_of_its_last_failure(pool: ArqRedis) -> None:
    claim = await taken(pool)
    graded = Failed(boundary="grader", message="no verdict", transient=True)
    evidence = [deadletters.attempt_failure(claim, one) for one in (BROKEN, graded)]
    assert [one.kind for one in evidence] == ["infrastructure", "grader"]
    await deadletters.dead_letter(pool, samples.trajectory(claim, outcome=graded, reward=None), evidence)
    letter = await deadletters.find(pool, samples.RUN, claim.request.id)
    assert letter is not None
    assert letter.kind == "grader"


async def test_a_request_requeued_before_its_failure_was_settled_stays_owed(pool: ArqRedis) -> None:
    dead = await dead_lettered(pool)
    await deadletters.requeue(pool, samples.RUN, dead.request.id)
    await acknowledge_all(pool)
    assert await queue.open_ids(pool, samples.RUN) == [dead.request.id]
    assert await pool.ttl(keys.request(dead.request.id)) == -1


async def test_the_entry_of_a_first_death_settles_no_later_answer(pool: ArqRedis) -> None:
    await stream.open_reader(pool, samples.RUN)
    dead = await dead_lettered(pool)
    (first,) = await stream.read_new(pool, samples.RUN)
    await deadletters.requeue(pool, samples.RUN, dead.request.id)
    again = await claimed(pool, dead.request.id)
    assert await stream.publish(pool, samples.trajectory(again)) == "published"
    await stream.acknowledge(pool, samples.RUN, [(first.entry_id, first.head.request_id)])
    assert await queue.open_ids(pool, samples.RUN) == [dead.request.id]
    assert await pool.ttl(keys.body(dead.request.id)) == -1
    await acknowledge_all(pool)
    assert await queue.open_ids(pool, samples.RUN) == []


async def test_the_worker_that_dead_lettered_a_request_cannot_answer_it_after_a_requeue(
    pool: ArqRedis,
) -> None:
    claim = await dead_lettered(pool)
    await deadletters.requeue(pool, samples.RUN, claim.request.id)
    assert await stream.publish(pool, samples.trajectory(claim, outcome=BROKEN, reward=None)) == "fenced"


async def test_only_the_dead_are_requeued_or_dropped(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    with pytest.raises(KeyError):
        await deadletters.requeue(pool, samples.RUN, request.id)
    with pytest.raises(KeyError):
        await deadletters.drop(pool, samples.RUN, request.id)


async def test_a_dropped_request_is_forgotten(pool: ArqRedis) -> None:
    dead = await dead_lettered(pool)
    await deadletters.drop(pool, samples.RUN, dead.request.id)
    assert await deadletters.listed(pool, samples.RUN) == {}
    assert await queue.open_ids(pool, samples.RUN) == []
    assert await queue.sweep(pool, samples.RUN) == []


async def test_a_poisoned_request_is_dead_lettered_with_its_run(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    poison = msgspec.msgpack.encode({"run_id": samples.RUN, "id": request.id, "task": 7})
    await pool.set(keys.request(request.id), poison)
    with pytest.raises(MalformedMessage, match="task") as caught:
        await queue.claim(pool, request.id, "host/1")
    await deadletters.dead_letter_unreadable(pool, request.id, caught.value)
    letter = (await deadletters.listed(pool, samples.RUN))[request.id]
    assert "task" in letter.failures[0].message
    with pytest.raises(ValueError, match="task"):
        await deadletters.requeue(pool, samples.RUN, request.id)
    await deadletters.drop(pool, samples.RUN, request.id)


async def test_a_request_that_does_not_even_tell_its_run_is_kept_where_it_is_seen(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    await pool.set(keys.request(request.id), b"\xff rubbish")
    await deadletters.dead_letter_unreadable(pool, request.id, MalformedMessage("rubbish"))
    assert list(await deadletters.listed(pool, deadletters.UNREADABLE)) == [request.id]


async def test_sweep_dead_letters_a_poisoned_request_once(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    await pool.set(keys.request(request.id), msgspec.msgpack.encode({"run_id": samples.RUN}))
    await pool.zrem(keys.queue(), request.id)
    assert await queue.sweep(pool, samples.RUN) == []
    letters = await deadletters.listed(pool, samples.RUN)
    assert list(letters) == [request.id]
    assert await queue.sweep(pool, samples.RUN) == []
    assert await deadletters.listed(pool, samples.RUN) == letters
