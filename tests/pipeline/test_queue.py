"""A request that was enqueued is answered, withdrawn or dead-lettered, whatever happens to its workers."""

import asyncio
import pickle
import time

import msgspec
import pytest
from arq.connections import ArqRedis
from arq.worker import Worker, func

from pipeline import connection, deadletters, keys, queue, request_store, stream, transitions
from pipeline.kinds import ROLLOUT
from pipeline.queue import Lease
from pipeline.request import Claim
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


async def test_a_claim_is_held_while_anything_is_left_of_its_lease(pool: ArqRedis) -> None:
    claim = await taken(pool)
    await pool.pexpire(keys.lease(claim.request.id), 30_000)  # far from its end on any machine
    assert await queue.claim(pool, claim.request.id, "host/2") == "held"


async def test_a_claim_race_has_one_winner(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    answers = await asyncio.gather(*(queue.claim(pool, request.id, f"host/{n}") for n in range(8)))
    assert sum(isinstance(answer, Claim) for answer in answers) == 1
    assert [answer for answer in answers if not isinstance(answer, Claim)] == ["held"] * 7


async def test_a_worker_gets_as_many_requests_as_it_asks_for_those_that_were_lost_first(
    pool: ArqRedis,
) -> None:
    lost = await taken(pool)
    for _ in range(3):
        await enqueued(pool)
    await lapse(pool, lost)
    found = await queue.take(pool, "host/2", 2)
    assert len(found) == 2
    assert isinstance(found[0], Claim)
    assert found[0].request.id == lost.request.id


async def test_what_is_answered_cannot_be_withdrawn(pool: ArqRedis) -> None:
    claim, other = await taken(pool), await taken(pool)
    await stream.publish(pool, samples.trajectory(claim))
    ids = [claim.request.id, other.request.id]
    assert await queue.withdraw(pool, samples.RUN, ids) == [other.request.id]


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
    answered, dead = await taken(pool), await dead_lettered(pool)
    await stream.publish(pool, samples.trajectory(answered))
    await pool.zrem(keys.queue(), lost.id, running.request.id)
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
    await pool.zrem(keys.queue(), claim.request.id)
    assert await queue.renew(pool, claim, Lease(worker="host/1", attempt=1, claimed_at=1.0))
    assert await queued_ids(pool) == {claim.request.id}


async def test_evaluations_go_first(pool: ArqRedis) -> None:
    training, evaluation = await enqueued(pool), await enqueued(pool, purpose="eval")
    assert [raw.decode() for raw in await pool.zrange(keys.queue(), 0, -1)] == [evaluation.id, training.id]


async def test_enqueueing_twice_queues_once(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    await queue.enqueue(pool, request)
    assert await queue.open_ids(pool, samples.RUN) == [request.id]
    assert await pool.zcard(keys.queue()) == 1


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


async def test_what_was_handed_back_cannot_be_touched_any_more(pool: ArqRedis) -> None:
    claim = await taken(pool)
    await queue.return_to_queue(pool, claim)
    assert not await queue.renew(pool, claim, Lease(worker="host/1", attempt=1, claimed_at=1.0))
    assert not await queue.return_to_queue(pool, claim)
    assert await stream.publish(pool, samples.trajectory(claim)) == "fenced"


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
    life = await request_store.events(pool, claim.request.id)
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
    assert len(await request_store.events(pool, claim.request.id)) == transitions.KEEP_EVENTS


async def test_arq_hands_the_request_of_a_dead_worker_to_the_next(pool: ArqRedis) -> None:
    dead = await taken(pool, enqueued_at=time.time() - 5)
    await lapse(pool, dead)
    claims: list[Claim] = []

    async def job(_ctx: object, request_id: str, **_: str) -> None:
        claims.append(await claimed(pool, request_id, "host/2"))
        await stream.publish(pool, samples.trajectory(claims[-1]))

    # arq's own worker, with none of our overrides.
    worker = Worker(
        functions=[func(job, name=ROLLOUT.name)],  # pyright: ignore[reportArgumentType]
        queue_name=keys.queue(),
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
