"""The counts are of what is there, and say who fell silent."""

import time
from typing import Any

from arq.connections import ArqRedis

from pipeline import census, deadletters, keys, queue, stream, weights
from pipeline.census import Claimed, Queued, RunStatus, WorkerStatus
from pipeline.kinds import JUDGE
from pipeline.queue import Lease
from pipeline.request import Claim
from pipeline.trajectory import Failed, VersionSpan
from tests.pipeline import samples
from tests.pipeline.judging import judge_request, judgement

BROKEN = Failed(boundary="sandbox", message="gone", transient=True)


def worker(name: str, **fields: Any) -> WorkerStatus:
    given: dict[str, Any] = {
        "name": name,
        "slots": 4,
        "running": (),
        "finished": 0,
        "failed": 0,
        "started_at": time.time(),
        "updated_at": time.time(),
    }
    return WorkerStatus(**(given | fields))


async def taken(pool: ArqRedis, **fields: Any) -> Claim:
    request = samples.request(**fields)
    await queue.enqueue(pool, request)
    claim = await queue.claim(pool, request.id, "host/1")
    assert isinstance(claim, Claim)
    return claim


async def test_every_request_is_counted_where_it_is(pool: ArqRedis) -> None:
    await stream.open_reader(pool, samples.RUN)
    for _ in range(3):
        await queue.enqueue(pool, samples.request())
    held = await taken(pool)
    await queue.renew(pool, held, Lease(worker="host/1", attempt=1, claimed_at=1.0, phase="agent", turn=2))
    for _ in range(2):
        await stream.publish(pool, samples.trajectory(await taken(pool)))
    (read,) = await stream.read_new(pool, samples.RUN, count=1)
    dead = samples.trajectory(await taken(pool), outcome=BROKEN, reward=None)
    await deadletters.dead_letter(pool, dead, [deadletters.attempt_failure(dead.claim, BROKEN)])
    found = await census.run_census(pool, samples.RUN)
    rollouts = found.rollouts
    assert (rollouts.queued, rollouts.unread, rollouts.unacknowledged, rollouts.dead) == (3, 2, 1, 1)
    claims = {claim.request_id: claim for claim in rollouts.claimed}
    assert (claims[held.request.id].lease.turn, claims[held.request.id].max_turns) == (2, 20)
    assert rollouts.outcomes == {"submitted": 2, "failed:sandbox": 1}
    await stream.acknowledge(pool, samples.RUN, [(read.entry_id, read.head.request_id)])
    assert (await census.run_census(pool, samples.RUN)).rollouts.unacknowledged == 0


async def test_what_is_owed_comes_oldest_first(pool: ArqRedis) -> None:
    old, new = samples.request(enqueued_at=10.0), samples.request(enqueued_at=20.0)
    for request in (new, old):
        await queue.enqueue(pool, request)
    claim = await queue.claim(pool, new.id, "host/1")
    assert isinstance(claim, Claim)
    waiting, held = await census.open_requests(pool, samples.RUN)
    assert waiting == Queued(request_id=old.id, due_at=0.0, enqueued_at=10.0)
    assert isinstance(held, Claimed)


async def test_lag_is_of_what_arrived_since_the_newest_version(pool: ArqRedis) -> None:
    published_at = time.time()

    async def arrive(version_first: int, finished_at: float, **fields: Any) -> None:
        turn = samples.turn(versions=(VersionSpan(version_first, 0, 3),))
        claim = await taken(pool, **fields)
        await stream.publish(pool, samples.trajectory(claim, turns=(turn,), finished_at=finished_at))

    newest = weights.WeightVersion(
        run_id=samples.RUN,
        version=9,
        step=9,
        directory="/weights",
        num_bytes=1,
        published_at=published_at,
    )
    await weights.announce(pool, newest)
    await arrive(2, published_at - 1)
    await arrive(0, published_at + 1, purpose="eval")
    await arrive(7, published_at + 1)
    await arrive(9, published_at + 2)
    assert (await census.run_census(pool, samples.RUN)).lags == (0, 2)


async def test_a_trainer_and_a_worker_are_alive_while_they_beat(pool: ArqRedis) -> None:
    status = RunStatus(run_id=samples.RUN, phase="optimizer step")
    await census.beat_run(pool, status)
    await census.beat_worker(pool, worker("host/2"))
    await census.beat_worker(pool, worker("host/1"))
    assert await census.run_ids(pool) == [samples.RUN]
    assert (await census.run_census(pool, samples.RUN)).status == status
    assert [found.name for found in (await census.workers(pool))[0]] == ["host/1", "host/2"]
    assert (await census.run_census(pool, samples.RUN)).has_trainer
    assert 0 < await pool.ttl(keys.worker("host/1")) <= census.STATUS_EXPIRES_S


async def test_a_trainer_that_stops_beating_is_gone_and_what_it_said_last_is_kept(pool: ArqRedis) -> None:
    status = RunStatus(run_id=samples.RUN, phase="optimizer step")
    await census.beat_run(pool, status)
    assert await census.run_status(pool, samples.RUN) == status
    left_s = census.KEEP_RUN_STATUS_S - census.STATUS_EXPIRES_S - 1
    await pool.pexpire(keys.run_status(samples.RUN), int(left_s * 1000))
    assert await census.run_status(pool, samples.RUN) is None
    last, silent_s = await census.last_status(pool, samples.RUN)
    assert last == status
    assert silent_s > census.STATUS_EXPIRES_S
    assert not (await census.run_census(pool, samples.RUN)).has_trainer
    assert await census.last_status(pool, "another") == (None, 0.0)


async def test_how_a_run_ended_is_known_long_after_its_trainer_is_gone(pool: ArqRedis) -> None:
    status = RunStatus(run_id=samples.RUN, phase="stopped", ended="stopped by a signal at step 7")
    await census.beat_run(pool, status)
    assert await pool.ttl(keys.run_status(samples.RUN)) > 7 * 24 * 3600
    assert await census.run_status(pool, samples.RUN) == status


async def test_a_large_fleet_beats_in_a_slower_rhythm_and_is_believed_for_longer(pool: ArqRedis) -> None:
    assert await census.beat_worker(pool, worker("host/1")) == census.BEAT_S
    others = {f"host/{number}": time.time() for number in range(2, 2001)}
    await pool.zadd(keys.workers(), others)
    every_s = await census.beat_worker(pool, worker("host/1"))
    assert every_s == 2000 / census.BEATS_PER_S > census.BEAT_S
    await census.beat_worker(pool, worker("host/1"), every_s=every_s)
    assert await pool.ttl(keys.worker("host/1")) > 3 * every_s


async def test_a_heartbeat_says_which_kind_of_job_its_worker_claims(pool: ArqRedis) -> None:
    await census.beat_worker(pool, worker("host/1"))
    await census.beat_worker(pool, worker("host/2", kind=JUDGE.name))
    alive, _ = await census.workers(pool)
    assert {status.name: status.kind for status in alive} == {"host/1": "rollout", "host/2": "judge"}


async def test_a_worker_that_stops_beating_is_silent_until_it_says_goodbye(pool: ArqRedis) -> None:
    heard_at = time.time() - 60
    await census.beat_worker(pool, worker("host/1", updated_at=heard_at))
    assert (await census.workers(pool))[1] == {}
    await pool.delete(keys.worker("host/1"))
    assert await census.workers(pool) == ([], {"host/1": heard_at})
    await census.forget_worker(pool, "host/1")
    assert (await census.workers(pool))[1] == {}


async def test_a_worker_silent_for_long_is_forgotten(pool: ArqRedis) -> None:
    await census.beat_worker(pool, worker("host/1", updated_at=time.time() - 2 * 3600))
    await pool.delete(keys.worker("host/1"))
    assert (await census.workers(pool))[1] == {}


async def test_a_poisoned_request_does_not_hide_the_others(pool: ArqRedis) -> None:
    poisoned, fine = await taken(pool), await taken(pool)
    await pool.set(keys.request(poisoned.request.id), b"\xff rubbish")
    found = await census.run_census(pool, samples.RUN)
    assert [claim.request_id for claim in found.rollouts.claimed] == [fine.request.id]


async def test_unread_is_counted_also_after_a_deletion(pool: ArqRedis) -> None:
    await stream.open_reader(pool, samples.RUN)
    for _ in range(4):
        await stream.publish(pool, samples.trajectory(await taken(pool)))
    await stream.read_new(pool, samples.RUN, count=1)
    third = (await stream.newest_heads(pool, samples.RUN, 2))[1]
    await pool.xdel(keys.stream(samples.RUN), third.entry_id)
    found = await census.run_census(pool, samples.RUN)
    assert (found.rollouts.unread, found.rollouts.unacknowledged) == (2, 1)


async def test_a_fleet_keeps_its_name(pool: ArqRedis) -> None:
    assert await census.fleet_id(pool) == await census.fleet_id(pool)


async def test_a_claim_says_what_it_is_about_without_its_request_being_read(pool: ArqRedis) -> None:
    claim = await taken(pool)
    lease = Lease(
        worker="host/1", attempt=1, claimed_at=1.0, task_id="demo:calc-7", purpose="train", max_turns=9
    )
    await queue.renew(pool, claim, lease)
    await pool.set(keys.request(claim.request.id), b"\xff")
    (found,) = await census.open_requests(pool, samples.RUN)
    assert isinstance(found, Claimed)
    assert (found.task_id, found.max_turns) == ("demo:calc-7", 9)


async def test_bytes_that_the_learner_owes_a_checkpoint_are_counted(pool: ArqRedis) -> None:
    await stream.open_reader(pool, samples.RUN)
    for _ in range(3):
        await stream.publish(pool, samples.trajectory(await taken(pool)))
    read = await stream.read_new(pool, samples.RUN)
    sizes = [delivery.head.body_bytes for delivery in read]
    assert await stream.unacknowledged_bytes(pool, samples.RUN) == sum(sizes)
    await stream.acknowledge(pool, samples.RUN, [(read[0].entry_id, read[0].head.request_id)])
    await stream.acknowledge(pool, samples.RUN, [(read[0].entry_id, read[0].head.request_id)])
    found = await census.run_census(pool, samples.RUN)
    assert found.rollouts.unacknowledged_bytes == sum(sizes[1:])
    assert found.rollouts.finished_per_min == 3 * 60 / census.RATE_S


async def test_a_run_is_judged_once_it_has_asked_for_a_judgement(pool: ArqRedis) -> None:
    await stream.open_reader(pool, samples.RUN, JUDGE)  # as every trainer does
    assert (await census.run_census(pool, samples.RUN)).judging is None
    request = judge_request()
    await queue.enqueue(pool, request, JUDGE)
    asked = (await census.run_census(pool, samples.RUN)).judging
    assert asked is not None
    assert asked.queued == 1
    claim = await queue.claim(pool, request.id, "host/1", JUDGE)
    assert isinstance(claim, Claim)
    await stream.publish(pool, judgement(claim, 1.0), kind=JUDGE)
    (read,) = await stream.read_new(pool, samples.RUN, kind=JUDGE)
    await stream.acknowledge(pool, samples.RUN, [(read.entry_id, request.id)], JUDGE)
    answered = (await census.run_census(pool, samples.RUN)).judging
    assert answered is not None
    assert answered.num_outstanding == 0
