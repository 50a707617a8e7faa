"""A request that was enqueued is answered, withdrawn or dead, whatever happens to those who work on it."""

import asyncio
import pickle
import time

import msgspec
import pytest
from arq.connections import ArqRedis
from arq.worker import Worker, func

from pipeline import census, connection, deadletters, events, keys, queue, request_store, stream, transitions
from pipeline.kinds import ROLLOUT
from pipeline.message import MalformedMessage
from pipeline.queue import Lease
from pipeline.request import Claim, RolloutRequest
from pipeline.trajectory import Failed
from tests.pipeline import samples

BROKEN = Failed(boundary="sandbox", message="container vanished", transient=True)


async def claimed(pool: ArqRedis, request_id: str, worker: str = "host/1") -> Claim:
    claim = await queue.claim(pool, request_id, worker)
    assert isinstance(claim, Claim)
    return claim


async def enqueued(pool: ArqRedis, **fields: object) -> RolloutRequest:
    request = samples.request(**fields)
    await queue.enqueue(pool, request)
    return request


async def taken(pool: ArqRedis, worker: str = "host/1", **fields: object) -> Claim:
    """A claim on a new request that arq has handed out, as it would be in a worker."""
    request = await enqueued(pool, **fields)
    return await claimed(pool, request.id, worker)


async def lapse(pool: ArqRedis, claim: Claim) -> None:
    """The worker dies and time passes: its lease is gone, and it is due again."""
    await pool.delete(keys.lease(claim.request.id))
    await pool.zadd(keys.QUEUE, {claim.request.id: time.time() * 1000})


async def buried(pool: ArqRedis) -> Claim:
    claim = await taken(pool)
    failed = samples.trajectory(claim, turns=(), outcome=BROKEN, reward=None)
    evidence = [deadletters.attempt_failure(claim, BROKEN, detail="Traceback")]
    assert await deadletters.dead_letter(pool, failed, evidence) == "published"
    return claim


async def queued_ids(pool: ArqRedis) -> set[str]:
    return {raw.decode() for raw in await pool.zrange(keys.QUEUE, 0, -1)}


async def test_a_claim_carries_the_request_and_counts_attempts(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    first = await claimed(pool, request.id)
    await queue.return_to_queue(pool, first)
    second = await claimed(pool, request.id, "host/2")
    assert first.request == second.request == request
    assert (first.attempt, second.attempt, second.worker) == (1, 2, "host/2")


async def test_one_claim_is_in_force_at_a_time(pool: ArqRedis) -> None:
    claim = await taken(pool)
    assert await queue.claim(pool, claim.request.id, "host/2") == "held"


async def test_a_claim_race_has_one_winner(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    answers = await asyncio.gather(*(queue.claim(pool, request.id, f"host/{n}") for n in range(8)))
    assert sum(isinstance(answer, Claim) for answer in answers) == 1
    assert [answer for answer in answers if not isinstance(answer, Claim)] == ["held"] * 7


async def test_what_is_gone_or_answered_cannot_be_claimed(pool: ArqRedis) -> None:
    claim = await taken(pool)
    await stream.publish(pool, samples.trajectory(claim))
    assert await queue.claim(pool, claim.request.id, "host/2") == "answered"
    assert await queue.claim(pool, "never-asked", "host/2") == "gone"


async def test_a_lease_says_where_the_claim_is_and_lapses_by_itself(pool: ArqRedis) -> None:
    claim = await taken(pool)
    lease = Lease(worker="host/1", attempt=1, claimed_at=1.0, phase="agent", turn=3)
    assert await queue.renew(pool, claim, lease)
    assert await queue.current_lease(pool, claim.request.id) == lease
    assert 0 < await pool.pttl(keys.lease(claim.request.id)) <= queue.LEASE_S * 1000


async def test_the_next_worker_takes_over_and_the_overtaken_one_is_fenced_off(pool: ArqRedis) -> None:
    old = await taken(pool)
    await lapse(pool, old)
    new = await claimed(pool, old.request.id, "host/2")
    lease = Lease(worker="host/1", attempt=old.attempt, claimed_at=old.claimed_at)
    assert not await queue.renew(pool, old, lease)
    assert await stream.publish(pool, samples.trajectory(old)) == "fenced"
    evidence = [deadletters.attempt_failure(old, BROKEN)]
    failed = samples.trajectory(old, outcome=BROKEN, reward=None)
    assert await deadletters.dead_letter(pool, failed, evidence) == "fenced"
    assert not await queue.return_to_queue(pool, old)
    assert await queue.is_leased(pool, old.request.id, new.attempt), (
        "an overtaken worker cannot let go for another"
    )
    assert not await queue.is_leased(pool, old.request.id, old.attempt)
    assert await stream.publish(pool, samples.trajectory(new)) == "published"


async def test_a_request_handed_back_need_not_wait_for_its_lease(pool: ArqRedis) -> None:
    claim = await taken(pool)
    assert await queue.return_to_queue(pool, claim)
    assert await queue.current_lease(pool, claim.request.id) is None
    assert (await claimed(pool, claim.request.id)).attempt == 2


async def test_a_withdrawn_request_stops_its_worker(pool: ArqRedis) -> None:
    claim = await taken(pool)
    await queue.withdraw(pool, samples.RUN, [claim.request.id])
    assert not await queue.renew(pool, claim, Lease(worker="host/1", attempt=1, claimed_at=1.0))
    assert await stream.publish(pool, samples.trajectory(claim)) == "withdrawn"
    assert await queue.open_ids(pool, samples.RUN) == []
    assert await queued_ids(pool) == set()
    assert await queue.claim(pool, claim.request.id, "host/2") == "gone"


async def test_a_withdrawn_request_leaves_nothing_for_ever(pool: ArqRedis) -> None:
    claim = await taken(pool)
    await queue.withdraw(pool, samples.RUN, [claim.request.id])
    left = [key for key in await pool.keys(f"*{claim.request.id}*") if await pool.ttl(key) == -1]
    assert left == []


async def test_an_id_asked_again_does_not_let_an_old_worker_in(pool: ArqRedis) -> None:
    old = await taken(pool)
    await queue.withdraw(pool, samples.RUN, [old.request.id])
    await lapse(pool, old)
    await queue.enqueue(pool, old.request)
    new = await claimed(pool, old.request.id, "host/2")
    assert await stream.publish(pool, samples.trajectory(old)) == "fenced"
    assert await stream.publish(pool, samples.trajectory(new)) == "published"


async def test_sweep_finds_what_redis_lost(pool: ArqRedis) -> None:
    lost, running, waiting = await enqueued(pool), await taken(pool), await enqueued(pool)
    answered, dead = await taken(pool), await buried(pool)
    await stream.publish(pool, samples.trajectory(answered))
    await pool.zrem(keys.QUEUE, lost.id, running.request.id)
    await pool.delete(keys.arq_job(lost.id))
    assert await queue.sweep(pool, samples.RUN) == [lost.id]
    assert await queued_ids(pool) == {lost.id, waiting.id}
    assert dead.request.id not in await queued_ids(pool)
    assert await pool.exists(keys.arq_job(lost.id))
    assert await queue.sweep(pool, samples.RUN) == [], "it may be called at any time"
    await pool.delete(keys.lease(running.request.id))
    assert await queue.sweep(pool, samples.RUN) == [running.request.id], "its worker breathes no more"


async def test_a_claim_out_of_the_queue_comes_back_with_its_next_breath(pool: ArqRedis) -> None:
    claim = await taken(pool)
    await pool.zrem(keys.QUEUE, claim.request.id)
    assert await queue.renew(pool, claim, Lease(worker="host/1", attempt=1, claimed_at=1.0))
    assert await queued_ids(pool) == {claim.request.id}


async def test_evaluations_go_first(pool: ArqRedis) -> None:
    training, evaluation = await enqueued(pool), await enqueued(pool, purpose="eval")
    assert [raw.decode() for raw in await pool.zrange(keys.QUEUE, 0, -1)] == [evaluation.id, training.id]


async def test_enqueueing_twice_queues_once(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    await queue.enqueue(pool, request)
    assert await queue.open_ids(pool, samples.RUN) == [request.id]
    assert await pool.zcard(keys.QUEUE) == 1


async def test_the_job_is_msgpack_and_carries_the_id_and_a_label(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    data = await pool.get(keys.arq_job(request.id))
    assert data is not None
    job = msgspec.msgpack.decode(data)
    assert (job["f"], job["a"]) == (ROLLOUT.name, [request.id])
    (label,) = await request_store.labels(pool, [request.id])
    assert (label.task_id, label.group_id) == (request.task.id, request.group_id)
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)


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


async def test_what_was_handed_back_cannot_be_touched_any_more(pool: ArqRedis) -> None:
    claim = await taken(pool)
    await queue.return_to_queue(pool, claim)
    assert not await queue.renew(pool, claim, Lease(worker="host/1", attempt=1, claimed_at=1.0))
    assert not await queue.return_to_queue(pool, claim)
    assert await stream.publish(pool, samples.trajectory(claim)) == "fenced"


async def test_claims_that_end_without_a_word_are_counted(pool: ArqRedis) -> None:
    claim = await taken(pool)
    assert claim.num_unended == 0
    for number in (1, 2):
        await lapse(pool, claim)
        claim = await claimed(pool, claim.request.id)
        assert claim.num_unended == number
    await queue.return_to_queue(pool, claim)
    assert (await claimed(pool, claim.request.id)).num_unended == 2, "an orderly end is none of them"


async def test_what_has_waited_before_is_taken_first_then_evaluations_then_by_age(pool: ArqRedis) -> None:
    retried = await taken(pool)
    young, old = await enqueued(pool, enqueued_at=20.0), await enqueued(pool, enqueued_at=10.0)
    evaluation = await enqueued(pool, purpose="eval", enqueued_at=30.0)
    await queue.return_to_queue(pool, retried)
    found = [*await queue.take(pool, "host/2", 3), *await queue.take(pool, "host/3", 3)]
    assert [one.request.id for one in found if isinstance(one, Claim)] == [
        *(retried.request.id, evaluation.id, old.id, young.id)
    ]


async def test_taking_reads_past_whatever_is_running(pool: ArqRedis) -> None:
    running = [await enqueued(pool) for _ in range(30)]
    assert len(await queue.take(pool, "large", 30)) == len(running)
    waiting = await enqueued(pool)
    (found,) = await queue.take(pool, "small", 1)
    assert isinstance(found, Claim)
    assert found.request == waiting


async def test_an_unreadable_request_is_buried_by_who_takes_it(pool: ArqRedis) -> None:
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


async def test_a_request_that_cannot_even_tell_its_run_is_buried_where_it_is_owed(pool: ArqRedis) -> None:
    await census.beat_run(pool, census.RunStatus(run_id=samples.RUN, phase="waiting"))
    request = await enqueued(pool)
    await pool.set(keys.request(request.id), b"\xff rubbish")
    await queue.take(pool, "host/1", 1)
    (letter,) = (await deadletters.listed(pool, samples.RUN)).values()
    assert await queue.sweep(pool, samples.RUN) == []
    assert await deadletters.listed(pool, samples.RUN) == {request.id: letter}, "it is not buried again"
    await deadletters.drop(pool, samples.RUN, request.id)
    assert await queue.open_ids(pool, samples.RUN) == []


async def test_a_refill_has_its_groups_place_in_the_queue(pool: ArqRedis) -> None:
    younger = await enqueued(pool, enqueued_at=20.0)
    refill = await enqueued(pool, enqueued_at=30.0, group_asked_at=10.0)
    found = await queue.take(pool, "host/1", 2)
    assert [one.request for one in found if isinstance(one, Claim)] == [refill, younger]


async def test_an_idle_worker_wakes_when_there_is_work(pool: ArqRedis) -> None:
    waiting = asyncio.create_task(queue.wait_for_work(pool, 60.0))
    await asyncio.sleep(0)
    await enqueued(pool)
    await waiting


async def test_a_life_is_written_down_as_it_happens(pool: ArqRedis) -> None:
    claim = await taken(pool)
    await queue.return_to_queue(pool, claim, failure=deadletters.attempt_failure(claim, BROKEN))
    await stream.publish(pool, samples.trajectory(await claimed(pool, claim.request.id, "host/2")))
    await acknowledge_all(pool)
    life = await events.events(pool, claim.request.id)
    assert [(event.what, event.attempt, event.worker, event.detail) for event in life] == [
        ("enqueued", 0, "", ""),
        ("claimed", 1, "host/1", ""),
        ("failed", 1, "host/1", "sandbox: container vanished"),
        ("claimed", 2, "host/2", ""),
        ("published", 2, "host/2", "submitted"),
        ("acknowledged", 0, "", ""),
    ]
    assert [event.at for event in life] == sorted(event.at for event in life)


async def test_a_life_without_an_end_is_kept_short(pool: ArqRedis) -> None:
    claim = await taken(pool)
    for _ in range(transitions.KEEP_EVENTS):
        await queue.return_to_queue(pool, claim)
        claim = await claimed(pool, claim.request.id)
    assert len(await events.events(pool, claim.request.id)) == transitions.KEEP_EVENTS


async def test_a_dead_letter_keeps_its_evidence(pool: ArqRedis) -> None:
    claim = await buried(pool)
    await acknowledge_all(pool)
    letters = await deadletters.listed(pool, samples.RUN)
    (failure,) = letters[claim.request.id].failures
    assert (failure.message, failure.detail) == (BROKEN.message, "Traceback")
    for key in (keys.request, keys.claims, keys.events, keys.body):
        assert await pool.ttl(key(claim.request.id)) == -1, key


async def acknowledge_all(pool: ArqRedis) -> None:
    await stream.open_reader(pool, samples.RUN)
    read = [
        *await stream.read_unacknowledged(pool, samples.RUN),
        *await stream.read_new(pool, samples.RUN, block_ms=1),
    ]
    await stream.acknowledge(pool, samples.RUN, [(one.entry_id, one.head.request_id) for one in read])


async def test_a_requeued_request_has_a_fresh_budget(pool: ArqRedis) -> None:
    dead = await buried(pool)
    await acknowledge_all(pool)
    await deadletters.requeue(pool, samples.RUN, dead.request.id)
    assert await deadletters.listed(pool, samples.RUN) == {}
    assert await queued_ids(pool) == {dead.request.id}
    again = await claimed(pool, dead.request.id)
    assert again.attempt > dead.attempt, "the fence goes on counting"
    assert again.num_unended == 0
    assert await deadletters.failures(pool, again.request.id) == ()
    assert await stream.publish(pool, samples.trajectory(again)) == "published"


async def test_a_request_requeued_before_its_failure_was_settled_stays_owed(pool: ArqRedis) -> None:
    dead = await buried(pool)
    await deadletters.requeue(pool, samples.RUN, dead.request.id)
    await acknowledge_all(pool)
    assert await queue.open_ids(pool, samples.RUN) == [dead.request.id]
    assert await pool.ttl(keys.request(dead.request.id)) == -1


async def test_the_worker_that_buried_a_request_cannot_answer_it_after_a_requeue(pool: ArqRedis) -> None:
    claim = await buried(pool)
    await deadletters.requeue(pool, samples.RUN, claim.request.id)
    assert await stream.publish(pool, samples.trajectory(claim, outcome=BROKEN, reward=None)) == "fenced"


async def test_only_the_dead_are_requeued_or_dropped(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    with pytest.raises(KeyError):
        await deadletters.requeue(pool, samples.RUN, request.id)
    with pytest.raises(KeyError):
        await deadletters.drop(pool, samples.RUN, request.id)


async def test_a_dropped_request_is_forgotten(pool: ArqRedis) -> None:
    dead = await buried(pool)
    await deadletters.drop(pool, samples.RUN, dead.request.id)
    assert await deadletters.listed(pool, samples.RUN) == {}
    assert await queue.open_ids(pool, samples.RUN) == []
    assert await queue.sweep(pool, samples.RUN) == []


async def test_a_poisoned_request_is_buried_with_its_run(pool: ArqRedis) -> None:
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


async def test_sweep_buries_a_poisoned_request_once(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    await pool.set(keys.request(request.id), msgspec.msgpack.encode({"run_id": samples.RUN}))
    await pool.zrem(keys.QUEUE, request.id)
    assert await queue.sweep(pool, samples.RUN) == []
    letters = await deadletters.listed(pool, samples.RUN)
    assert list(letters) == [request.id]
    assert await queue.sweep(pool, samples.RUN) == []
    assert await deadletters.listed(pool, samples.RUN) == letters


async def test_arq_hands_the_request_of_a_dead_worker_to_the_next(pool: ArqRedis) -> None:
    dead = await taken(pool, enqueued_at=time.time() - 5)
    await lapse(pool, dead)
    claims: list[Claim] = []

    async def job(_ctx: object, request_id: str, **_: str) -> None:
        claims.append(await claimed(pool, request_id, "host/2"))
        await stream.publish(pool, samples.trajectory(claims[-1]))

    worker = Worker(  # arq's own, as it comes
        functions=[func(job, name=ROLLOUT.name)],  # pyright: ignore[reportArgumentType]
        queue_name=keys.QUEUE,
        redis_pool=pool,
        burst=True,
        poll_delay=0.01,
        handle_signals=False,
        keep_result=0,
        job_serializer=request_store.encode_job,
        job_deserializer=request_store.decode_job,
    )
    await worker.async_run()
    assert [(claim.request.id, claim.attempt) for claim in claims] == [(dead.request.id, 2)]
    assert await queued_ids(pool) == set()
    assert await queue.sweep(pool, samples.RUN) == []


async def test_a_url_that_is_no_redis_is_the_users_mistake() -> None:
    with pytest.raises(ValueError, match="redis://"):
        await connection.connect("http://example")
