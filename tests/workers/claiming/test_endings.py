"""However an episode ends, its request is published, returned to the queue or dead-lettered, and only once."""

import logging

import pytest
from arq.connections import ArqRedis

from pipeline import deadletters, keys, queue
from pipeline.request import Claim, EpisodeStatus
from pipeline.trajectory import Trajectory
from tests.pipeline import samples
from tests.workers.claiming.worker import enqueued, failing, for_ever, life, published, solve, until, worker
from workers.claim import TailHandler


async def test_what_is_queued_is_played_and_published(pool: ArqRedis) -> None:
    ids = [await enqueued(pool) for _ in range(5)]
    async with worker(pool, solve) as claimer:

        async def all_published() -> bool:
            return all([await published(pool, request_id) for request_id in ids])

        await until(all_published)
    assert claimer.finished == 5
    assert await pool.zcard(keys.queue()) == 0
    left = [key for key in await pool.keys("arq:*") if key != b"arq:queue:health-check"]
    assert left == []


async def test_a_transient_failure_is_tried_again_until_its_budget_is_spent(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    async with worker(pool, failing("sandbox")) as claimer:
        await until(lambda: published(pool, request_id))
    letter = (await deadletters.listed(pool, samples.RUN))[request_id]
    assert (letter.kind, [failure.attempt for failure in letter.failures]) == ("infrastructure", [1, 2, 3])
    assert claimer.failed == 3
    assert await life(pool, request_id) == [
        "enqueued",
        *["claimed", "failed"] * 2,
        "claimed",
        "dead-lettered",
    ]


@pytest.mark.parametrize(
    ("boundary", "transient", "kind", "tries"),
    [
        ("sandbox", False, "environment", 1),
        ("engine", False, "policy", 1),
        ("request", False, "poison", 1),
        ("grader", True, "grader", 2),
        ("worker", True, "infrastructure", 3),
    ],
)
async def test_each_class_of_failures_has_its_budget(
    pool: ArqRedis, boundary: str, transient: bool, kind: str, tries: int
) -> None:
    request_id = await enqueued(pool)
    async with worker(pool, failing(boundary, transient=transient)):
        await until(lambda: published(pool, request_id))
    letter = (await deadletters.listed(pool, samples.RUN))[request_id]
    assert (letter.kind, len(letter.failures)) == (kind, tries)


async def test_a_bug_of_ours_is_evidence_with_what_was_logged(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    log = logging.getLogger("swerve.worker")
    handler = TailHandler()
    logging.getLogger().addHandler(handler)

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        log.warning("about to divide")
        raise ZeroDivisionError(str(1))

    async with worker(pool, stage):
        await until(lambda: published(pool, request_id))
    logging.getLogger().removeHandler(handler)
    failure = (await deadletters.listed(pool, samples.RUN))[request_id].failures[0]
    assert failure.message == "ZeroDivisionError: 1"
    assert "about to divide" in failure.detail
    assert "Traceback" in failure.detail
    assert failure.worker == "host/1"


async def test_a_request_that_kills_its_workers_is_poison(pool: ArqRedis) -> None:
    request_id = await enqueued(pool)
    for number in range(2):
        assert isinstance(await queue.claim(pool, request_id, f"dead/{number}"), Claim)
        await pool.delete(keys.lease(request_id))
        await pool.zadd(keys.queue(), {request_id: 0})

    async with worker(pool, for_ever):
        await until(lambda: published(pool, request_id))
    letter = (await deadletters.listed(pool, samples.RUN))[request_id]
    assert letter.kind == "poison"
    assert "2 workers died while running it" in letter.failures[-1].message
