"""A second kind of job goes the whole way through the same queue, and never meets a rollout."""

import asyncio
import time

import pytest
from arq.connections import ArqRedis

from pipeline import census, deadletters, keys, queue, request_store, stream
from pipeline.deadletters import AttemptFailure
from pipeline.judge import JudgeRequest, failed_judgement
from pipeline.kinds import JUDGE, ROLLOUT
from pipeline.queue import Lease, Unclaimable
from pipeline.request import Claim
from pipeline.trajectory import Failed
from tests.pipeline import samples
from tests.pipeline.judging import enqueued, judgement

RUN = samples.RUN
BROKEN = Failed(boundary="engine", message="no reply", transient=True)


async def taken(pool: ArqRedis, worker: str = "host/1") -> Claim[JudgeRequest]:
    (claim,) = await queue.take(pool, worker, 9, JUDGE)
    assert not isinstance(claim, Unclaimable)
    return claim


async def test_workers_of_one_kind_do_not_take_requests_of_another(pool: ArqRedis) -> None:
    judging, rollout = await enqueued(pool), samples.request()
    await queue.enqueue(pool, rollout)
    (found,) = await queue.take(pool, "host/1", 9)
    assert isinstance(found, Claim)
    assert found.request == rollout
    assert (await taken(pool)).request == judging
    assert await queue.open_ids(pool, RUN) == [rollout.id]
    assert await queue.open_ids(pool, RUN, JUDGE) == [judging.id]
    assert await queue.claim(pool, judging.id, "host/2") == "gone", "nothing is stored under a rollout's key"
    (waiting,) = await census.open_requests(pool, RUN, JUDGE)
    assert (waiting.request_id, type(waiting)) == (judging.id, census.Claimed)


async def test_a_lease_of_the_second_kind_is_renewed_and_expires(pool: ArqRedis) -> None:
    await enqueued(pool)
    old = await taken(pool)
    lease = Lease(worker="host/1", attempt=1, claimed_at=old.claimed_at, phase="judging")
    assert await queue.renew(pool, old, lease, JUDGE)
    assert await queue.current_lease(pool, old.request.id, JUDGE) == lease
    assert await queue.current_lease(pool, old.request.id) is None
    await pool.delete(keys.lease(old.request.id, JUDGE))
    await pool.zadd(keys.queue(JUDGE), {old.request.id: time.time() * 1000 - 1})
    new = await taken(pool, "host/2")
    assert (new.attempt, new.num_unended) == (2, 1)
    assert not await queue.renew(pool, old, lease, JUDGE)
    assert await stream.publish(pool, judgement(old), kind=JUDGE) == "fenced"


async def test_a_result_of_the_second_kind_is_published_read_and_acknowledged(pool: ArqRedis) -> None:
    await stream.open_reader(pool, RUN)
    await stream.open_reader(pool, RUN, JUDGE)
    request = await enqueued(pool)
    judged = judgement(await taken(pool), 0.5, -1.0)
    assert await stream.publish(pool, judged, kind=JUDGE) == "published"
    assert await stream.read_new(pool, RUN, block_ms=None) == []
    (delivery,) = await stream.read_new(pool, RUN, block_ms=None, kind=JUDGE)
    assert (delivery.head.request_id, delivery.head.num_steps) == (request.id, 2)
    assert await stream.read_body(pool, request.id, JUDGE) == judged
    assert await stream.unacknowledged_bytes(pool, RUN, JUDGE) > 0
    assert await stream.unacknowledged_bytes(pool, RUN) == 0
    await stream.acknowledge(pool, RUN, [(delivery.entry_id, request.id)], JUDGE)
    assert await queue.open_ids(pool, RUN, JUDGE) == []
    assert await stream.read_unacknowledged(pool, RUN, JUDGE) == []
    happened = [event.what for event in await request_store.events(pool, request.id, JUDGE)]
    assert happened == ["enqueued", "claimed", "published", "acknowledged"]


async def test_a_request_of_the_second_kind_is_dead_lettered_and_requeued(pool: ArqRedis) -> None:
    request = await enqueued(pool)
    claim = await taken(pool)
    evidence: AttemptFailure = deadletters.attempt_failure(claim, BROKEN)
    assert await queue.return_to_queue(pool, claim, failure=evidence, kind=JUDGE)
    claim = await taken(pool)
    assert await deadletters.failures(pool, request.id, JUDGE) == (evidence,)
    failed = failed_judgement(claim, BROKEN, claim.claimed_at)
    assert await deadletters.dead_letter(pool, failed, [evidence], JUDGE) == "published"
    assert list(await deadletters.listed(pool, RUN, JUDGE)) == [request.id]
    assert await deadletters.listed(pool, RUN) == {}
    with pytest.raises(KeyError):
        await deadletters.requeue(pool, RUN, request.id)
    await deadletters.requeue(pool, RUN, request.id, JUDGE)
    assert (await taken(pool)).request == request


async def test_what_cannot_be_read_or_was_lost_is_found_among_its_own_kind(pool: ArqRedis) -> None:
    lost, poison = await enqueued(pool), await enqueued(pool, "judge-2")
    await pool.zrem(keys.queue(JUDGE), lost.id)
    await pool.set(keys.request(poison.id, JUDGE), b"\xff rubbish")
    (bad,) = await queue.take(pool, "host/1", 9, JUDGE)
    assert isinstance(bad, Unclaimable)
    assert "JudgeRequest" in bad.reason
    assert await queue.sweep(pool, RUN) == []
    assert await queue.sweep(pool, RUN, JUDGE) == [lost.id]
    assert await request_store.read(pool, lost.id, JUDGE) == lost
    assert await queue.withdraw(pool, RUN, [lost.id], JUDGE) == [lost.id]
    assert lost.id not in await queue.open_ids(pool, RUN, JUDGE)


async def test_an_idle_worker_is_woken_by_its_own_kind(pool: ArqRedis) -> None:
    waiting = asyncio.create_task(queue.wait_for_work(pool, 60.0, JUDGE))
    await queue.enqueue(pool, samples.request())
    assert await pool.llen(keys.wake()) == 1  # pyright: ignore[reportGeneralTypeIssues]
    assert not waiting.done()
    await enqueued(pool)
    await waiting


async def test_no_key_is_of_two_kinds(pool: ArqRedis) -> None:
    await enqueued(pool)
    await taken(pool)
    ours = {key.decode() for key in await pool.keys("*")}
    assert {key.partition(":")[0] for key in ours} == {JUDGE.prefix, "arq"}
    assert JUDGE.prefix != ROLLOUT.prefix
